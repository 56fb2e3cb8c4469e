"""Tests of kvabr. Property tests have no time limit of their own: machines that run tests are busy ones."""

from hypothesis import settings

settings.register_profile("kvabr", deadline=None)
settings.load_profile("kvabr")
