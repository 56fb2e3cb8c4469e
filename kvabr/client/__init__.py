"""Find a prompt's cache at an origin, play it before a deadline, and return it as tensors.

Entry points are `AsyncClient` and its blocking twin `Client`. The layers down to the socket: `driver.Driver` runs the
player's session, `sources.PlaySource` is a play's view of a peer, `transfer.downloads.Downloads` gets each group once
for all plays, `transfer.peer.Peer` dials and redials, and `link.moqt.connection` speaks MoQT over `link.quic` or
`link.tcp`.

A group is copied once, into its transfer's buffer, and hashed once; the codec decodes from views of that buffer.
"""
