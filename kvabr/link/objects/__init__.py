"""Plays out of object stores and plain HTTP servers: places, and the schedule of ranges."""
