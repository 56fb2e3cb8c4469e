"""A node that plays caches serves them on: the second node of a rack fetches from the first.

It is a relay (`kvabr.server.relay`) that shares the client's store of groups. What plays have fetched is there, checked
by its digest; what is not comes from the client's origin, once, and is then there for plays as well. What an engine has
computed, or was given by approximation, is never in that store. Neighbours, routers and agents may have it fetch what
will be played there next (`kvabr.node.hints`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from kvabr.client.async_client import AsyncClient
from kvabr.client.peers import PeerLike
from kvabr.link.moqt.options import check_token
from kvabr.node.hints import KEEP_S, NodeHints
from kvabr.server.certificates import ServerTls, check
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.relay import Relay
from kvabr.server.seen_prompts import SeenPrompts
from kvabr.server.server import Server, Tcp
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_MEMORY_BYTES = 256 << 20


@asynccontextmanager
async def serving(
    client: AsyncClient,
    host: str,
    port: int,
    tls: ServerTls,
    *,
    token: str,
    origin: PeerLike = None,
    memory_bytes: int = _MEMORY_BYTES,
    limits: ServerLimits | None = None,
    tcp: Tcp = "tls",
    metrics: Metrics | None = None,
    log: FilteringBoundLogger | None = None,
    prompts: SeenPrompts | None = None,
    most_keep_s: float = KEEP_S,
) -> AsyncIterator[Server]:
    """Serve on what a client's plays have fetched, and what its origin has.

    It runs on the client's event loop, which it shares with the plays. Leave it before the client is closed.

    Args:
        client: the client; the groups that it keeps are bounded by its `Limits`.
        host: name or address to bind.
        port: UDP and TCP port; 0 takes a free one, see `Server.address`.
        tls: certificate and key.
        token: that neighbours must show. They may read what the client's own token opens.
        origin: whom it asks for what plays have not fetched, as a play names a peer; None: the client's only origin.
            Never a neighbour that serves on: two nodes that ask each other get no answer.
        memory_bytes: bound on groups that are on their way to neighbours, and an eighth of it, but at least
            `kvabr.server.relay.LEAST_BYTES`, on catalogs.
        limits: what neighbours may take.
        tcp: as of `Server`.
        metrics: counts what is served.
        log: receives events; None: structlog's own logger.
        prompts: hears which prompts plays look up, with their tokens unless they are salted, and which the origin takes
            back, for KV events.
        most_keep_s: longest time for which it keeps what others say will be played, seconds; 0: it is not kept.

    Raises:
        UsageError: the token is none, or the client has no origin, or several and none was named.
        TransportError: the origin cannot be reached, the address is in use, or the certificate cannot be used.
    """
    if not token:
        raise UsageError("a node serves on what its own token opens: give a token that neighbours must show")
    check_token(token, "the token of neighbours")
    check(tls)
    if origin is None and len(client.origins) > 1:
        raise UsageError("the client has several origins: name one that is no neighbour which serves on, origin=...")
    upstream = await client.connect(client.origins if origin is None else origin)
    counts, told = metrics or Metrics(), log or structlog.get_logger()
    before, client.on_found = client.on_found, None if prompts is None else prompts.played
    hints = NodeHints(client, origin, told, most_keep_s=most_keep_s)
    async with (
        Relay(
            upstream,
            told,
            counts,
            memory_bytes=memory_bytes,
            token=token,
            store=client.store,
            prompts=prompts,
            fetch_ahead=hints.fetch,
        ) as relay,
        Server(relay, host, port, tls, limits or ServerLimits(), told, counts, quic="auto", tcp=tcp) as server,
    ):
        try:
            yield server
        finally:
            client.on_found = before
            await hints.close()
