"""Policies of other systems and of video players, for comparison.

They can be selected on the command line like kvabr's policies (entry points ``kvabr.policies``).
"""
