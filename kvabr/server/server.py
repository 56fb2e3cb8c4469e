"""The server of origins and relays: MoQT drafts 18 and 16 over QUIC, by qh3 or aioquic."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import TYPE_CHECKING, Any, Self

from kvabr.moqt.wire import DRAFTS, Draft
from kvabr.quic.backend import NoTokens, Quic, RetryTokens, installed_libraries, library, load_certificates
from kvabr.quic.endpoint import protocol_class
from kvabr.server.certificates import ServerTls
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.peer import Host, Peer
from kvabr.server.publication import Source
from kvabr.types.errors import TransportError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_HALF_OPEN = 64
"""Handshakes at a time before new clients must validate their address; also how many connections beyond the limit are
let in far enough to be told that there are too many."""
_GOODBYE_S = 0.2
"""Seconds for the last packets to leave."""


class Server(Host):
    """Serves a source; use it as an async context manager, or `start` and `close` it."""

    def __init__(
        self,
        source: Source,
        host: str,
        port: int,
        tls: ServerTls,
        limits: ServerLimits,
        log: FilteringBoundLogger,
        metrics: Metrics,
        *,
        quic: Quic = "aioquic",
        drafts: tuple[Draft, ...] = DRAFTS,
    ) -> None:
        """Prepare; nothing is bound before `start`.

        Args:
            source: what to serve, and who may read it: an origin's `PublishedAssets`, or a `Relay`.
            host: name or address to bind.
            port: UDP port to bind; 0 takes a free one.
            tls: certificate and key, already checked by `kvabr.server.certificates.check`.
            limits: what peers may take.
            log: receives events.
            metrics: receives counts.
            quic: QUIC library; ``auto`` takes the fastest that is installed. `TransportError` if this one is not.
            drafts: drafts to speak, preferred first.
        """
        super().__init__(source, limits, log, metrics)
        self.host, self.port, self.tls = host, port, tls
        self.backend = installed_libraries(quic)[0]
        """``aioquic`` or ``qh3``."""
        self._lib = library(self.backend)
        self._drafts = drafts
        self._transport: asyncio.DatagramTransport | None = None
        self._server: Any = None
        self._retry_tokens, self._no_tokens = RetryTokens(), NoTokens()

    async def start(self) -> None:
        """Bind the address and serve; `TransportError` if the address is in use, or not one of this machine."""
        alpn = [draft.alpn for draft in self._drafts]
        configuration = self._lib.configure(client=False, alpn=alpn, idle_timeout=self.limits.idle_s)
        load_certificates(configuration, self.tls.certfile, self.tls.keyfile)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            sock = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            raise self._cannot_bind(error) from error
        try:
            sock.setblocking(False)
            sock.bind(address)
            cls = protocol_class(self._lib, lambda _: self._admit())
            self._transport, self._server = await self._lib.open_server(sock, configuration, cls)
        except OSError as error:
            sock.close()
            raise self._cannot_bind(error) from error

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are bound."""
        if self._transport is None:
            return self.host, self.port
        name = self._transport.get_extra_info("sockname")
        return str(name[0]), int(name[1])

    async def drain(self, grace_s: float) -> None:
        """Send GOAWAY, refuse new requests, finish those in flight for up to ``grace_s`` seconds, then close."""
        self.draining = True
        until = time.monotonic() + grace_s
        for peer in list(self.peers):
            peer.say_goaway(grace_s)
        while any(peer.busy for peer in self.peers) and (left := until - time.monotonic()) > 0:
            self.idle.clear()
            try:
                await asyncio.wait_for(self.idle.wait(), left)
            except TimeoutError:
                break
        await self.close()

    async def close(self) -> None:
        """End every connection now; may be called twice, and while `drain` waits."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        for peer in list(self.peers):
            peer.say_goodbye()
        await asyncio.sleep(_GOODBYE_S if self.peers else 0)
        for peer in list(self.peers):
            peer.ended("the server closes", 0)
        transport.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------ for connections

    def left(self, peer: Peer) -> None:
        """See `Host.left`."""
        super().left(peer)
        self._guard()

    def make_peer(self) -> Peer:
        """Return the endpoint of a new connection."""
        return Peer(self._lib, self)

    def _admit(self) -> Peer:
        peer = self.make_peer()
        self.peers.add(peer)
        self._guard()
        return peer

    def _guard(self) -> None:
        """Decide what new clients must prove before any state is kept for them."""
        if self._server is None:
            return
        if len(self.peers) >= self.limits.connections + _HALF_OPEN:
            # Up to there new clients are let in far enough to be told why they cannot stay.
            self._lib.demand_proof(self._server, self._no_tokens)
        elif sum(peer.session is None for peer in self.peers) > _HALF_OPEN:
            self._lib.demand_proof(self._server, self._retry_tokens)
        else:
            self._lib.demand_proof(self._server, None)

    def _cannot_bind(self, error: OSError) -> TransportError:
        where = f"{self.host}:{self.port}"
        if error.errno == errno.EADDRINUSE:
            hint = "another server is running there; stop it, or give another --bind HOST:PORT"
        else:
            hint = "give an address of this machine with --bind HOST:PORT"
        return TransportError(f"{where}: cannot be bound ({error.strerror or error}); {hint}")
