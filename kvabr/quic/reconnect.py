"""A connection that redials when it is lost, and when its peer sends GOAWAY.

Downloads on a lost connection fail. Requests made while there is no connection wait for the next one; without waiting
requests nobody dials. After GOAWAY, new requests go to a new connection, and the old one is kept until its downloads
have ended.

A killed peer does not say so. When nothing arrives of what was requested, the peer is probed with a PING; if that is
not answered either, it is dialled in parallel to the old connection. During an outage of the path that dial fails too,
and the old connection continues afterwards. Only a peer that answers the dial, but not the old connection in as much
time again, has forgotten it: one with too much to do is late with everything, and more dials would only add to that.
One that answers probes and brings nothing for seconds may have forgotten the requests, or its QUIC library has; a new
connection replaces the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from kvabr.quic.interface import Connection, ConnectionStats, Download, DownloadStats, GroupRequest
from kvabr.types.errors import ConnectionLostError, TransportError, UnauthorizedError

Dial = Callable[[], Awaitable[Connection]]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
"""Pauses between dials: doubled each time, and randomised between half and one and a half times that."""
_SHORT_LIFE_S = 1.0
"""A connection that lasts less than this, and brings nothing or sends us away, does not reset the pauses."""
_LOOK_S, _LONGEST_LOOK_S = 0.1, 1.0
"""Seconds between checks whether anything arrives; doubled whenever nothing did but the peer answered a probe, so that
a busy peer is not probed all the time."""
_SIGN_S, _SIGN_RTT, _LONGEST_SIGN_S = 0.25, 4.0, 4.0
"""Seconds, and round trips or times of the last answer, that the answer to a probe may take; the probe may be lost and
sent again. A late answer makes for no more patience than the last of these. Requests that are answered sooner halve
what it is believed to take, each of them, so that a peer that was slow once is soon known to be quick."""
_FORGOTTEN_S, _FORGOTTEN_SIGNS = 3.0, 4.0
"""Seconds, and times of what the answer to a probe may take, after which a peer that answers probes, but no request, is
dialled anew; the seconds are doubled each time. It may also be slow: a store may be, or a relay that waits for its
origin."""
_ATTEMPT_S, _ATTEMPT_RTT = 1.0, 8.0
"""Seconds, and round trips, that the first of a series of dials may take; doubled each time. QUIC backs off while it
retries, so a fresh dial reaches a peer that comes back sooner."""


class _RedialledDownload(Download):
    """A download on the current connection, or on the next one."""

    def __init__(self, owner: RedialledConnection, request: GroupRequest, priority: int) -> None:
        self.request, self.priority, self._owner = request, priority, owner
        self._asked_s = asyncio.get_running_loop().time()
        self.inner: Download | None = None
        self.forgotten = False
        """Whether the peer answers a new connection, but no longer this download's."""
        self.moved = False
        """Whether it was ended so that it can be made again on the connection that replaced its own."""
        self.cancelled = False
        self.begun_s = self._asked_s
        """When it was requested on the connection that it is on."""
        self._answered = False

    @property
    def stats(self) -> DownloadStats:  # type: ignore[override]
        """Statistics of the download itself once it is in flight; the request time is that of the first request."""
        if self.inner is None:
            return DownloadStats(self._asked_s)
        stats = self.inner.stats
        stats.requested_s = self._asked_s
        return stats

    @property
    def data(self) -> memoryview:
        return memoryview(b"") if self.inner is None else self.inner.data

    @property
    def unanswered(self) -> bool:
        """Whether nothing need have come yet: the peer tells or publishes something first."""
        request = self.request
        return request.standing or (request.wait_s > 0 and (self.inner is None or not self.inner.stats.received))

    async def read(self) -> memoryview:
        if self.cancelled:
            raise ConnectionLostError("cancelled by this side")
        if self.inner is None:
            await self._owner.attach(self)
        assert self.inner is not None  # noqa: S101  # attached, or an error was raised
        try:
            part = await self.inner.read()
        except BaseException as error:
            left = self._owner.has_left(self)
            self._owner.release(self)
            if self.moved or (left and isinstance(error, UnauthorizedError)):
                raise ConnectionLostError(f"{self.request}: the connection was replaced by another") from error
            if self.forgotten and isinstance(error, ConnectionLostError):
                raise ConnectionLostError(
                    f"{self.request}: the peer fell silent; it answers a new connection"
                ) from error
            raise
        if not self._answered:
            self._answered = True
            self._owner.answered(self, self.inner)
        if not part:
            self._owner.release(self)
        return part

    def prioritise(self, priority: int) -> None:
        self.priority = priority
        if self.inner is not None:
            self.inner.prioritise(priority)

    def cancel(self) -> None:
        self.cancelled = True
        self._owner.forget(self)
        if self.inner is not None:
            self.inner.cancel()
        self._owner.release(self)


class UnreachedConnection(Connection):
    """Stands for the connection to a peer that has not been reached: every download on it fails."""

    backend = protocol = "none"
    closed = True

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble

    def request(self, request: GroupRequest, priority: int) -> Download:
        """See `Connection.request`."""
        del request, priority
        return _FailedDownload(self.trouble or "")

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`."""
        return ConnectionStats()

    async def close(self) -> None:
        """See `Connection.close`."""


class _FailedDownload(Download):
    data = memoryview(b"")

    def __init__(self, why: str) -> None:
        self.stats = DownloadStats(requested_s=asyncio.get_running_loop().time())
        self._why = why

    async def read(self) -> memoryview:
        raise ConnectionLostError(self._why)

    def prioritise(self, priority: int) -> None:
        del priority

    def cancel(self) -> None:
        pass


class RedialledConnection(Connection):
    """Fetches on the latest of a series of connections to one peer; a `Connection`."""

    def __init__(self, first: Connection, dial: Dial, *, patience_s: float = 30.0, peer: str | None = None) -> None:
        """Take over a connection, or an `UnreachedConnection`, which the first request replaces.

        ``dial`` makes another to the same peer, never concurrently. When it has failed for ``patience_s`` seconds,
        waiting downloads fail, and the next request starts again.
        """
        self.peer, self.backend, self.protocol = peer, first.backend, first.protocol
        self._current, self._dial, self._patience_s = first, dial, patience_s
        self._leaving: list[Connection] = []
        self._using: dict[_RedialledDownload, Connection] = {}
        self._dialling: asyncio.Task[None] | None = None
        self._waiting: dict[_RedialledDownload, asyncio.Future[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._earlier_bytes = 0
        self._pause_s = 0.0
        self._adopted_s = float("-inf")
        self._watching: asyncio.Task[None] | None = None
        self._look_s = _LOOK_S
        self._asked = asyncio.Event()
        """Set when something is requested, which is reason to look sooner."""
        self._doubted: Connection | None = None
        """The connection whose peer did not answer the last probe, or that brings nothing."""
        self._quiet_s = 0.0
        """Seconds for which requests have waited since anything came, while the peer answered probes."""
        self._forgotten_s = _FORGOTTEN_S
        self._answer_s = 0.0
        """Seconds that the peer took for its last answer to a probe or a dial, or to requests since."""
        self._answered_s = float("-inf")
        """When the latest of the requests was made that the current connection has answered."""
        self._barren = False
        """Whether the peer answers the last probes, but no request."""
        self.trouble = first.trouble
        self.dials = 0
        """How often it has reconnected."""

    def request(self, request: GroupRequest, priority: int) -> Download:
        """Request a group on the current connection, or on the next one; see `Connection.request`."""
        download = _RedialledDownload(self, request, priority)
        if self._usable():
            self._start(download)
        elif not self.closed:
            self._redial()
        return download

    async def renew(self) -> None:
        """See `Connection.renew`."""
        if self._dialling is not None:
            await asyncio.wait({self._dialling})
        if self._usable():  # otherwise the next dial will do
            made = await self._dial()
            if self._usable():
                self._adopt(made)
            else:
                await made.close()

    def stats(self) -> ConnectionStats:
        """Return the statistics of the current connection, with the bytes of all connections."""
        stats = self._current.stats()
        leaving = sum(connection.stats().bytes_received for connection in self._leaving)
        total = self._earlier_bytes + leaving + stats.bytes_received
        return ConnectionStats(stats.rtt_s, total, stats.lost_packets, stats.rate)

    async def close(self) -> None:
        """Close all connections; downloads that wait for one fail."""
        if self.closed:
            return
        self.closed = True
        if tasks := [task for task in (self._dialling, self._watching) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self._tell(ConnectionLostError("this side closed the connection"))
        for connection in (*self._leaving, self._current):
            await connection.close()
        if self._closing:
            await asyncio.wait(self._closing)

    # -------------------------------------------------------------- internals

    def _usable(self) -> bool:
        return not (self.closed or self._current.closed or self._current.going_away)

    def _start(self, download: _RedialledDownload) -> None:
        download.begun_s = asyncio.get_running_loop().time()
        download.inner = self._current.request(download.request, download.priority)
        self._using[download] = self._current
        if not download.request.standing:
            self._look_s = _LOOK_S
            self._asked.set()
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def attach(self, download: _RedialledDownload) -> None:
        """Wait for a connection, and start a download on it, or raise ConnectionLostError."""
        while not self._usable():
            if self.closed:
                raise ConnectionLostError("this side closed the connection")
            waiter = self._waiting[download] = asyncio.get_running_loop().create_future()
            self._redial()
            try:
                await waiter
            finally:
                self._waiting.pop(download, None)
            if download.cancelled:
                raise ConnectionLostError("cancelled by this side")
        self._start(download)

    def answered(self, download: _RedialledDownload, inner: Download) -> None:
        """Take that the first bytes of a download have come."""
        first_s = inner.stats.first_byte_s
        if first_s is not None and self._using.get(download) is self._current:
            self._answered_s = max(self._answered_s, download.begun_s)
            self._answer_s = min(self._answer_s, max(first_s - download.begun_s, self._answer_s / 2))

    def forget(self, download: _RedialledDownload) -> None:
        """Stop a cancelled download from waiting for a connection."""
        waiter = self._waiting.get(download)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def has_left(self, download: _RedialledDownload) -> bool:
        """Return whether a download is on a connection that another has replaced."""
        return self._using.get(download) in self._leaving

    def release(self, download: _RedialledDownload) -> None:
        """Note the end of a download; retire a replaced connection after its last one."""
        used = self._using.pop(download, None)
        if used is not None and used in self._leaving and used not in self._using.values():
            self._retire(used)

    async def _watch(self) -> None:
        """While downloads are in flight and nothing arrives, probe the peer, and dial if it does not answer."""
        try:
            while self._using:
                connection, before = self._current, self._current.stats().bytes_received
                since_s = asyncio.get_running_loop().time()
                self._asked.clear()
                with contextlib.suppress(TimeoutError):
                    if self._look_s > _LOOK_S:
                        await asyncio.wait_for(self._asked.wait(), self._look_s)
                        continue
                    await asyncio.sleep(self._look_s)
                if connection is not self._current or connection.stats().bytes_received != before:
                    self._heard()
                    self._look_s = _LOOK_S
                elif self._usable() and connection in self._using.values():
                    dialling = self._dialling
                    if await self._lives(connection):
                        self._look_s = min(_LONGEST_LOOK_S, 2 * self._look_s)
                        if self._awaited(connection):
                            self._quiet_s += asyncio.get_running_loop().time() - since_s
                        if self._quiet_s < max(self._forgotten_s, _FORGOTTEN_SIGNS * self._sign_s(connection)):
                            self._doubted = self.trouble = None
                        elif connection is self._current and self._usable():
                            self._doubted, self._barren = connection, True
                            self.trouble = "the peer answers probes, but no request"
                            self._redial()
                    elif connection is self._current and self._usable() and dialling is self._dialling:
                        # A dial that has ended meanwhile knows better.
                        self._doubted = connection
                        self.trouble = self.trouble or "the peer has fallen silent"
                        self._redial()
        finally:
            self._watching = None

    def _heard(self) -> None:
        self._doubted = self.trouble = None
        self._quiet_s, self._forgotten_s, self._barren = 0.0, _FORGOTTEN_S, False

    def _awaited(self, connection: Connection) -> bool:
        """Return whether something is in flight on a connection that should be answered soon."""
        return any(used is connection and not one.unanswered for one, used in self._using.items())

    def _sign_s(self, connection: Connection) -> float:
        late_s = min(_LONGEST_SIGN_S, _SIGN_RTT * self._answer_s)
        return max(_SIGN_S, _SIGN_RTT * (connection.stats().rtt_s or 0.0), late_s)

    async def _lives(self, connection: Connection, least_s: float = 0.0) -> bool:
        """Probe a connection, and wait for as long as an answer may take, but ``least_s`` at least."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        alive = await connection.answers(max(least_s, self._sign_s(connection)))
        if alive:
            self._answer_s = loop.time() - begun_s
        return alive

    def _redial(self) -> None:
        if self._dialling is None:
            self._dialling = asyncio.get_running_loop().create_task(self._dial_until_there())
            self._dialling.add_done_callback(self._dialled)

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._dialling = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            kind = UnauthorizedError if isinstance(error, UnauthorizedError) else ConnectionLostError
            self._tell(kind(f"the connection was lost, and dialling again failed: {error}"))
        elif self._waiting and not self._usable():
            self._redial()  # a request came as the last dial ended

    async def _dial_until_there(self) -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        fruitful = not self._current.going_away and self._current.stats().bytes_received > 0
        if fruitful or start_s - self._adopted_s > _SHORT_LIFE_S:
            self._pause_s = 0.0
        attempt_s = max(_ATTEMPT_S, _ATTEMPT_RTT * max(self._current.stats().rtt_s or 0.0, self._answer_s))
        while True:
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))  # noqa: S311  # only spreads players' dials
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
            begun_s = loop.time()
            try:
                made = await self._dial_within(attempt_s)
            except UnauthorizedError:
                raise  # trying again would not help
            except TransportError as error:
                self.trouble = f"dialling again fails: {error}"
                if loop.time() - start_s + self._pause_s > self._patience_s:
                    raise
                if not self._waiting:
                    return  # the next request starts again
                attempt_s *= 2
            else:
                await self._choose(made, begun_s)
                return

    async def _dial_within(self, seconds: float) -> Connection:
        try:
            async with asyncio.timeout(seconds):
                return await self._dial()
        except TimeoutError as error:
            raise TransportError(f"no answer within {seconds:.3g} s") from error

    async def _choose(self, made: Connection, begun_s: float) -> None:
        """Switch to a new connection, dialled since ``begun_s``, unless the doubted one proves to be alive."""
        old, took_s = self._current, asyncio.get_running_loop().time() - begun_s
        if self._usable():
            alive = True
            try:
                alive = old is not self._doubted or (not self._barren and await self._lives(old, took_s))
            finally:
                if alive:  # or this was cancelled
                    with contextlib.suppress(TransportError):
                        await made.close()
            if alive:
                self._doubted = self.trouble = None
                if self._answered_s < begun_s:
                    self._answer_s = max(self._answer_s, took_s)
                return
        self._adopt(made)

    def _adopt(self, made: Connection) -> None:
        self.dials += 1
        self._adopted_s = asyncio.get_running_loop().time()
        old, self._current = self._current, made
        self.backend, self.protocol = made.backend, made.protocol
        self._leaving.append(old)
        for download, used in list(self._using.items()):
            if used is old and download.unanswered and download.inner is not None:
                download.moved = True
                download.inner.cancel()
        if old is self._doubted:
            for download, used in self._using.items():
                download.forgotten |= used is old
        if old.closed or old is self._doubted or old not in self._using.values():
            self._retire(old)
        self._doubted = self.trouble = None
        if self._barren:
            self._quiet_s, self._barren = 0.0, False
            self._forgotten_s *= 2
        self._tell(None)

    def _retire(self, connection: Connection) -> None:
        self._leaving.remove(connection)
        self._earlier_bytes += connection.stats().bytes_received
        task = asyncio.get_running_loop().create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _tell(self, error: Exception | None) -> None:
        for waiter in self._waiting.values():
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
