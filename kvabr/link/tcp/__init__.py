"""QMux streams, over TLS on TCP or over TCP alone."""
