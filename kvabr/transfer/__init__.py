"""Transfers of groups: each is a `GroupTransfer`, filled by one source at a time and read by any number of readers."""
