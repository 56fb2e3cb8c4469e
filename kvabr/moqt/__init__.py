"""Media over QUIC Transport (draft-ietf-moq-transport), sans-I/O: wire format and session, drafts 22 and 20.

`kvabr.link` and `kvabr.server` connect a `MoqtSession` to streams of QUIC or QMux. Input from a peer is hostile: every
length is checked before anything is stored, and each fault carries the draft's code for closing the session.
"""
