"""The origin on moq-rs, a QUIC and MoQT stack in Rust: gigabits, drafts 14 to 22, and moq-lite among its own.

What it cannot do: groups larger than 32 MiB, which it refuses; GOAWAY, instead of which requests are refused with that
code while the server drains; object properties.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from kvabr.errors import TransportError
from kvabr.origin.holdings import Library
from kvabr.origin.metrics import Metrics
from kvabr.origin.moqpeer import MoqPeer
from kvabr.origin.server import Server, ServerLimits, ServerTls
from kvabr.transport import moqlib

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_POLL_S = 0.01
_GOODBYE_S = 0.2
"""Seconds for the last packets to leave."""
_UNAUTHORIZED = 401
_BUSY = 503
"""What moq-rs makes of these: UNAUTHORIZED, and a code of the application's."""


class MoqServer(Server):
    """Serves a library of assets."""

    backend = "moq"

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
        super().__init__(library, host, port, tls, limits, log, metrics)
        self._moq = moqlib.load()
        self._server: Any = None
        self._address = host, port
        self.peers: set[MoqPeer] = set()
        self.requests = 0
        """Under way, of all sessions."""
        self.draining = False
        self._buffered = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """See `Server.start`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        server = self._moq.Server(
            f"{host}:{self.port}",
            tls_cert=[str(self.tls.certfile)],
            tls_key=[str(self.tls.keyfile)],
            publish=self._moq.OriginProducer(cache_capacity_bytes=0),
        )
        try:
            await server.__aenter__()
        except self._moq.Error as error:
            said = moqlib.explain(self._moq, error)
            raise TransportError(f"{host}:{self.port}: cannot be bound ({said})") from error
        self._server = server
        bound, _, port = server.local_addr.rpartition(":")
        self._address = bound.strip("[]"), int(port)
        self._spawn(self._accept())

    @property
    def address(self) -> tuple[str, int]:
        """See `Server.address`."""
        return self._address

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
        if self.peers and grace_s > 0:
            await asyncio.sleep(min(_GOODBYE_S, max(0.0, until - time.monotonic())))
        await self.close()

    async def close(self) -> None:
        """See `Server.close`."""
        server, self._server = self._server, None
        if server is None:
            return
        for peer in list(self.peers):
            peer.close()
        await asyncio.sleep(_GOODBYE_S if self.peers else 0)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await moqlib.close(server)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        with contextlib.suppress(self._moq.Error):
            async for request in self._server:
                self._spawn(self._session(request))

    async def _session(self, request: Any) -> None:
        moq, limits, counted = self._moq, self.limits, self.metrics.connections_total
        try:
            async with asyncio.timeout(limits.handshake_s):
                if self.draining or len(self.peers) >= limits.connections:
                    counted.inc("too many")
                    self.log.warning("connection refused", why="draining" if self.draining else "too many connections")
                    await request.reject(_BUSY)
                    return
                tokens = parse_qs(request.query or "", max_num_fields=64).get("token")
                grant = self.holdings.admit(tokens[0].encode() if tokens else None)
                if grant is None:
                    counted.inc("unauthorized")
                    self.log.warning("connection refused", why="the token is missing or wrong")
                    await request.reject(_UNAUTHORIZED)
                    return
                # An origin of its own: a session sees nothing of what others ask for, or may read.
                origin = moq.OriginProducer(cache_capacity_bytes=None)
                request.set_publish(origin)
                session = await request.accept()
        except (moq.Error, TimeoutError, ValueError) as error:
            self.log.debug("connection failed", why=str(error))
            return
        del request
        counted.inc("accepted")
        self.metrics.connections.inc()
        self.log.info("connected", grant=grant.name, protocol="moq")
        peer = MoqPeer(moq, self, session, origin, grant)
        self.peers.add(peer)
        try:
            await peer.run()
        finally:
            self.peers.discard(peer)
            self.metrics.connections.dec()
