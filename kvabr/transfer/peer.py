"""A peer (an origin, a relay or an object store) on one or several connections, dialled for requests and redialled.

Several connections help if one connection or core cannot fill the path. Plays see one source and one link: a request
uses the connection with the fewest bytes left. Another one is opened while enough bytes are requested, and stays only
if it clearly raises the total rate.

A `RedialledConnection` has one connection after another. Requests without a connection wait for the next one. Transfers
on a lost connection fail. After GOAWAY, new requests use a new connection, and the old one stays open until its
transfers have ended.

While requests are in flight and no bytes arrive, the connection is probed with a PING, since a killed peer is silent:

- `Health.GOOD`: the peer answers, or no bytes are missing.
- `Health.SILENT`: a probe was not answered, so another connection is dialled. If the path is down, that dial fails too,
  and the old connection continues afterwards. Only if the peer answers the dial, but within as much time again not the
  old connection, has it forgotten the old one.
- `Health.STUCK`: probes are answered, but requests are not: the peer or its QUIC library may have forgotten them. The
  new connection replaces the old one.

A connection counts as stuck after seconds, but right after an outage at once: a QUIC sender with a window full of lost
packets is silent until its next retransmission, which may take as long again as the outage (RFC 9002, section 6.2).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Protocol, Self

from kvabr.transfer.interface import (
    CLOSED,
    Carrier,
    ConnectionStats,
    GroupTransfer,
    PeerConnection,
    PrefixFinder,
    TaskSet,
    cancel_all,
)
from kvabr.types.backoff import Backoff, scattered
from kvabr.types.errors import ConnectionLostError, NoAnswerError, RequestError, TransportError, UnauthorizedError
from kvabr.types.words import ordinal

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
"""First and longest pause between dials: doubled each time, and multiplied by a random factor from 0.5 to 1.5."""
_UNREACHABLE = 2
"""Consecutive failed dials after which a peer is presumed dead."""
_SHORT_LIFE_S = 1.0
"""A connection that lasts fewer seconds and delivers no data, or ends in GOAWAY, does not reset the back-off."""
_CHECK_S, _MAX_CHECK_S = 0.1, 1.0
"""First and longest seconds between checks for received bytes. They double after each check with only an answered
probe, so that a busy peer is probed less."""
_PROBE_S, _PROBE_RTT, _MAX_PROBE_S = 0.25, 4.0, 4.0
"""Time for the answer to a probe, which may be lost and sent again: at least the seconds, and the multiple of the round
trip or of the last answer's time, up to the last number. Each request answered sooner halves the expected time."""
_STUCK_S, _STUCK_PROBES = 3.0, 4.0
"""Seconds, and multiples of a probe's time, after which a peer that answers only probes is redialled. The seconds
double each time, since the peer may just be slow, such as a relay that waits for its origin."""
_OUTAGE_S = 1.0
"""An outage: this many seconds after an unanswered probe without a byte."""
_ATTEMPT_S, _ATTEMPT_RTT = 1.0, 8.0
"""Time limit of the first of several dials, in seconds and round trips; doubled each time. QUIC backs off while it
retries, so a fresh dial reaches a restarted peer sooner."""
_REPLACED = "the connection was replaced by another"
_SENT_AWAY = "the peer closes each connection at once"
_FORGOTTEN = "the peer fell silent; it answers a new connection"


class Dialler(Protocol):
    """Dials one peer."""

    names: tuple[str, ...]
    """Possible names of its connections (`Connection.peer`)."""
    max_connections: int
    """Maximum number of simultaneous connections."""

    async def dial(self) -> PeerConnection:
        """Return a new connection, or raise `TransportError`. Dials of one `RedialledConnection` never overlap."""


class Health(Enum):
    """How the peer of a connection answers."""

    GOOD = ""
    SILENT = "the peer has fallen silent"
    STUCK = "the peer answers probes, but not requests"


class RedialledConnection(Carrier):
    """Connects to a peer again and again, with one connection at a time for new requests."""

    def __init__(
        self,
        dialler: Dialler,
        *,
        patience_s: float,
        persistent: bool = False,
        released: Callable[[], None] = lambda: None,
        dialled: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        """Prepare to dial.

        After ``patience_s`` seconds of redialling, waiting transfers fail; the next request dials again. Before the
        first connection, the first failed dial fails them, unless ``persistent``. ``released`` is called after each
        transfer; ``dialled`` with None after the first connection, and with the error whenever dialling ends without
        one.
        """
        self.current: PeerConnection | None = None
        self.health = Health.GOOD
        self.closed = False
        self.unreachable = False
        """True if the peer is presumed dead: the last two dials have failed, or the only one."""
        self.dials = self._failed_dials = 0
        """Number of reconnections, and of failed dials since the last success."""
        self._dialler, self._patience_s, self._persistent = dialler, patience_s, persistent
        self._released, self._dialled_first = released, dialled
        self._trouble: str | None = None
        self._leaving: list[PeerConnection] = []
        self._using: dict[GroupTransfer, tuple[PeerConnection, float]] = {}
        self._waiting: dict[GroupTransfer, None] = {}
        self._dialling: asyncio.Task[None] | None = None
        self._closing = TaskSet()
        self._earlier_bytes = 0
        self._pauses = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        self._adopted_s = float("-inf")
        self._watching: asyncio.Task[None] | None = None
        self._check_s = _CHECK_S
        self._requested = asyncio.Event()
        self._checked_bytes = 0
        self._quiet_s = 0.0
        """Seconds that requests have waited since the last bytes, while the peer answered probes."""
        self._outage_s: float | None = None
        """Time of the first unanswered probe since the last bytes, or None."""
        self._stuck_s = _STUCK_S
        self._answer_s = 0.0
        """Seconds that the last answer to a probe or dial took, reduced by faster answers to requests."""

    # ------------------------------------------------------------------ for the peer

    @property
    def trouble(self) -> str | None:
        """Why the peer cannot be reached now, if known."""
        if self._trouble is not None or self.current is None:
            return self._trouble
        return self.current.trouble

    @property
    def dialling(self) -> bool:
        """True while a dial is running."""
        return self._dialling is not None

    @property
    def left_bytes(self) -> int:
        """Missing bytes of its transfers, except for live groups."""
        every = (*self._using, *self._waiting)
        return sum(one.request.limit - one.received for one in every if not one.request.live)

    @property
    def bytes_received(self) -> int:
        """Payload bytes received on all of its connections."""
        open_ones = [*self._leaving] if self.current is None else [*self._leaving, self.current]
        return self._earlier_bytes + sum(connection.stats().bytes_received for connection in open_ones)

    async def connected(self) -> None:
        """Wait for a connection; see `Connection.connected`."""
        while self.closed or self.current is None:
            if self.closed:
                raise ConnectionLostError(CLOSED)
            # If a caller is cancelled, others still wait for the dial.
            await asyncio.wait({dial := self._redial(once=True)})
            if dial.cancelled():  # cancelled by `close`, not with the caller
                raise ConnectionLostError(CLOSED)
            dial.result()

    async def renew(self) -> None:
        if self._dialling is not None:
            await asyncio.wait({self._dialling})
        if self._usable():  # otherwise the next dial uses the new token
            made = await self._dialler.dial()
            if self._usable():
                self._adopt(made)
            else:
                await made.close()

    async def close(self) -> None:
        """Close all connections, and fail waiting transfers. Idempotent."""
        self.closed = True
        if tasks := [task for task in (self._dialling, self._watching) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self._fail_waiting(ConnectionLostError(CLOSED))
        for connection in (*self._leaving, *([] if self.current is None else [self.current])):
            await connection.close()
        if self._closing:
            await asyncio.wait(self._closing)

    # ------------------------------------------------------------------ Carrier

    def carry(self, transfer: GroupTransfer) -> None:
        """Request a group on the current connection, or on the next one."""
        transfer.carrier = transfer.source = self
        if self.closed:
            transfer.fail(ConnectionLostError(CLOSED))
        elif self._usable():
            self._start(transfer)
        else:
            self._waiting[transfer] = None
            self._redial(once=self.current is None and not self._persistent)

    def answered(self, transfer: GroupTransfer) -> None:
        used, begun_s = self._using.get(transfer, (None, 0.0))
        if used is not None and used is self.current:
            took_s = asyncio.get_running_loop().time() - begun_s
            self._answer_s = min(self._answer_s, max(took_s, self._answer_s / 2))

    def explain(self, transfer: GroupTransfer, error: Exception) -> Exception:
        """Turn a refusal on a replaced connection, which need not apply to the new one, into `ConnectionLostError`."""
        used, _ = self._using.get(transfer, (None, 0.0))
        if isinstance(error, UnauthorizedError) and used in self._leaving:
            return ConnectionLostError(f"{transfer.request}: {_REPLACED}")
        return error

    def released(self, transfer: GroupTransfer) -> None:
        """Close a replaced connection after its last transfer; see `Carrier.released`."""
        self._waiting.pop(transfer, None)
        used, _ = self._using.pop(transfer, (None, 0.0))
        if used is not None and used in self._leaving and not self._carries(used):
            self._retire(used)
        self._released()

    # ------------------------------------------------------------------ requests

    def _usable(self) -> bool:
        connection = self.current
        return not (self.closed or connection is None or connection.closed or connection.going_away)

    def _carries(self, connection: PeerConnection) -> bool:
        return any(used is connection for used, _ in self._using.values())

    def _start(self, transfer: GroupTransfer) -> None:
        connection = self.current
        assert connection is not None  # noqa: S101  # it is usable
        self._using[transfer] = connection, asyncio.get_running_loop().time()
        transfer.source = connection
        connection.carry(transfer)
        if not transfer.request.live:
            self._check_s = _CHECK_S
            self._requested.set()
        if self._watching is None and not connection.heals:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def _start_waiting(self) -> None:
        while self._waiting and self._usable():
            transfer = next(iter(self._waiting))
            del self._waiting[transfer]
            self._start(transfer)

    def _fail_waiting(self, error: Exception) -> None:
        for transfer in list(self._waiting):
            transfer.fail(error)

    # ------------------------------------------------------------------ health

    def _recover(self) -> None:
        self.health, self._trouble, self._failed_dials, self.unreachable = Health.GOOD, None, 0, False

    def _suspect(self, health: Health) -> None:
        if self.health is not Health.STUCK:  # a stuck connection is replaced anyway
            self.health = health
        self._trouble = self._trouble or self.health.value
        self._redial()

    async def _watch(self) -> None:
        """Probe the peer while transfers are in flight and no bytes arrive."""
        try:
            while self._using:
                connection = self.current
                assert connection is not None  # noqa: S101  # it has requests
                before, since_s = self._checked_bytes, asyncio.get_running_loop().time()
                self._requested.clear()
                requested = False
                with contextlib.suppress(TimeoutError):
                    if self._check_s > _CHECK_S:
                        requested = await asyncio.wait_for(self._requested.wait(), self._check_s)
                    else:
                        await asyncio.sleep(self._check_s)
                if connection is not self.current:
                    self._check_s = _CHECK_S
                elif (received := connection.stats().bytes_received) != before:
                    self._check_s, self._checked_bytes = _CHECK_S, received
                    self._quiet_s, self._outage_s, self._stuck_s = 0.0, None, _STUCK_S
                    self._recover()
                elif not requested and self._usable() and self._carries(connection):
                    await self._check(connection, since_s)
        finally:
            self._watching = None

    async def _check(self, connection: PeerConnection, since_s: float) -> None:
        dialling = self._dialling
        if await self._probe(connection):
            if connection.stats().bytes_received != self._checked_bytes:
                return  # payload arrived meanwhile
            self._check_s = min(_MAX_CHECK_S, 2 * self._check_s)
            if any(used is connection and not one.subscribed for one, (used, _) in self._using.items()):
                self._quiet_s += asyncio.get_running_loop().time() - since_s
            if self._quiet_s < self._patient_s(connection):
                self._recover()
            elif connection is self.current and self._usable():
                self._suspect(Health.STUCK)
        elif connection is self.current and self._usable() and dialling is self._dialling:
            # A dial that has ended meanwhile is better evidence.
            self._outage_s = self._outage_s or asyncio.get_running_loop().time()
            self._suspect(Health.SILENT)

    def _patient_s(self, connection: PeerConnection) -> float:
        """Return the seconds for which a peer that answers probes may leave requests unanswered."""
        probe_s, outage_s = self._probe_timeout_s(connection), self._outage_s
        lost = outage_s is not None and asyncio.get_running_loop().time() - outage_s > _OUTAGE_S
        quick = self._answer_s < _PROBE_S  # a busy peer also answers probes late
        if lost and quick and self._stuck_s == _STUCK_S:  # unless the previous connection was stuck as well
            return probe_s
        return max(self._stuck_s, _STUCK_PROBES * probe_s)

    def _probe_timeout_s(self, connection: PeerConnection) -> float:
        late_s = min(_MAX_PROBE_S, _PROBE_RTT * self._answer_s)
        return max(_PROBE_S, _PROBE_RTT * (connection.stats().rtt_s or 0.0), late_s)

    async def _probe(self, connection: PeerConnection, least_s: float = 0.0) -> bool:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        alive = await connection.answers(max(least_s, self._probe_timeout_s(connection)))
        if alive:
            self._answer_s = loop.time() - begun_s
        return alive

    # ------------------------------------------------------------------ dialling

    def _redial(self, *, once: bool = False) -> asyncio.Task[None]:
        if self._dialling is None:
            if self.current is None:
                self._trouble = self._trouble or f"{self._dialler.names[0]} is not connected yet"
            work = self._dial_once() if once else self._dial_until_connected()
            self._dialling = asyncio.get_running_loop().create_task(work)
            self._dialling.add_done_callback(partial(self._dialled, once=once))
        return self._dialling

    def _dialled(self, task: asyncio.Task[None], *, once: bool) -> None:
        self._dialling = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            if self.current is None:
                self._trouble, self.unreachable = str(error), True
                self._dialled_first(error)
                if once and self._persistent and self._waiting and not isinstance(error, UnauthorizedError):
                    self._redial()  # a request arrived during the dial of `connected`
                    return
            else:
                kind = UnauthorizedError if isinstance(error, UnauthorizedError) else ConnectionLostError
                error = kind(f"the connection was lost, and dialling again failed: {error}")
            self._fail_waiting(error if isinstance(error, Exception) else ConnectionLostError(repr(error)))
        elif self._waiting and not (self.closed or self._usable()):
            self._redial()  # a request arrived as the last dial ended

    async def _dial_once(self) -> None:
        self._adopt(await self._dialler.dial())

    async def _dial_until_connected(self) -> None:
        loop, old = asyncio.get_running_loop(), self.current
        stats = ConnectionStats() if old is None else old.stats()
        start_s, tries = loop.time(), 1
        delivered = old is not None and not old.going_away and stats.bytes_received > 0
        if delivered or start_s - self._adopted_s > _SHORT_LIFE_S:
            self._pauses.reset()
        attempt_s = max(_ATTEMPT_S, _ATTEMPT_RTT * max(stats.rtt_s or 0.0, self._answer_s))
        while True:
            await asyncio.sleep(scattered(self._pauses.pause_s))
            pause_s = self._pauses.longer()
            begun_s = loop.time()
            try:
                await self._choose(await self._dial_within(attempt_s), begun_s)
            except UnauthorizedError:
                raise  # redialling would not help
            except TransportError as error:
                failure = error
            else:
                if self._usable():
                    return
                failure = ConnectionLostError(_SENT_AWAY)
            tries += 1
            self._trouble = f"connection lost, dialling again ({ordinal(tries)} try): {failure}"
            self._failed_dials += 1
            self.unreachable = self._failed_dials >= _UNREACHABLE
            if loop.time() - start_s + pause_s > self._patience_s:
                raise failure
            if not self._waiting:
                return  # the next request redials
            attempt_s *= 2

    async def _dial_within(self, seconds: float) -> PeerConnection:
        try:
            async with asyncio.timeout(seconds):
                return await self._dialler.dial()
        except TimeoutError as error:
            raise TransportError(f"no answer within {seconds:.3g} s") from error

    async def _choose(self, made: PeerConnection, begun_s: float) -> None:
        """Switch to a connection dialled since ``begun_s``, unless the old one is silent but proves to be alive."""
        old, took_s = self.current, asyncio.get_running_loop().time() - begun_s
        if old is not None and self._usable():
            alive = True
            try:
                if self.health is not Health.GOOD:
                    alive = self.health is Health.SILENT and await self._probe(old, took_s)
            finally:
                if alive:  # also if this was cancelled
                    with contextlib.suppress(TransportError):
                        await made.close()
            if alive:
                self._recover()
                self._answer_s = max(self._answer_s, took_s)
                return
        self._adopt(made)

    def _adopt(self, made: PeerConnection) -> None:
        self._adopted_s = asyncio.get_running_loop().time()
        old, self.current = self.current, made
        self._checked_bytes = made.stats().bytes_received
        forgotten = self.health is not Health.GOOD
        if old is not None:
            self.dials += 1
            self._leaving.append(old)
            for transfer in [one for one, (used, _) in self._using.items() if used is old]:
                if forgotten or transfer.subscribed:
                    why = _FORGOTTEN if forgotten else _REPLACED
                    transfer.reject(ConnectionLostError(f"{transfer.request}: {why}"))
            if old in self._leaving and (old.closed or not self._carries(old)):
                self._retire(old)
        else:
            self._dialled_first(None)
        if self.health is Health.STUCK:
            self._stuck_s *= 2
        self._quiet_s, self._outage_s = 0.0, None
        self._recover()
        self._start_waiting()

    def _retire(self, connection: PeerConnection) -> None:
        self._leaving.remove(connection)
        self._earlier_bytes += connection.stats().bytes_received
        self._closing.start(connection.close())


_WAITS_BYTES = 1 << 20
"""Missing bytes per connection required for a meaningful measurement."""
_MEASURED_S, _MEASURED_BYTES = 0.05, 4 << 20
"""Minimum seconds and bytes of a measurement."""
_MIN_GAIN_FACTOR = 1.1
"""Factor by which another connection must raise the rate."""
_AGAIN_S = 60.0
"""Seconds after which another connection is tried again if it was useless."""
_PATIENCE_S = 30.0
"""Seconds for which a lost peer is dialled while requests wait."""


def _of_connection(name: str, unconnected: str | None) -> Any:
    return property(lambda peer: getattr(peer._current, name, unconnected))  # noqa: SLF001


class Peer(PeerConnection):
    """Fetches from one peer, in one event loop. Its context manager connects."""

    backend: str = _of_connection("backend", "none")
    protocol: str = _of_connection("protocol", "none")
    finder: PrefixFinder | None = _of_connection("finder", None)

    def __init__(self, dialler: Dialler, *, needed: bool = True, patience_s: float = _PATIENCE_S) -> None:
        """Prepare; the first request or `connected` dials.

        If the first dial fails, requests fail if ``needed``. They also fail after ``patience_s`` seconds of redialling
        a lost peer.
        """
        self.first_dialled: Callable[[BaseException | None], None] = lambda _: None
        """Called as ``dialled`` of the first `RedialledConnection`."""
        self._dialler, self._needed, self._patience_s = dialler, needed, patience_s
        self._over = False
        self._connections = [self._new_connection(self._dialled)]
        self.used = 1
        self._opening: asyncio.Task[None] | None = None
        self._before = 0.0
        """Rate with one connection fewer, bytes per second; 0.0 with one connection."""
        self._since: tuple[float, int] | None = None
        """Time and received bytes at the start of the current measurement."""
        self._again_s = 0.0

    def _new_connection(self, dialled: Callable[[BaseException | None], None] = lambda _: None) -> RedialledConnection:
        return RedialledConnection(
            self._dialler,
            patience_s=self._patience_s,
            persistent=not self._needed,
            released=self._measure,
            dialled=dialled,
        )

    def _dialled(self, error: BaseException | None) -> None:
        self.first_dialled(error)

    async def __aenter__(self) -> Self:
        try:
            await self.connected()
        except BaseException as error:
            away = isinstance(error, NoAnswerError | ConnectionLostError | RequestError)
            if self._needed or not away or isinstance(error, UnauthorizedError):
                await self.close()
                raise
        return self

    # ------------------------------------------------------------------ Connection

    @property
    def _current(self) -> PeerConnection | None:
        return self._connections[0].current

    @property
    def names(self) -> Sequence[str]:
        connection = self._current
        return self._dialler.names if connection is None else super().names

    @property
    def peer(self) -> str | None:  # type: ignore[override]
        connection = self._current
        return self._dialler.names[0] if connection is None else connection.peer or self._dialler.names[0]

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """True if closed, or if the last dial failed and there never was a connection."""
        first = self._connections[0]
        return self._over or (self._needed and not self.reached and first.unreachable and not first.dialling)

    @property
    def reached(self) -> bool:  # type: ignore[override]
        """`Connection.reached` of the first connection."""
        return self._current is not None

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        return self._connections[0].trouble

    @property
    def unreachable(self) -> bool:  # type: ignore[override]
        return all(connection.unreachable for connection in self._connections)

    @property
    def announced_rate(self) -> float:  # type: ignore[override]
        """The highest `Connection.announced_rate` of all connections."""
        every = (
            connection.current.announced_rate for connection in self._connections if connection.current is not None
        )
        return max(every, default=0.0)

    @property
    def dials(self) -> int:
        """Number of reconnections."""
        return sum(connection.dials for connection in self._connections)

    async def connected(self) -> None:
        await self._connections[0].connected()

    async def renew(self) -> None:
        for connection in self._connections:
            await connection.renew()

    async def answers(self, within_s: float) -> bool:
        return self._current is not None and await self._current.answers(within_s)

    def stats(self) -> ConnectionStats:
        every = [connection.current.stats() for connection in self._connections if connection.current is not None]
        if not every:
            return ConnectionStats()
        return ConnectionStats(every[0].rtt_s, self._received())

    async def close(self) -> None:
        self._over = True
        if self._opening is not None:
            await cancel_all([self._opening])
        for connection in self._connections:
            await connection.close()

    # ------------------------------------------------------------------ Carrier

    def carry(self, transfer: GroupTransfer) -> None:
        if self._over:
            transfer.fail(ConnectionLostError(CLOSED))
            return
        connection = self._connections[0]
        if self.used > 1 and not transfer.request.live:  # one subscription per live track
            # A connection in trouble redials; until then it gets no new requests.
            connection = min(
                self._connections[: self.used], key=lambda each: (each.trouble is not None, each.left_bytes)
            )
        connection.carry(transfer)
        self._measure()

    # ------------------------------------------------------------------ connections

    def _received(self) -> int:
        return sum(connection.bytes_received for connection in self._connections)

    def _measure(self) -> None:
        if self._over or self._dialler.max_connections < 2:
            return
        waiting = sum(connection.left_bytes for connection in self._connections)
        if waiting < self.used * _WAITS_BYTES or self._opening is not None:  # opening may take a while
            self._since = None
            return
        now, received = asyncio.get_running_loop().time(), self._received()
        if self._since is None:
            self._since = now, received
            return
        seconds, gained = now - self._since[0], received - self._since[1]
        if seconds < _MEASURED_S or gained < _MEASURED_BYTES or now < self._again_s:
            return
        rate, self._since = gained / seconds, None
        if rate < _MIN_GAIN_FACTOR * self._before:
            self.used -= 1  # the path or this machine is saturated
            self._before, self._again_s = 0.0, now + _AGAIN_S
        elif self.used < self._dialler.max_connections:
            self._before = rate
            self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            if self.used == len(self._connections):
                connection = self._new_connection()
                try:
                    await connection.connected()
                except BaseException:
                    await connection.close()  # its dial would continue
                    raise
                self._connections.append(connection)
            self.used, self._since = self.used + 1, None
        except TransportError:  # the peer allows no more connections
            self._before, self._again_s = 0.0, asyncio.get_running_loop().time() + _AGAIN_S
        finally:
            self._opening = None
