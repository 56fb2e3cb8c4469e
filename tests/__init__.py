"""Tests of kvabr; they mirror its packages."""
