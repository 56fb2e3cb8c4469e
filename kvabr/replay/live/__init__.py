"""Live replay: real bytes over a real transport, through a link that a recorded trace shapes.

Three processes, as between machines: an origin, a shaper that plays the link, and the subscriber, which is this one.
The report is the simulator's, so the two can be held against each other. Nothing in here decides anything about a
play: the session, its policies and the client are those that run anywhere else.
"""
