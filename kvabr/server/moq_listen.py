"""What the servers on moq-rs share, an origin and a relay: binding, who comes in, which namespaces are asked for."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from kvabr.quic import moq_lib as moqlib
from kvabr.server.metrics import Metrics
from kvabr.server.server import Server, ServerLimits, ServerTls
from kvabr.store.grants import token_in_query
from kvabr.types.errors import FormatError, TransportError
from kvabr.types.naming import TrackNamespace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

KEEP_US = 10**13
"""Groups do not grow old: when they go is decided here."""
MISSING_S = 1.0
"""A track that does not exist is held open so long: moq-rs then answers "not found", and "dropped" otherwise."""
FRAME_BYTES = 256 << 10
"""Size of a group's later frames: a frame costs both sides the same time, whatever its size."""
_FIRST_FRAME, _GROWTH = 1 << 10, 4
_GOODBYE_S = 0.2
"""Seconds for the last packets to leave."""


def frame_bytes(written: int, most: int = FRAME_BYTES) -> int:
    """Size of the next frame of a group.

    A receiver sees nothing of a frame before it has all of it, and on a new connection a frame of 64 KiB takes three
    round trips. So the first is as small as a packet, and those after it grow.

    Args:
        written: bytes of the group before it.
        most: bytes that it may have.
    """
    return min(most, max(_FIRST_FRAME, _GROWTH * written))


class MoqListener(Server):
    """A server on moq-rs; the subclass says who may enter, and serves them."""

    backend = "moq"

    def __init__(
        self,
        host: str,
        port: int,
        tls: ServerTls,
        limits: ServerLimits,
        log: FilteringBoundLogger,
        metrics: Metrics,
        *,
        origin: Any = None,
    ) -> None:
        """See `Server`; ``origin`` is what every session sees that is given nothing of its own.

        Raises:
            TransportError: moq-rs is not installed.
        """
        self.host, self.port, self.tls, self.limits, self.log, self.metrics = host, port, tls, limits, log, metrics
        self._moq = moqlib.load()
        self._published = self._moq.OriginProducer(cache_capacity_bytes=0) if origin is None else origin
        self._server: Any = None
        self._address = host, port
        self._sessions: set[Any] = set()
        self._entering = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False

    @abstractmethod
    def admit(self, request: Any, token: bytes | None) -> Any:
        """What the server is to know of a peer with that token; None if it may not enter."""

    @abstractmethod
    async def attend(self, session: Any, guest: Any) -> None:
        """Serve a peer that was let in, until its session is over; ``guest`` is what `admit` returned."""

    def forget(self) -> None:
        """The server has closed: let go of what it kept."""

    async def start(self) -> None:
        """See `Server.start`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        server = self._moq.Server(
            f"{host}:{self.port}",
            tls_cert=[str(self.tls.certfile)],
            tls_key=[str(self.tls.keyfile)],
            publish=self._published,
        )
        try:
            await server.__aenter__()
        except self._moq.Error as error:
            said = moqlib.explain(self._moq, error)
            raise TransportError(f"{host}:{self.port}: cannot be bound ({said})") from error
        self._server = server
        bound, _, port = server.local_addr.rpartition(":")
        self._address = bound.strip("[]"), int(port)
        self.spawn(self._accept())

    @property
    def address(self) -> tuple[str, int]:
        """See `Server.address`."""
        return self._address

    async def close(self) -> None:
        """See `Server.close`."""
        server, self._server = self._server, None
        if server is None:
            return
        for session in list(self._sessions):
            session.shutdown()
        await asyncio.sleep(_GOODBYE_S if self._sessions else 0)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.forget()
        await moqlib.close(server)

    async def say_goodbye(self, most_s: float) -> None:
        """Let the last packets leave."""
        await asyncio.sleep(max(0.0, min(_GOODBYE_S, most_s)) if self._sessions else 0)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something until the server closes. What moq-rs raises there means that those who asked have gone."""
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(self._moq.Error):
            await work

    async def _accept(self) -> None:
        async for request in self._server:
            self.spawn(self._session(request))

    async def _session(self, request: Any) -> None:
        counted, entered = self.metrics.connections_total, False
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                if self.draining or len(self._sessions) + self._entering >= self.limits.connections:
                    why = "the server is draining" if self.draining else "too many connections"
                    counted.labels("too many").inc()
                    self.log.warning("connection refused", why=why)
                    await request.reject(moqlib.GOING_AWAY if self.draining else moqlib.BUSY)
                    return
                guest = self.admit(request, token_in_query(request.query))
                if guest is None:
                    counted.labels("unauthorized").inc()
                    self.log.warning("connection refused", why="the token is missing or wrong")
                    await request.reject(moqlib.UNAUTHORIZED)
                    return
                self._entering, entered = self._entering + 1, True
                session = await request.accept()
        except (self._moq.Error, TimeoutError) as error:
            self.log.debug("connection failed", why=str(error))
            return
        finally:
            self._entering -= entered
        del request
        counted.labels("accepted").inc()
        self._sessions.add(session)
        self.metrics.connections.inc()
        try:
            await self.attend(session, guest)
        finally:
            self._sessions.discard(session)
            self.metrics.connections.dec()


def claim_routes(moq: Any, origin: Any) -> list[Any]:
    """Claim the names of assets in an origin of moq-rs, in all spellings.

    What is asked for in an unclaimed name is refused, what is asked for in a claimed one waits for `Broadcasts.listen`.
    So claim before anybody is let in. The claims hold as long as what is returned.
    """
    return [origin.dynamic(route, moq.Route()) for route in moqlib.ROUTES]


TracksWanted = Callable[[str, TrackNamespace, Any], Coroutine[Any, Any, None]]


class Broadcasts:
    """The namespaces that peers of an origin of moq-rs ask for; those that were not used for longest go."""

    def __init__(self, moq: Any, most: int, serve: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """None yet.

        Args:
            moq: the module.
            most: how many are kept open.
            serve: runs what answers the requests for the tracks of one.
        """
        self._moq, self._most, self._serve = moq, most, serve
        self._open: OrderedDict[str, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    async def listen(self, route: Any, tracks_wanted: TracksWanted) -> None:
        """Answer requests for namespaces beneath a route, until cancelled.

        Args:
            route: one of `claim_routes`.
            tracks_wanted: called with path, namespace and where tracks are asked for.
        """
        moq = self._moq
        async with route as wanted:
            while True:
                request = await wanted.requested_broadcast()
                path = request.path
                try:
                    namespace = moqlib.namespace_of(path)
                except FormatError:
                    del request  # which answers it
                    continue
                broadcast = moq.BroadcastProducer()
                self._open[path] = broadcast
                self._serve(tracks_wanted(path, namespace, broadcast.dynamic()))
                request.accept(broadcast)
                del request
                if len(self._open) > self._most:
                    _, oldest = self._open.popitem(last=False)
                    oldest.close()

    def used(self, path: str) -> None:
        """Something of a namespace was asked for."""
        if path in self._open:
            self._open.move_to_end(path)

    def clear(self) -> None:
        """Let go of all."""
        self._open.clear()
