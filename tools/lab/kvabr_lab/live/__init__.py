"""Live replay: real bytes over a real transport, through a link shaped by a recorded trace (`kvabr replay --live`).

Origin, shaper (which emulates the link) and player are three processes. The report has the simulator's format.
"""
