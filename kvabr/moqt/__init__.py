"""Media over QUIC Transport (draft-ietf-moq-transport), sans-I/O: wire format and session, drafts 22 and 20.

`kvabr.link` and `kvabr.server` connect a `MoqtSession` to streams of QUIC or QMux. Input from a peer is untrusted:
every length is checked before data is stored, and each fault has the draft's code for closing the session.
"""
