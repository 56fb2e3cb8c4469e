"""Replay network traces: a link model, simulated and real plays, the clairvoyant bound, and reports."""
