"""The origin over QUIC in Python, by aioquic or qh3: MoQT drafts 18 and 16."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

from kvabr.moqt.wire import DRAFTS, Draft
from kvabr.quic.endpoint import protocol_class
from kvabr.quic.library import LibraryName, NoTokens, RetryTokens, library, load_certificates
from kvabr.server.metrics import Metrics
from kvabr.server.peer import Peer
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server, ServerLimits, ServerTls
from kvabr.types.errors import TransportError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_HALF_OPEN = 64
"""Connections that may be in their handshakes before newcomers must prove that their address is theirs; and that may be
there, beyond those that are allowed, to be told so."""
_GOODBYE_S = 0.2
"""Seconds for the last packets to leave."""


class QuicServer(Server):
    """Serves a library of assets."""

    def __init__(
        self,
        library_: PublishedAssets,
        host: str,
        port: int,
        tls: ServerTls,
        limits: ServerLimits,
        log: FilteringBoundLogger,
        metrics: Metrics,
        *,
        library_name: LibraryName = "aioquic",
        drafts: tuple[Draft, ...] = DRAFTS,
    ) -> None:
        """See `Server`; ``library_name`` is the QUIC library, ``drafts`` what is spoken, the preferred one first."""
        super().__init__(library_, host, port, tls, limits, log, metrics)
        self.backend = library_name
        self._lib = library(library_name)
        self._drafts = drafts
        self._transport: asyncio.DatagramTransport | None = None
        self._server: Any = None
        self._retry_tokens, self._no_tokens = RetryTokens(), NoTokens()
        self.peers: set[Peer] = set()
        """Connections, from their first packet on."""
        self.requests = 0
        """Under way, of all connections."""
        self.draining = False
        self._idle = asyncio.Event()

    async def start(self) -> None:
        """See `Server.start`."""
        alpn = [draft.alpn for draft in self._drafts]
        configuration = self._lib.configure(client=False, alpn=alpn, idle_timeout=self.limits.idle_s)
        load_certificates(configuration, self.tls.certfile, self.tls.keyfile)
        loop = asyncio.get_running_loop()
        where = f"{self.host}:{self.port}"
        try:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            sock = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            raise TransportError(f"{where}: cannot be bound ({error.strerror or error})") from error
        try:
            sock.setblocking(False)
            sock.bind(address)
            cls = protocol_class(self._lib, lambda _: self._admit())
            self._transport, self._server = await self._lib.open_server(sock, configuration, cls)
        except OSError as error:
            sock.close()
            hint = "; is another server running there?" if error.errno == 98 else ""
            raise TransportError(f"{where}: cannot be bound ({error.strerror}){hint}") from error

    @property
    def address(self) -> tuple[str, int]:
        """See `Server.address`."""
        if self._transport is None:
            return self.host, self.port
        name = self._transport.get_extra_info("sockname")
        return str(name[0]), int(name[1])

    async def drain(self, grace_s: float) -> None:
        """See `Server.drain`."""
        self.draining = True
        until = time.monotonic() + grace_s
        for peer in list(self.peers):
            peer.say_goaway(grace_s)
        while any(peer.busy for peer in self.peers) and (left := until - time.monotonic()) > 0:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), left)
            except TimeoutError:
                break
        await self.close()

    async def close(self) -> None:
        """See `Server.close`."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        for peer in list(self.peers):
            peer.say_goodbye()
        await asyncio.sleep(_GOODBYE_S if self.peers else 0)
        for peer in list(self.peers):
            peer.ended("the server closes", 0)
        transport.close()

    def settled(self) -> None:
        """A connection has nothing under way any more."""
        self._idle.set()

    def leaves(self, peer: Peer) -> None:
        """A connection is over."""
        self.peers.discard(peer)
        self._guard()
        self.settled()

    def make_peer(self) -> Peer:
        """A connection that begins."""
        return Peer(self._lib, self)

    def _admit(self) -> Peer:
        peer = self.make_peer()
        self.peers.add(peer)
        self._guard()
        return peer

    def _guard(self) -> None:
        """Decide what newcomers must show before anything is kept of them."""
        if self._server is None:
            return
        if len(self.peers) >= self.limits.connections + _HALF_OPEN:
            # Until then newcomers are let in far enough to be told why they cannot stay.
            self._lib.demand_proof(self._server, self._no_tokens)
        elif sum(peer.session is None for peer in self.peers) > _HALF_OPEN:
            self._lib.demand_proof(self._server, self._retry_tokens)
        else:
            self._lib.demand_proof(self._server, None)
