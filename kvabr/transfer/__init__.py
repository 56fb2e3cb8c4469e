"""Groups on their way: one `GroupTransfer` each, filled by one source at a time and read by any number of readers."""
