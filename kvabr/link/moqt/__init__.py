"""MoQT on any `StreamTransport`: endpoint, connection and dialling."""
