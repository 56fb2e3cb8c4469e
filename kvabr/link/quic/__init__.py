"""QUIC's streams, by qh3 or aioquic."""
