"""The origin on moq-rs, a QUIC and MoQT stack in Rust: gigabits, drafts 14 to 22, and moq-lite among its own.

What it cannot do: groups larger than 32 MiB, which it refuses; GOAWAY, instead of which requests are refused with that
code while the server drains; object properties.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from kvabr.server.metrics import Metrics
from kvabr.server.moq_listen import MoqListener, claim_routes
from kvabr.server.moq_peer import MoqPeer
from kvabr.server.server import ServerLimits, ServerTls
from kvabr.store.asset_index import Library
from kvabr.store.grants import Grant

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_POLL_S = 0.01


class MoqServer(MoqListener):
    """Serves a library of assets."""

    def __init__(
        self,
        library: Library,
        host: str,
        port: int,
        tls: ServerTls,
        limits: ServerLimits,
        log: FilteringBoundLogger,
        metrics: Metrics,
    ) -> None:
        """See `Server`.

        Raises:
            TransportError: moq-rs is not installed.
        """
        super().__init__(host, port, tls, limits, log, metrics)
        self.holdings = library
        self.peers: set[MoqPeer] = set()
        self.requests = 0
        """Under way, of all sessions."""
        self._buffered = 0

    def buffered(self, change: int = 0) -> int:
        """Bytes that were handed over and not sent yet, of all sessions, after a change."""
        if change:
            self._buffered += change
            self.metrics.buffered_bytes.set(self._buffered)
        return self._buffered

    async def drain(self, grace_s: float) -> None:
        """See `Server.drain`; for want of a GOAWAY new requests are refused with that code."""
        self.draining = True
        until = time.monotonic() + grace_s
        while any(peer.busy for peer in self.peers) and time.monotonic() < until:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_POLL_S)  # moq-rs tells nobody when it has sent something
        await self.say_goodbye(until - time.monotonic())
        await self.close()

    def admit(self, request: Any, token: bytes | None) -> tuple[Grant, list[Any]] | None:
        """See `MoqListener.admit`: what it may read, and an origin of its own, where it sees nothing of the others."""
        grant = self.holdings.admit(token)
        if grant is None:
            return None
        origin = self._moq.OriginProducer(cache_capacity_bytes=None)
        request.set_publish(origin)
        return grant, claim_routes(self._moq, origin)

    async def attend(self, session: Any, guest: tuple[Grant, list[Any]]) -> None:
        """See `MoqListener.attend`."""
        grant, routes = guest
        self.log.info("connected", grant=grant.name, protocol="moq")
        peer = MoqPeer(self._moq, self, session, routes, grant)
        self.peers.add(peer)
        try:
            await peer.run()
        finally:
            self.peers.discard(peer)
