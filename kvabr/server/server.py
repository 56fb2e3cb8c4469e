"""The server of origins and relays: MoQT over QUIC and over QMux on TCP, and how its process starts and stops."""

from __future__ import annotations

import asyncio
import errno
import math
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, Literal, Self

from kvabr.link.quic.backend import (
    REQUESTS_CONNECTION_WINDOW,
    REQUESTS_STREAM_WINDOW,
    NoTokens,
    RetryTokens,
    installed_libraries,
    library,
    load_certificates,
)
from kvabr.link.quic.transport import protocol_class
from kvabr.link.tcp.listener import TcpListener
from kvabr.link.tcp.tls import server_context
from kvabr.link.tcp.transport import QmuxTransport, address_of
from kvabr.moqt.wire import DRAFTS, Draft
from kvabr.server.addresses import site_of
from kvabr.server.announced_rates import AnnouncedRates
from kvabr.server.certificates import ServerTls
from kvabr.server.client_connection import ClientConnection, Host
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.publication import Source
from kvabr.server.published_assets import PublishedAssets
from kvabr.transfer.interface import cancel_all
from kvabr.types.errors import KvabrError, TransportError
from kvabr.types.peer import Quic

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

Tcp = Literal["tls", "off"]
_HALF_OPEN = 64
"""Unfinished handshakes after which new clients must validate their address. Also, connections beyond the limit that
are accepted only to send the reason for the refusal."""
PATIENCE_S = 0.5
"""Maximum seconds of draining after Ctrl-C."""
_LOOK_S = 0.02
_CLOSE_S = 0.2
_REFUSAL_LOG_S = 60.0
TICK_S = 0.1
"""Seconds between checks for expired tokens."""
WATCH_S, MAX_WATCH_S, _WATCH_SHARE = 0.2, 2.0, 0.02
"""Minimum and maximum seconds between checks of the assets, and the maximum fraction of time that checks may take."""
_PORT_TRIES = 16
INTERRUPTED = 130
"""Exit status after a second signal."""


class Server(Host):
    """Serves a source; an async context manager, or `start` and `close` it."""

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
        tcp: Tcp = "tls",
        drafts: tuple[Draft, ...] = DRAFTS,
        announce_rates: bool = True,
    ) -> None:
        """Prepare; `start` binds the address. Port 0 uses a free port, the same for UDP and TCP.

        ``source`` is an origin's `PublishedAssets`, or a `Relay`; ``tls`` was checked by
        `kvabr.server.certificates.check`. ``quic`` is a library, or ``auto`` for the fastest installed one, and ``tcp``
        is ``tls`` or ``off``. ``drafts`` are those to support, preferred first. ``announce_rates``: answers with
        catalogs announce the rate of recent plays in the client's block of addresses. Raises `TransportError` if the
        library is not installed.
        """
        super().__init__(source, limits, log, metrics)
        self.rates = AnnouncedRates() if announce_rates else None
        source.listen(self._source_changed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._outdated = False
        self.host, self.port, self.tls = host, port, tls
        self.backend = installed_libraries(quic)[0]
        self._lib = library(self.backend)
        self._drafts = drafts
        self.tcp = tcp
        self._transport: asyncio.DatagramTransport | None = None
        self._listener: TcpListener | None = None
        self._tcp_context: SSLContext
        self._streams: weakref.WeakKeyDictionary[QmuxTransport, None] = weakref.WeakKeyDictionary()
        """Connections over TCP that may have a socket, oldest first."""
        self._server: Any = None
        self._retry_tokens, self._no_tokens = RetryTokens(), NoTokens()
        self._next_refusal_s = -math.inf

    async def start(self) -> None:
        """Bind the address and serve; raise `TransportError` if it is in use, or not of this machine."""
        configuration = self._configured()
        loop = self._loop = asyncio.get_running_loop()
        socks: list[socket.socket] = []
        try:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            socks = _bind(family, address, tcp=self.tcp != "off")
            cls = protocol_class(self._lib, lambda _: self._admit())
            served = partial(self._lib.server, configuration=configuration, create_protocol=cls)
            self._transport, self._server = await self._lib.open_socket(socks[0], served)
            if self.tcp != "off":
                self._listener = TcpListener(socks[1], self._accepted)
            self._tick()
        except OSError as error:
            for sock in socks:
                sock.close()
            raise _bind_error(self.host, self.port, error, tcp=self.tcp != "off") from error

    @property
    def address(self) -> tuple[str, int]:
        """Bound host and port."""
        if self._transport is None:
            return self.host, self.port
        name = self._transport.get_extra_info("sockname")
        return str(name[0]), int(name[1])

    async def drain(self, grace_s: float) -> None:
        """Send GOAWAY, refuse new requests, finish requests in flight within ``grace_s`` seconds, then close."""
        self.draining = True
        until = time.monotonic() + grace_s
        for peer in list(self.peers):
            peer.say_goaway(grace_s)
        while any(peer.busy for peer in self.peers) and time.monotonic() < until:  # noqa: ASYNC110  # soon enough
            await asyncio.sleep(_LOOK_S)
        await self.close()

    async def close(self) -> None:
        """Close all connections. Idempotent, even during `drain`."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if self._ticking is not None:
            self._ticking.cancel()
        for peer in list(self.peers):
            peer.say_goodbye()
        if self._listener is not None:
            self._listener.close()
        await asyncio.sleep(_CLOSE_S if self.peers else 0)
        for peer in list(self.peers):
            peer.say_goodbye()  # also to new connections, which would otherwise wait for their idle timeout
            peer.ended("the server closes", 0)
        for stream in list(self._streams):
            stream.drop()
        transport.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def renew_certificates(self) -> None:
        """Reload certificate and key for new connections; raises as `start`."""
        if self._server is not None:
            self._lib.replace_configuration(self._server, self._configured())

    def reconsider(self, now_s: float | None = None) -> None:
        """End requests and connections that are no longer allowed at ``now_s``, seconds since 1970 (None: now)."""
        now_s = time.time() if now_s is None else now_s
        self._outdated = False
        for peer in list(self.peers):
            peer.safely(peer.reconsider, now_s)

    def left(self, peer: ClientConnection) -> None:
        super().left(peer)
        self._guard()

    def make_peer(self) -> ClientConnection:
        """Return the endpoint of a new connection."""
        return ClientConnection(self)

    def _configured(self) -> Any:
        alpn = [draft.alpn for draft in self._drafts]
        if self.tcp != "off":
            self._tcp_context = server_context(self.tls.certfile, self.tls.keyfile, alpn)
        configuration = self._lib.configure(client=False, alpn=alpn, idle_timeout=self.limits.idle_s)
        load_certificates(configuration, self.tls.certfile, self.tls.keyfile)
        return configuration

    def _source_changed(self) -> None:
        if self._loop is not None and not self._outdated:
            self._outdated = True
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self.reconsider)

    def _tick(self) -> None:
        """Check for expired tokens; called regularly, because wall clocks may jump."""
        now_s = time.time()
        for peer in list(self.peers):
            if peer.access.expires_s <= now_s:
                peer.safely(peer.reconsider, now_s)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _admit(self) -> ClientConnection:
        """Accept a connection; at the limit, it replaces the oldest TCP connection with an unfinished handshake."""
        if len(self.peers) >= self.limits.connections and (unfinished := self._unfinished()):
            unfinished[0].abandon("another connection takes its place")
        peer = self.make_peer()
        self.peers.add(peer)
        self._guard()
        return peer

    def _accepted(self, sock: socket.socket) -> None:
        """Accept a TCP connection, unless unfinished handshakes of its address use three quarters of the limit."""
        most, site = self.limits.connections, site_of(address_of(sock))
        unfinished = self._unfinished()
        own = sum(site_of(stream.address) == site for stream in unfinished)
        full = len(self.peers) >= most + _HALF_OPEN and not unfinished
        if full or own >= max(1, 3 * most // 4):
            if (now_s := time.monotonic()) >= self._next_refusal_s:
                self._next_refusal_s = now_s + _REFUSAL_LOG_S
                where = {"address": site, "waiting": own, "open": len(self.peers)}
                hint = "raise the limit of connections, or find the client there that opens some and sends nothing"
                self.log.warning("a TCP connection is refused", **where, hint=hint)
            sock.close()
            return
        stream = QmuxTransport(
            sock, self._admit(), self._tcp_context, client=False, idle_s=self.limits.idle_s,
            windows=(REQUESTS_STREAM_WINDOW, REQUESTS_CONNECTION_WINDOW),
        )  # fmt: skip
        self._streams[stream] = None
        stream.start()

    def _unfinished(self) -> list[QmuxTransport]:
        return [stream for stream in self._streams if stream.begins]

    def _guard(self) -> None:
        """Choose how new clients must validate their address before the server allocates state for them."""
        if self._server is None:
            return
        if len(self.peers) >= self.limits.connections + _HALF_OPEN:
            # Up to this number, new clients are told why they are refused.
            self._lib.demand_proof(self._server, self._no_tokens)
        elif sum(peer.session is None for peer in self.peers) > _HALF_OPEN:
            self._lib.demand_proof(self._server, self._retry_tokens)
        else:
            self._lib.demand_proof(self._server, None)


def _bind_error(host: str, port: int, error: OSError, *, tcp: bool) -> TransportError:
    if error.errno == errno.EADDRINUSE:
        hint = "another server runs there; stop it, or give another --bind HOST:PORT"
        if tcp:
            hint += ", or --tcp off if it only uses the TCP port"
    else:
        hint = "give an address of this machine with --bind HOST:PORT"
    return TransportError(f"{host}:{port}: cannot be bound ({error.strerror or error}); {hint}")


def _bind(family: int, address: Any, *, tcp: bool) -> list[socket.socket]:
    for left in range(_PORT_TRIES - 1, -1, -1):
        socks = [socket.socket(family, socket.SOCK_DGRAM)]
        try:
            socks[0].setblocking(False)
            socks[0].bind(address)
            if tcp:
                socks.append(socket.socket(family, socket.SOCK_STREAM))
                socks[1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                socks[1].bind(socks[0].getsockname())
        except OSError:
            for sock in socks:
                sock.close()
            if address[1] or not left:
                raise  # retry only if a free UDP port was taken for TCP
        else:
            return socks
    raise AssertionError("unreachable")


class Watcher:
    """Finds new, replaced and removed assets in a thread, at intervals, and follows assets being prefilled.

    An async context manager.
    """

    def __init__(
        self, library: PublishedAssets, log: FilteringBoundLogger, metrics: Metrics, *, every_s: float = WATCH_S
    ) -> None:
        """Check ``library`` every ``every_s`` seconds, less often if that takes long."""
        self._library, self._log, self._metrics = library, log, metrics
        self._every_s = max(every_s, library.look_every_s)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._count()
        self._tasks = {asyncio.create_task(self._watch())}
        if self._library.live is not None:
            self._tasks.add(asyncio.create_task(self._library.live.follow()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def check(self) -> float:
        """Check once, and return the processor time taken, in seconds."""
        start_s = time.thread_time()
        try:
            self._library.refresh()
        except (OSError, KvabrError) as error:
            self._log.warning("cannot look for assets", error=str(error))
        self._count()
        return time.thread_time() - start_s

    async def _watch(self) -> None:
        pause_s = self._every_s
        while True:
            await asyncio.sleep(pause_s)
            try:
                took_s = await asyncio.to_thread(self.check)
            except Exception:  # noqa: BLE001  # keep watching, so that removed assets are noticed
                self._log.exception("cannot look for what changed")
            else:
                pause_s = max(self._every_s, min(MAX_WATCH_S, took_s / _WATCH_SHARE))

    def _count(self) -> None:
        self._metrics.assets.set(len(self._library.assets))
        self._metrics.assets_damaged.set(self._library.damaged)
        self._metrics.assets_growing.set(0 if self._library.live is None else self._library.live.growing)


async def run_until_signal(
    server: Server,
    grace_s: float,
    log: FilteringBoundLogger,
    metrics: Metrics,
    started: Callable[[], None] = lambda: None,
) -> int:
    """Start a server, serve until SIGTERM or SIGINT, then drain it; a second signal stops it at once.

    Draining takes at most ``grace_s`` seconds, or `PATIENCE_S` after SIGINT, when a user waits. ``started`` is called
    once the server is up. Raises `TransportError` if it cannot bind. Returns the exit status: 0, or 130 after a second
    signal.
    """
    with _signals() as signals:
        await server.start()
        try:
            started()
            name = await signals.get()
            if name == signal.SIGINT.name:
                grace_s = min(grace_s, PATIENCE_S)
            log.info("signal", name=name, draining_s=grace_s, hint="another one stops it at once")
            metrics.draining.set(1)
            drained = asyncio.create_task(server.drain(grace_s))
            again = asyncio.create_task(signals.get())
            await asyncio.wait({drained, again}, return_when=asyncio.FIRST_COMPLETED)
            await cancel_all([drained, again])
            if drained.cancelled():
                log.warning("stopped", hint="unfinished requests were cut off")
                return INTERRUPTED
            drained.result()
            log.info("stopped")
            return 0
        finally:
            await server.close()


@contextmanager
def _signals() -> Iterator[asyncio.Queue[str]]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, queue.put_nowait, number.name)
    try:
        yield queue
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
