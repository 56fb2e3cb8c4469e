"""QMux version 1 (draft-ietf-quic-qmux): QUIC's streams on one ordered byte stream, such as TLS over TCP.

No I/O: `QmuxConnection` takes and returns bytes. Input from a peer is hostile: every length is checked before anything
is stored, and a connection buffers at most one incomplete frame header.
"""
