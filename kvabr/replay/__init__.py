"""Replay: traces in, a link model, simulated plays, the clairvoyant bound, and reports of what happened."""
