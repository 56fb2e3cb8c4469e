"""QUIC streams, with qh3 or aioquic."""
