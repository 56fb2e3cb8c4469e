"""The commands that the laboratory adds to `kvabr`: one file each, by entry points ``kvabr.commands``."""
