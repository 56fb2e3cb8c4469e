"""The command line: `main` lists the commands; every other file is one command, or code for several."""
