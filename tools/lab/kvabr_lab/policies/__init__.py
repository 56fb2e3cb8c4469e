"""Rivals: the controllers of other systems and of video players, for comparison.

They are named on the command line like those of kvabr (entry points ``kvabr.policies``).
"""
