"""Plays out of object stores and plain HTTP servers: where things are, and which range goes when."""
