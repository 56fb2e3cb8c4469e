"""Live replay: real bytes over a real transport, through a link shaped by a recorded trace (`kvabr replay --live`).

Plays of caches during their prefill are simulated by `kvabr.replay.live_bound`.

There are three processes: an origin, a shaper that emulates the link, and the player (this process). The report has the
simulator's format for comparison. Session, policies and client are the usual ones.
"""
