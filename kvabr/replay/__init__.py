"""Replay network traces: a link model, simulated and live plays, the clairvoyant bound, and reports."""
