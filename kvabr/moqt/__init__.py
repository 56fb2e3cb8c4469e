"""Media over QUIC Transport (draft-ietf-moq-transport), sans-I/O: wire format and session, drafts 18 and 16.

Bytes of streams go in, events and bytes to send come out. No sockets, no clock, no QUIC: `kvabr.quic.connect` and
`kvabr.server.server` connect a `Session` to a QUIC library. What a peer sends is hostile until parsed: every
length is bounded before anything is kept, and a fault names the code that the draft wants the session closed with.
"""
