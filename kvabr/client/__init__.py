"""Finds a prompt's cache at an origin, plays it before a deadline, and hands over one tensor.

`AsyncClient` and its blocking twin `Client` are the entry points, for small programs and serving nodes alike. Between
`AsyncClient.play` and the socket there are five layers:

1. `driver.Driver` runs the player's session: clock, downloads, decoding, engine. Policies decide.
2. `play_connection.PlayConnection` is the play's view of a peer: the local store, priorities by deadline.
3. `play_connection.SharedTransfers` fetches a group once for all plays that want it.
4. `transfer.redial` dials again when a connection is lost.
5. `link.moqt.connection` speaks MoQT (`moqt.session`, which does no I/O) over `link.quic` or `link.tcp`, which own the
   socket.

On the way back a group is copied once, from QUIC's packets or the socket into the buffer of its transfer, which the
other layers pass on as views and the codec decodes from. It is hashed once.
"""
