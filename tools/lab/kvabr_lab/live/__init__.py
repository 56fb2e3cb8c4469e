"""Live replay: real bytes over a real transport, through a link shaped by a recorded trace (`kvabr replay --live`).

Plays of caches that are still being prefilled are something else: `kvabr.replay.live_bound` simulates them.

It runs three processes: an origin, a shaper that emulates the link, and the player (this process). The report has the
simulator's format, so that the two can be compared. Session, policies and client are the same as everywhere else.
"""
