"""QMux version 1 (draft-ietf-quic-qmux): QUIC's streams on one ordered byte stream, such as TLS over TCP.

No sockets, no clock, no threads: `QmuxConnection` takes bytes in and gives bytes out. Input from a peer is hostile:
every length is checked before anything is kept for it, and a connection holds no more than one incomplete frame header.
"""
