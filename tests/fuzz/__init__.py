"""Hostile input for every parser: one registry of targets, and three ways to feed them.

targets       target.py says what one is; wire, sessions, documents, files and groups define them; registry lists them
at random     mutation.py: valid bytes, mutated; a moment of it is a test, `tools/fuzz` runs it for long
guided        guided.py, with atheris: mutations that reach new code are kept and mutated further
C             native/*.c, with libFuzzer: the same for the compiled coder, without Python in between
corpus/*.txt  inputs that the guided runs have found, minimised; the tests feed them all
"""
