"""Finds a prompt's cache at an origin, plays it before a deadline, and hands over one tensor.

`AsyncClient` and its blocking twin `Client` are the entry points, for small programs and serving nodes alike. Between
`AsyncClient.play` and the socket there are five layers:

1. `driver.Driver` runs the player's session: clock, downloads, decoding, engine. Policies decide.
2. `sources.PlaySource` is the play's view of a peer: digests, priorities by deadline.
3. `downloads.Downloads` gets a group once for all plays that want it, from the client's store or from the peer.
4. `transfer.peer.Peer` dials, probes and dials again, on one connection or several.
5. `link.moqt.connection` speaks MoQT (`moqt.session`, which does no I/O) over `link.quic` or `link.tcp`, which own the
   socket.

On the way back a group is copied once, from QUIC's packets or the socket into the buffer of its transfer, which the
other layers pass on as views and the codec decodes from. It is hashed once.
"""
