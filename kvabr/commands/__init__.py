"""The commands of `kvabr`, one file each: `add` declares one, `run` does it."""
