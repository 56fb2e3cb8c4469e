"""MoQT over QUIC: endpoint, connection and reconnect, on qh3 or aioquic."""
