"""Servers: the origin, the relay, tokens, certificates and metrics."""
