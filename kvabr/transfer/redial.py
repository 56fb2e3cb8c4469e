"""A connection that redials when it is lost, and when its peer sends GOAWAY.

Transfers on a lost connection fail. Requests made while there is no connection wait for the next one; without waiting
requests nobody dials. After GOAWAY, new requests go to a new connection, and the old one is kept until its transfers
have ended.

A killed peer does not say so. When nothing arrives of what was requested, the peer is probed with a PING; if that is
not answered either, it is dialled in parallel to the old connection. During an outage of the path that dial fails too,
and the old connection continues afterwards. Only a peer that answers the dial, but not the old connection in as much
time again, has forgotten it: one with too much to do is late with everything, and more dials would only add to that.
One that answers probes and brings nothing for seconds may have forgotten the requests, or its QUIC library has; a new
connection replaces the old one. After an outage it does so at once: a QUIC sender whose window is full of what was lost
sends nothing before its next retransmission, which may take as long again as the outage did (RFC 9002, section 6.2).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from kvabr.transfer.interface import ConnectionStats, PeerConnection
from kvabr.transfer.transfer import GroupTransfer
from kvabr.types.backoff import Backoff, scattered
from kvabr.types.errors import ConnectionLostError, TransportError, UnauthorizedError
from kvabr.types.words import ordinal

Dial = Callable[[], Awaitable[PeerConnection]]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
"""Pauses between dials: doubled each time, and randomised between half and one and a half times that."""
_UNREACHABLE = 2
"""Dials that fail one after the other, after which a peer counts as dead."""
_SHORT_LIFE_S = 1.0
"""A connection that lasts less than this, and brings nothing or sends us away, does not reset the pauses."""
_LOOK_S, _LONGEST_LOOK_S = 0.1, 1.0
"""Seconds between checks whether anything arrives; doubled whenever nothing did but the peer answered a probe, so that
a busy peer is not probed all the time."""
_SIGN_S, _SIGN_RTT, _LONGEST_SIGN_S = 0.25, 4.0, 4.0
"""Seconds, and round trips or times of the last answer, that the answer to a probe may take; the probe may be lost and
sent again. However late the last answer was, never more than the last of these. Each request that is answered sooner
halves what an answer is believed to take, so that a peer that was slow once is soon known to be quick."""
_FORGOTTEN_S, _FORGOTTEN_SIGNS = 3.0, 4.0
"""Seconds, and times of what the answer to a probe may take, after which a peer that answers probes, but no request, is
dialled anew; the seconds are doubled each time. It may also be slow: a store may be, or a relay that waits for its
origin."""
_OUTAGE_S = 1.0
"""Seconds since a probe was not answered, without a byte of any group, that are taken for an outage."""
_ATTEMPT_S, _ATTEMPT_RTT = 1.0, 8.0
"""Seconds, and round trips, that the first of a series of dials may take; doubled each time. QUIC backs off while it
retries, so a fresh dial reaches a peer that comes back sooner."""


_REPLACED = "the connection was replaced by another"


class UnreachedConnection(PeerConnection):
    """Stands for the connection to a peer that has not been reached: every transfer on it fails."""

    backend = protocol = "none"
    closed = True

    def __init__(self, trouble: str | None = None) -> None:
        self.trouble = trouble

    def carry(self, transfer: GroupTransfer) -> None:
        """See `Carrier.carry`."""
        transfer.fail(ConnectionLostError(self.trouble or ""))

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """See `Carrier.reprioritise`."""

    def drop(self, transfer: GroupTransfer) -> None:
        """See `Carrier.drop`."""

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`."""
        return ConnectionStats()

    async def close(self) -> None:
        """See `Connection.close`."""


class RedialledConnection(PeerConnection):
    """Fetches on the latest of a series of connections to one peer."""

    def __init__(self, first: PeerConnection, dial: Dial, *, patience_s: float = 30.0, peer: str | None = None) -> None:
        """Take over a connection, or an `UnreachedConnection`, which the first request replaces.

        ``dial`` makes another to the same peer, never concurrently; ``peer`` is its name if connections have none. When
        it has failed for ``patience_s`` seconds, waiting transfers fail, and the next request starts again.
        """
        self.peer, self.backend, self.protocol = first.peer or peer, first.backend, first.protocol
        self._current, self._dial, self._patience_s = first, dial, patience_s
        self._leaving: list[PeerConnection] = []
        self._using: dict[GroupTransfer, PeerConnection] = {}
        self._begun_s: dict[GroupTransfer, float] = {}
        """When each of these was requested on the connection that it is on."""
        self._forgotten: set[GroupTransfer] = set()
        """Those whose peer answers a new connection, but no longer theirs."""
        self._dialling: asyncio.Task[None] | None = None
        self._waiting: dict[GroupTransfer, None] = {}
        """Those that wait for a connection, the earliest first."""
        self._closing: set[asyncio.Task[None]] = set()
        self._earlier_bytes = 0
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._adopted_s = float("-inf")
        self._watching: asyncio.Task[None] | None = None
        self._look_s = _LOOK_S
        self._asked = asyncio.Event()
        """Set when something is requested, which is reason to look sooner."""
        self._doubted: PeerConnection | None = None
        """The connection whose peer did not answer the last probe, or that brings nothing."""
        self._brought = first.stats().bytes_received
        """Bytes that the current connection had brought when it was last looked at."""
        self._quiet_s = 0.0
        """Seconds for which requests have waited since anything came, while the peer answered probes."""
        self._forgotten_s = _FORGOTTEN_S
        self._silent: tuple[PeerConnection, int, float] | None = None
        """The connection that may have lost what was in flight, what it had brought by then, and when that was."""
        self._given_up: int | None = None
        """What had come when something in flight was given up, maybe in an outage; None: it has been found out."""
        self._answer_s = 0.0
        """Seconds that the peer took for its last answer to a probe or a dial, or to requests since."""
        self._answered_s = float("-inf")
        """When the latest of the requests was made that the current connection has answered."""
        self._barren = False
        """Whether the peer answers the last probes, but no request."""
        self.trouble = first.trouble
        self.dials = self._failed_dials = 0
        """How often it has reconnected."""

    def carry(self, transfer: GroupTransfer) -> None:
        """Request a group on the current connection, or on the next one; see `Carrier.carry`."""
        if self.closed:
            transfer.fail(ConnectionLostError("this side closed the connection"))
        elif self._usable():
            self._start(transfer)
        else:
            self._waiting[transfer] = None
            self._redial()

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """See `Carrier.reprioritise`; of what waits for a connection, which takes everything at once."""

    def drop(self, transfer: GroupTransfer) -> None:
        """See `Carrier.drop`; of what waits for a connection: `released` has done it."""

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
        """Close all connections; transfers that wait for one fail."""
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

    def _start(self, transfer: GroupTransfer) -> None:
        self._begun_s[transfer] = asyncio.get_running_loop().time()
        self._using[transfer] = transfer.source = self._current
        self._current.carry(transfer)
        if not transfer.request.live:
            self._look_s = _LOOK_S
            self._asked.set()
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def answered(self, transfer: GroupTransfer) -> None:
        """See `Carrier.answered`."""
        if self._using.get(transfer) is self._current:
            begun_s = self._begun_s[transfer]
            self._answered_s = max(self._answered_s, begun_s)
            took_s = asyncio.get_running_loop().time() - begun_s
            self._answer_s = min(self._answer_s, max(took_s, self._answer_s / 2))

    def explain(self, transfer: GroupTransfer, error: Exception) -> Exception:
        """See `Carrier.explain`."""
        if isinstance(error, UnauthorizedError) and self._using.get(transfer) in self._leaving:
            return ConnectionLostError(f"{transfer.request}: {_REPLACED}")
        if transfer in self._forgotten and isinstance(error, ConnectionLostError):
            return ConnectionLostError(f"{transfer.request}: the peer fell silent; it answers a new connection")
        return error

    def released(self, transfer: GroupTransfer) -> None:
        """See `Carrier.released`; retire a replaced connection after its last transfer."""
        self._waiting.pop(transfer, None)
        self._begun_s.pop(transfer, None)
        self._forgotten.discard(transfer)
        used = self._using.pop(transfer, None)
        if used is self._current and not (transfer.complete or transfer.subscribed or transfer.readers):
            self._given_up = used.stats().bytes_received
        if used is not None and used in self._leaving and used not in self._using.values():
            self._retire(used)

    async def _watch(self) -> None:
        """While transfers are in flight and nothing arrives, probe the peer, and dial if it does not answer.

        What is given up before anything arrives has it probed once more, to know of an outage.
        """
        try:
            while self._using or (self._given_up is not None and self._usable()):
                connection, before = self._current, self._brought
                since_s = asyncio.get_running_loop().time()
                self._asked.clear()
                asked = False
                with contextlib.suppress(TimeoutError):
                    if self._look_s > _LOOK_S:
                        asked = await asyncio.wait_for(self._asked.wait(), self._look_s)
                    else:
                        await asyncio.sleep(self._look_s)
                if connection is not self._current:
                    self._look_s = _LOOK_S
                elif (brought := connection.stats().bytes_received) != before:
                    self._heard()
                    self._look_s, self._brought = _LOOK_S, brought
                    if self._given_up != brought:
                        self._given_up = None
                elif not asked and self._usable():
                    await self._look_after(connection, since_s)
        finally:
            self._watching = None

    async def _look_after(self, connection: PeerConnection, since_s: float) -> None:
        """Probe a connection that has brought nothing since ``since_s``, if something may be missing."""
        if self._given_up is None and connection not in self._using.values():
            return
        dialling, self._given_up = self._dialling, None
        if await self._lives(connection):
            if connection.stats().bytes_received != self._brought:
                return  # it has answered more than the probe
            self._look_s = min(_LONGEST_LOOK_S, 2 * self._look_s)
            if self._awaited(connection):
                self._quiet_s += asyncio.get_running_loop().time() - since_s
            if self._quiet_s < self._patient_s(connection):
                self._well()
            elif connection is self._current and self._usable():
                self._doubted, self._barren = connection, True
                self.trouble = "the peer answers probes, but no request"
                self._redial()
        elif connection is self._current and self._usable() and dialling is self._dialling:
            # A dial that has ended meanwhile knows better.
            self._fell_silent(connection)
            if connection in self._using.values():
                self._doubted = connection
                self.trouble = self.trouble or "the peer has fallen silent"
                self._redial()

    def _well(self) -> None:
        """Note that the peer answers."""
        self._doubted = self.trouble = None
        self._failed_dials, self.unreachable = 0, False

    def _heard(self) -> None:
        self._well()
        self._quiet_s, self._forgotten_s, self._barren = 0.0, _FORGOTTEN_S, False

    def _fell_silent(self, connection: PeerConnection) -> None:
        """Note that what is in flight on a connection may be lost, unless it has brought nothing since it was noted."""
        received = connection.stats().bytes_received
        if self._silent is None or self._silent[:2] != (connection, received):
            self._silent = connection, received, asyncio.get_running_loop().time()

    def _patient_s(self, connection: PeerConnection) -> float:
        """Return for how many seconds a peer that answers probes may answer no request."""
        signs_s, now = self._sign_s(connection), asyncio.get_running_loop().time()
        silent, received, since_s = self._silent or (None, 0, now)
        lost = silent is connection and received == connection.stats().bytes_received and now - since_s > _OUTAGE_S
        quick = self._answer_s < _SIGN_S  # one that is busy is late with probes, too
        if lost and quick and self._forgotten_s == _FORGOTTEN_S:  # or the connection before brought nothing either
            return signs_s
        return max(self._forgotten_s, _FORGOTTEN_SIGNS * signs_s)

    def _awaited(self, connection: PeerConnection) -> bool:
        """Return whether something is in flight on a connection that should be answered soon."""
        return any(used is connection and not one.subscribed for one, used in self._using.items())

    def _sign_s(self, connection: PeerConnection) -> float:
        late_s = min(_LONGEST_SIGN_S, _SIGN_RTT * self._answer_s)
        return max(_SIGN_S, _SIGN_RTT * (connection.stats().rtt_s or 0.0), late_s)

    async def _lives(self, connection: PeerConnection, least_s: float = 0.0) -> bool:
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
        elif self._waiting and not (self.closed or self._usable()):
            self._redial()  # a request came as the last dial ended

    async def _dial_until_there(self) -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        fruitful = not self._current.going_away and self._current.stats().bytes_received > 0
        if fruitful or start_s - self._adopted_s > _SHORT_LIFE_S:
            self._pauses.reset()
        tries = 1
        attempt_s = max(_ATTEMPT_S, _ATTEMPT_RTT * max(self._current.stats().rtt_s or 0.0, self._answer_s))
        while True:
            await asyncio.sleep(scattered(self._pauses.pause_s))
            pause_s = self._pauses.longer()
            begun_s = loop.time()
            try:
                made = await self._dial_within(attempt_s)
            except UnauthorizedError:
                raise  # trying again would not help
            except TransportError as error:
                tries += 1
                self.trouble = f"connection lost, dialling again ({ordinal(tries)} try): {error}"
                self._failed_dials += 1
                self.unreachable = self._failed_dials >= _UNREACHABLE
                if loop.time() - start_s + pause_s > self._patience_s:
                    raise
                if not self._waiting:
                    return  # the next request starts again
                attempt_s *= 2
            else:
                await self._choose(made, begun_s)
                return

    async def _dial_within(self, seconds: float) -> PeerConnection:
        try:
            async with asyncio.timeout(seconds):
                return await self._dial()
        except TimeoutError as error:
            raise TransportError(f"no answer within {seconds:.3g} s") from error

    async def _choose(self, made: PeerConnection, begun_s: float) -> None:
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
                self._well()
                if self._answered_s < begun_s:
                    self._answer_s = max(self._answer_s, took_s)
                return
        self._adopt(made)

    def _adopt(self, made: PeerConnection) -> None:
        self.dials += 1
        self._adopted_s = asyncio.get_running_loop().time()
        old, self._current = self._current, made
        self._brought, self._quiet_s = made.stats().bytes_received, 0.0
        self._given_up = self._silent = None
        self.backend, self.protocol = made.backend, made.protocol
        self.peer = made.peer or self.peer
        self._leaving.append(old)
        for transfer in [one for one, used in self._using.items() if used is old and one.subscribed]:
            transfer.reject(ConnectionLostError(f"{transfer.request}: {_REPLACED}"))
        if old is self._doubted:
            self._forgotten.update(transfer for transfer, used in self._using.items() if used is old)
        if old in self._leaving and (old.closed or old is self._doubted or old not in self._using.values()):
            self._retire(old)
        self._well()
        if self._barren:
            self._barren = False
            self._forgotten_s *= 2
        self._tell(None)

    def _retire(self, connection: PeerConnection) -> None:
        self._leaving.remove(connection)
        self._earlier_bytes += connection.stats().bytes_received
        task = asyncio.get_running_loop().create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _tell(self, error: Exception | None) -> None:
        """Begin with what waits, or let it fail."""
        waiting = list(self._waiting)
        if error is None and self._usable():
            self._waiting.clear()
            for transfer in waiting:
                self._start(transfer)
        elif error is not None:
            for transfer in waiting:
                transfer.fail(error)
