"""Data types that every other package shares. This package imports nothing else of kvabr."""
