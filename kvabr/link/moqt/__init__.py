"""MoQT on any `StreamTransport`: endpoint, connection, dial and reconnect."""
