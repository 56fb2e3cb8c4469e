"""The command line, one file per command: `add` declares the command, `run` executes it."""
