"""Recomputing what would miss the deadline: the cost of a prefill, the planner, the protocol of an engine."""
