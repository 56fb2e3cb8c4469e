"""Plays from object stores and plain HTTP servers: locations of groups, and the schedule of GETs."""
