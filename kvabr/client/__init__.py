"""Find a prompt's cache at an origin, play it before a deadline, and return it as tensors.

Entry points are `AsyncClient` and its blocking twin `Client`. Five layers lie between `AsyncClient.play` and the
socket:

1. `driver.Driver` runs the player's session: clock, downloads, decoding, engine. Policies decide. 2.
`sources.PlaySource` is the play's view of a peer: digests, priorities by deadline. 3. `downloads.Downloads` gets each
group once for all plays, from the client's store or the peer. 4. `transfer.peer.Peer` dials, probes and redials. 5.
`link.moqt.connection` speaks MoQT (`moqt.session`, without I/O) over `link.quic` or `link.tcp`, which own the socket.

A group is copied once, into its transfer's buffer, and hashed once; the codec decodes from views of that buffer.
"""
