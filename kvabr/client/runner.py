"""Run plays: admit them, connect each, order them by deadline, and end them.

`Admission` limits concurrent plays. Others wait in the order of their deadlines, or are refused early enough for the
engine to compute instead.

`EdfScheduler` serves the earliest deadline first (EDF) with the 256 priorities of MoQT. Groups on the cheapest track go
first, then other tracks of missing groups, then upgrades (`kvabr.player.requests`). The first two have `LEVELS` levels
each: one per play with the earliest deadlines, and the last for all other plays. Upgrades have no levels, so the last
layers of one play do not precede the first of another.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import insort
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import torch

from kvabr.abr.estimators import Estimator, Prior
from kvabr.client.memory import Memory
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.peers import ClientPeer, combined
from kvabr.client.result import NothingCached, Played, PlayedPrefix
from kvabr.client.sources import PlaySources
from kvabr.client.upgrades import Upgrades
from kvabr.codec.threads import decoder_threads
from kvabr.player.play_policy import new_estimator
from kvabr.player.requests import DEARER_PRIORITY, UPGRADE_PRIORITY
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import TaskSet, cancel_all
from kvabr.transfer.work import decoders
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine
from kvabr.types.errors import BusyError, PlayError, UsageError, exhaustion_as_error
from kvabr.types.events import SourceLeftOut

K = TypeVar("K")

# ------------------------------------------------------------- admission and order

LEVELS = 16
_WAIT_SHARE = 0.25


class Admission:
    """Limits the concurrent plays, or hints, of one event loop."""

    def __init__(self, plays: int, waiting: int, metrics: ClientMetrics) -> None:
        self._max_plays, self._max_waiting = plays, waiting
        self._metrics = metrics
        self._playing = self._number = 0
        self._queue: list[tuple[float, int, asyncio.Future[bool]]] = []
        """Heap of (deadline, arrival number, future; True admits, False refuses)."""
        self._closed = False

    @asynccontextmanager
    async def enter(self, deadline_s: float) -> AsyncIterator[float]:
        """Wait to be admitted, and yield the seconds waited; raise `BusyError` if full, too late, or closed."""
        waited_s = await self._wait(deadline_s)
        self._metrics.wait_seconds.observe(waited_s)
        try:
            yield waited_s
        finally:
            self._leave()

    def close(self) -> None:
        """Admit no further plays, and refuse those that wait."""
        self._closed = True
        for *_, admitted in self._queue:
            if not admitted.done():
                admitted.set_result(False)

    async def _wait(self, deadline_s: float) -> float:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise self._refusal("closed", "the client is closing")
        if self._playing < self._max_plays and not self._queue:
            self._count(1)
            return 0.0
        self._queue = [waiting for waiting in self._queue if not waiting[2].done()]
        heapq.heapify(self._queue)  # filtering breaks the heap order
        if len(self._queue) >= self._max_waiting:
            raise self._refusal("full", f"{self._playing} plays are under way and {len(self._queue)} wait")
        start_s, admitted = loop.time(), loop.create_future()
        self._number += 1
        heapq.heappush(self._queue, (start_s + deadline_s, self._number, admitted))
        self._metrics.plays_waiting.inc()
        try:
            await asyncio.wait([admitted], timeout=_WAIT_SHARE * deadline_s)
            waited_s = loop.time() - start_s
            if not admitted.done():
                raise self._refusal("late", f"it waited {waited_s:.3g} s of its deadline of {deadline_s:g} s")
            if not admitted.result():
                raise self._refusal("closed", "the client is closing")
        except asyncio.CancelledError:
            if admitted.done() and admitted.result():  # admitted at the moment of cancellation
                self._leave()
            raise
        finally:
            admitted.cancel()
            self._metrics.plays_waiting.dec()
        return waited_s

    def _refusal(self, why: str, what: str) -> BusyError:
        self._metrics.refused_total.labels(why).inc()
        remedy = "compute this prompt instead, or try later"
        return BusyError(f"{what}; a client runs {self._max_plays} plays at once: {remedy}")

    def _count(self, by: int) -> None:
        self._playing += by
        self._metrics.plays_in_flight.inc(by)

    def _leave(self) -> None:
        self._count(-1)
        while self._queue and self._playing < self._max_plays:
            *_, admitted = heapq.heappop(self._queue)
            if not admitted.done():
                self._count(1)
                admitted.set_result(True)


def wire_priority(level: int, priority: int, *, late: bool = False) -> int:
    """Return a request's priority among all plays, from its priority within its play; both 0 (first) to 255.

    The play with the earliest deadline has level 0. For a ``late`` play all tracks of missing groups count as the
    cheapest: otherwise newer plays on cheaper tracks could delay it forever.
    """
    if priority >= UPGRADE_PRIORITY:
        return priority
    span = DEARER_PRIORITY // LEVELS
    half, within = divmod(priority, DEARER_PRIORITY)
    return (0 if late else half * DEARER_PRIORITY) + level * span + within * span // DEARER_PRIORITY


class EdfScheduler(Generic[K]):
    """Assigns levels to plays by deadline. It changes few levels: each change costs a message per open request.

    When a play becomes late, the owner moves it once, to a deadline after those of the plays that can still be on time.
    Newer plays have later deadlines, so no play starves.
    """

    def __init__(self) -> None:
        self._plays: list[tuple[float, int, K]] = []
        """(deadline, arrival number, play), sorted."""
        self._levels: dict[K, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._plays)

    def __iter__(self) -> Iterator[K]:
        return (play for _, _, play in self._plays)

    def level(self, play: K) -> int:
        """Return the level of a play, 0 for the earliest deadline."""
        return self._levels[play]

    def add(self, play: K, due_s: float) -> list[K]:
        """Add a play, and return other plays with changed levels."""
        entry = (due_s, self._arrivals, play)
        self._arrivals += 1
        insort(self._plays, entry)
        place = self._plays.index(entry)
        before = self._levels[self._plays[place - 1][2]] if place else -1
        last = place + 1 == len(self._plays)
        following = LEVELS if last else self._levels[self._plays[place + 1][2]]
        if before + 1 < following:
            # Most plays arrive in order of deadline: leave as many free levels after this one as possible.
            self._levels[play] = before + 1 if last else (before + following) // 2
            return []
        self._levels[play] = -1
        return [other for other in self._relevel() if other != play]

    def remove(self, play: K) -> list[K]:
        """Remove a play, and return those with changed levels."""
        self._plays = [entry for entry in self._plays if entry[2] != play]
        del self._levels[play]
        shared = len(set(self._levels.values())) < len(self._plays)
        return self._relevel() if shared else []

    def _relevel(self) -> list[K]:
        changed = []
        for place, (_, _, play) in enumerate(self._plays):
            level = min(place, LEVELS - 1)
            if self._levels[play] != level:
                self._levels[play] = level
                changed.append(play)
        return changed


# -------------------------------------------------------------------- the plays

_GUARD_SHARE, _MAX_GUARD_S = 0.02, 0.05


def check_deadline(deadline_s: float) -> None:
    """Raise `UsageError` unless a deadline is a positive, finite number of seconds."""
    if not 0 < deadline_s < math.inf:
        raise UsageError(f"the deadline must be a positive number of seconds, got {deadline_s:g}")


def guard_s(deadline_s: float) -> float:
    """Return the seconds to keep in reserve before the deadline, since event loops are sometimes late."""
    return min(_MAX_GUARD_S, _GUARD_SHARE * deadline_s)


R = TypeVar("R", bound=Played | NothingCached | PlayedPrefix)
T = TypeVar("T")

_FIRST_CALL_S, _FIRST_CALL_TIMES = 60.0, 20.0
"""Longest wait for an engine without timings, which may have to load and compile: the larger of these seconds, and this
multiple of its estimate."""


class Clock:
    """Seconds since the call of a play, and to its deadline."""

    def __init__(self, deadline_s: float) -> None:
        """Start on the running event loop; raise `UsageError` unless the deadline is positive and finite."""
        check_deadline(deadline_s)
        self._loop = asyncio.get_running_loop()
        self._start_s, self.deadline_s = self._loop.time(), deadline_s

    def now(self) -> float:
        """Return the seconds since the call."""
        return self._loop.time() - self._start_s

    def left(self) -> float:
        """Return the seconds to the deadline; negative once it has passed."""
        return self._start_s + self.deadline_s - self._loop.time()


@dataclass(slots=True)
class PlayCall:
    """One play, from its admission on."""

    connection: PlaySources
    clock: Clock
    options: PlayOptions
    memory: Memory
    plays: Callable[[], int]
    """Returns the number of current plays, including this one, which share link, decoders and engine."""
    engine: Engine | None
    cost: PrefillCost | None
    """Cost of the engine's prefill; required for a prefix play."""
    tokens: Sequence[int]
    result: Played | NothingCached | PlayedPrefix | None = None
    device: torch.device | None = field(init=False)
    """Device that decodes; None: the processor."""
    decoders: int = field(init=False)
    """Number of groups decoded in parallel; 1 for a GPU, which decodes a batch at a time."""

    def __post_init__(self) -> None:
        # A bound method would make the connection keep the play's data in memory.
        self.connection.on_left_out = partial(_left_out, self.options, self.clock)
        out, device = self.options.out, self.options.device
        self.device = device if out is None else out.device
        batches = self.options.decode_share is not None or (self.device is not None and self.device.type == "cuda")
        self.decoders = 1 if batches else decoder_threads()

    def finish(self, result: R) -> R:
        """Record ``result`` for the metrics, and return it."""
        self.result = result
        return result

    @property
    def link(self) -> Prior:
        """Combined estimate of the links to all sources."""
        return combined(peer.expected(self.memory.history) for peer in self.connection.peers)

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, less a reserve."""
        return self.clock.left() - guard_s(self.clock.deadline_s)

    @property
    def patience_s(self) -> float:
        """Seconds from the call after which a play without an engine ends."""
        return self.options.patience * self.clock.deadline_s

    @property
    def first_call_s(self) -> float:
        """Seconds to wait for an engine beyond its estimate; more than 0 only before its first timing."""
        engine = self.engine
        if engine is None or self.options.prefill_cost is not None or not self.memory.costs.of(engine).empty:
            return 0.0
        return max(_FIRST_CALL_S, _FIRST_CALL_TIMES * self.engine_s(0, len(self.tokens)))

    def engine_s(self, before: int, tokens: int) -> float:
        """Return the engine's seconds for ``tokens`` after ``before`` others; 0.0 without an engine."""
        return 0.0 if self.cost is None else self.cost.seconds(before, tokens)

    def estimator(self) -> Estimator:
        """Return a new estimator of the link, as the options or the policy choose."""
        return new_estimator(self.options.policy, self.options.estimator)

    def save_costs(self) -> None:
        """Save the engine's prefill timings, in a thread."""
        if self.engine is not None:
            asyncio.get_running_loop().run_in_executor(None, self.memory.costs.save_engine, self.engine)

    def with_trouble(self, message: str) -> str:
        """Return a message, with the connection's last error appended."""
        trouble = self.connection.trouble
        return message if trouble is None or trouble in message else f"{message}; {trouble}"

    async def in_time(self, read: Callable[[], T]) -> T:
        """Run ``read``, which reads a catalog, in a thread; raise `PlayError` if it takes too long."""
        end_s = None if self.engine is not None else max(0.0, self.patience_s - self.clock.now())
        try:
            async with asyncio.timeout(end_s):
                return await asyncio.get_running_loop().run_in_executor(decoders(), read)
        except TimeoutError as error:
            late = f"the deadline of {self.clock.deadline_s:g} s passed before its catalog was read; allow more"
            raise PlayError(f"no cache after {self.clock.now():.2g} s: {late}") from error


def _left_out(options: PlayOptions, clock: Clock, source: int, why: str) -> None:
    options.note(SourceLeftOut(clock.now(), source, why))


_MIN_LEFT_S = 1e-3
_LOWEST_PRIORITY = 255
"""Priority of a play's upgrades after its return, and of a hint's upgrades, while other plays run."""


class PlayRunner:
    """Runs a client's plays, and the upgrades after them."""

    def __init__(self, limits: Limits, memory: Memory, metrics: ClientMetrics) -> None:
        self._memory, self._metrics = memory, metrics
        self._admission, self._hint_admission = (Admission(limits.plays, limits.waiting, metrics) for _ in range(2))
        self._schedule: EdfScheduler[PlaySources] = EdfScheduler()
        self._plays: dict[asyncio.Timeout, asyncio.Future[None]] = {}
        self._upgrades = TaskSet()
        self._closing = False

    async def close(self) -> None:
        """End all plays and upgrades, and refuse waiting plays."""
        self._closing = True
        self._admission.close()
        self._hint_admission.close()
        for limit in self._plays:
            if not limit.expired():
                limit.reschedule(0.0)
        if self._plays:
            await asyncio.wait(self._plays.values())
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not clean up
        await cancel_all(self._upgrades)

    @asynccontextmanager
    async def play(
        self,
        peers: Sequence[ClientPeer],
        deadline_s: float,
        options: PlayOptions,
        engine: Engine | None = None,
        cost: PrefillCost | None = None,
        tokens: Sequence[int] = (),
        *,
        hint: bool = False,
    ) -> AsyncIterator[PlayCall]:
        """Yield a play once it is admitted; the body runs it, and reports its result with `PlayCall.finish`.

        Hints have a separate limit, and use the link only while no play does. A play without a result is not counted in
        the metrics, since it continues in another call. Closing the client ends the body with an error, but does not
        cancel its task.

        Raises:
            UsageError: the deadline is not a positive number of seconds.
            BusyError: there are too many plays.
            PlayError: the client was closed meanwhile.
        """
        clock, result = Clock(deadline_s), "failed"
        closed = asyncio.timeout(None)
        try:
            with ExitStack() as reporting:
                reporting.enter_context(exhaustion_as_error())
                if options.telemetry is not None:
                    options = replace(options, log=reporting.enter_context(options.telemetry.play(options.log)))
                async with self._connected(peers, clock, hint=hint) as connection:
                    call = PlayCall(connection, clock, options, self._memory, self._under_way, engine, cost, tokens)
                    async with closed:
                        closed.reschedule(0.0 if self._closing else None)
                        over = self._plays[closed] = asyncio.get_running_loop().create_future()
                        try:
                            yield call
                        finally:
                            del self._plays[closed]
                            over.set_result(None)
                    played = call.result
                    if isinstance(played, Played) and played.upgrades is not None:
                        self._upgrade(connection, played.upgrades)
            if isinstance(played, Played):
                result = "met" if played.met else "late"
            else:
                nothing = isinstance(played, NothingCached) or (played is not None and not played.tokens)
                result = "nothing" if nothing else "met" if played is not None else ""
        except BusyError:
            result = "refused"
            raise
        except asyncio.CancelledError:
            result = "aborted"
            raise
        except TimeoutError as error:
            if not closed.expired():
                raise
            result = "aborted"
            raise PlayError("the client was closed before the cache was in place") from error
        finally:
            if result:
                self._metrics.plays_total.labels("hint" if hint else result).inc()

    # -------------------------------------------------------------- internals

    def _under_way(self) -> int:
        return max(1, sum(not (each.hint or each.upgrading) for each in self._schedule))

    @asynccontextmanager
    async def _connected(self, peers: Sequence[ClientPeer], clock: Clock, *, hint: bool) -> AsyncIterator[PlaySources]:
        """Wait for admission, and yield a play's connections; on exit cancel its downloads."""
        loop = asyncio.get_running_loop()
        async with (self._hint_admission if hint else self._admission).enter(clock.deadline_s):
            connection = PlaySources(peers, lambda own: self._place(connection, own))
            # If a blocked loop has used up the deadline, still take groups that have arrived.
            due_s = loop.time() + max(_MIN_LEFT_S, clock.left())
            connection.hint = hint
            self._reprioritise(self._schedule.add(connection, math.inf if hint else due_s))
            late = loop.call_at(due_s, self._reschedule, connection, due_s + clock.deadline_s)
            try:
                yield connection
            finally:
                late.cancel()
                if not connection.upgrading:
                    await self._release(connection)

    def _upgrade(self, connection: PlaySources, upgrades: Upgrades) -> None:
        async def until_over() -> None:
            try:
                with suppress(Exception):  # the caller gets it from `Upgrades.wait`
                    await upgrades.wait()
            finally:
                upgrades.cancel()
                await self._release(connection)

        connection.upgrading = True
        self._reschedule(connection, math.inf)
        self._upgrades.start(until_over())

    async def _release(self, connection: PlaySources) -> None:
        try:
            await connection.close()
        finally:  # the play may be cancelled at this moment
            self._reprioritise(self._schedule.remove(connection))

    def _place(self, connection: PlaySources, priority: int) -> int:
        # Without other plays, all priorities are available.
        if len(self._schedule) < 2:
            return priority
        if connection.upgrading:
            return _LOWEST_PRIORITY
        if connection.hint:
            return (
                _LOWEST_PRIORITY
                if priority >= UPGRADE_PRIORITY
                else wire_priority(LEVELS - 1, DEARER_PRIORITY + priority // 2)
            )
        return wire_priority(self._schedule.level(connection), priority, late=connection.late)

    def _reschedule(self, connection: PlaySources, due_s: float) -> None:
        if connection.hint:
            return
        connection.late = True
        changed = self._schedule.remove(connection)
        self._reprioritise([*changed, *self._schedule.add(connection, due_s), connection])

    def _reprioritise(self, changed: Iterable[PlaySources]) -> None:
        # With at most two plays, mappings also change for the others.
        for connection in changed if len(self._schedule) > 2 else list(self._schedule):
            connection.reprioritise()
