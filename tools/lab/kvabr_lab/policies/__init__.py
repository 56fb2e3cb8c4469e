"""Rivals: the controllers of other systems and of video players, which policies are compared with.

They are named on the command line like those of kvabr (entry points ``kvabr.policies``).
"""
