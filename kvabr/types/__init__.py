"""Data types that all other packages share. This package imports nothing else of kvabr."""
