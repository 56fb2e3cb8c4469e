"""Groups on their way: one `Transfer` for each, filled by one source at a time and read by everyone who wants it."""
