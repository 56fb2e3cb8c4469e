"""Runs plays: admits them, gives each a connection, keeps them in the order of their deadlines, and ends them.

`Admission` bounds how many plays run at once. The others wait in the order of their deadlines, or are refused while
that still helps: a play that begins too late takes the link from others, and its engine could be computing instead.

`EdfScheduler` serves the earliest deadline first, in the few priorities that a connection has. MoQT has 256; those of a
play are in `kvabr.player.requests`. What plays need at least, groups on the cheapest track, goes before other tracks of
missing groups, and these before upgrades. The first two are divided into `LEVELS` levels each, one for each of the
plays whose deadlines come first; all further plays share the last. So among what is needed the play that ends first
goes first: if the link can serve all plays in time, this order does. Upgrades have the same scale in all plays, what
they save per byte, and keep their priorities: the last layers of one play must not come before the first of another.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import insort
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from kvabr.client.options import Limits, PlayOptions
from kvabr.client.peers import ClientPeer
from kvabr.client.result import NothingCached, Played, PlayedPrefix
from kvabr.client.sources import PlaySources
from kvabr.client.upgrades import Upgrades
from kvabr.player.requests import DEARER, LEAST_URGENT
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.work import cancel_all
from kvabr.types.errors import BusyError, PlayError, told_if_exhausted

K = TypeVar("K")
Purpose = Literal["play", "hint", "trial"]
"""What a turn is for: a play; a hint, which fetches ahead of plays; or to try a link while an engine computes."""

# ------------------------------------------------------------- whose turn it is

LEVELS = 16
_WAIT_SHARE = 0.25
"""Share of its deadline that a play waits for its turn at most."""


class Admission:
    """Bounds the plays of one event loop."""

    def __init__(self, plays: int, waiting: int, metrics: ClientMetrics, *, ahead: bool = False) -> None:
        """Begin with no plays, or with nothing that is fetched ``ahead``; see `kvabr.client.options.Limits`."""
        self._most = f"a client plays {plays} at once: compute this prompt instead, or try later"
        if ahead:
            self._most = f"a client fetches {plays} ahead at once: try later"
        self._max_plays, self._max_waiting = plays, waiting
        self._metrics = metrics
        self._playing = self._number = 0
        self._queue: list[tuple[float, int, asyncio.Future[bool]]] = []
        """A heap of (deadline, arrival number, whether the play is let in)."""
        self._closed = False

    @asynccontextmanager
    async def enter(self, deadline_s: float) -> AsyncIterator[float]:
        """Wait for a turn, and yield the seconds that it took.

        Raises:
            BusyError: there is no room, there will be none soon enough, or the client is closing.
        """
        waited_s = await self._wait(deadline_s)
        self._metrics.wait_seconds.observe(waited_s)
        try:
            yield waited_s
        finally:
            self._leave()

    def close(self) -> None:
        """Admit no more plays, and refuse those that wait."""
        self._closed = True
        for *_, turn in self._queue:
            if not turn.done():
                turn.set_result(False)

    async def _wait(self, deadline_s: float) -> float:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise self._refusal("closed", "the client is closing")
        if self._playing < self._max_plays and not self._queue:
            self._count(1)
            return 0.0
        self._queue = [waiting for waiting in self._queue if not waiting[2].done()]
        heapq.heapify(self._queue)  # what is left of a heap need not be one
        if len(self._queue) >= self._max_waiting:
            raise self._refusal("full", f"{self._playing} plays are under way and {len(self._queue)} wait")
        start_s, turn = loop.time(), loop.create_future()
        self._number += 1
        heapq.heappush(self._queue, (start_s + deadline_s, self._number, turn))
        self._metrics.plays_waiting.inc()
        try:
            await asyncio.wait([turn], timeout=_WAIT_SHARE * deadline_s)
            waited_s = loop.time() - start_s
            if not turn.done():
                raise self._refusal("late", f"no turn came within {waited_s:.3g} of its {deadline_s:g} s")
            if not turn.result():
                raise self._refusal("closed", "the client is closing")
        except asyncio.CancelledError:
            if turn.done() and turn.result():  # at this very moment
                self._leave()
            raise
        finally:
            turn.cancel()
            self._metrics.plays_waiting.dec()
        return waited_s

    def _refusal(self, why: str, what: str) -> BusyError:
        self._metrics.refused_total.labels(why).inc()
        return BusyError(f"{what}; {self._most}")

    def _count(self, by: int) -> None:
        self._playing += by
        self._metrics.plays_in_flight.inc(by)

    def _leave(self) -> None:
        self._count(-1)
        while self._queue and self._playing < self._max_plays:
            *_, turn = heapq.heappop(self._queue)
            if not turn.done():
                self._count(1)
                turn.set_result(True)


def wire_priority(level: int, priority: int, *, late: bool = False) -> int:
    """Return the priority of a request among those of all plays, from that among its play's own, both 0 to 255.

    The play whose deadline comes first has level 0. What a ``late`` play needs it needs on any track: else plays that
    begin after it, on cheaper tracks, could keep it from ever ending.
    """
    if priority >= LEAST_URGENT:
        return priority
    span = DEARER // LEVELS
    half, within = divmod(priority, DEARER)
    return (0 if late else half * DEARER) + level * span + within * span // DEARER


class EdfScheduler(Generic[K]):
    """Gives plays levels by their deadlines. It changes few, since each change is a message per request under way.

    A late play moves behind those that can still be on time, but only once: its owner gives it one deadline more, and
    plays that begin after that are due after it. So no play starves.
    """

    def __init__(self) -> None:
        self._plays: list[tuple[float, int, K]] = []
        """(deadline, arrival number, play), earliest deadline first."""
        self._levels: dict[K, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._plays)

    def __iter__(self) -> Iterator[K]:
        return (play for _, _, play in self._plays)

    def level(self, play: K) -> int:
        """Return the level of a play that was added."""
        return self._levels[play]

    def add(self, play: K, due_s: float) -> list[K]:
        """Add a play that is due at ``due_s``, and return the other plays whose levels have changed."""
        entry = (due_s, self._arrivals, play)
        self._arrivals += 1
        insort(self._plays, entry)
        place = self._plays.index(entry)
        before = self._levels[self._plays[place - 1][2]] if place else -1
        last = place + 1 == len(self._plays)
        behind = LEVELS if last else self._levels[self._plays[place + 1][2]]
        if before + 1 < behind:
            # Most plays come in the order in which they are due, so leave as much room behind as there is.
            self._levels[play] = before + 1 if last else (before + behind) // 2
            return []
        self._levels[play] = -1
        return [other for other in self._relevel() if other != play]

    def remove(self, play: K) -> list[K]:
        """Remove a play, and return those whose levels have changed."""
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

R = TypeVar("R", bound=Played | NothingCached | PlayedPrefix)

_MIN_LEFT_S = 1e-3
_LAST = 255
"""Priority of upgrades of caches that are in use, and of those of hints, while there are plays."""


class Clock:
    """Seconds since a play was called for, and to its deadline."""

    def __init__(self, deadline_s: float) -> None:
        """Start, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._start_s, self.deadline_s = self._loop.time(), deadline_s

    def now(self) -> float:
        """Return the seconds since the call."""
        return self._loop.time() - self._start_s

    def left(self) -> float:
        """Return the seconds to the deadline; negative once it has passed."""
        return self._start_s + self.deadline_s - self._loop.time()


@dataclass(slots=True)
class Turn:
    """The turn of one play."""

    connection: PlaySources
    clock: Clock
    """Runs since the call."""
    options: PlayOptions
    """Those that were asked for, reporting to telemetry."""
    plays: Callable[[], int]
    """Returns how many plays there are now, with this one; they share link, decoders and engine."""
    played: Played | NothingCached | PlayedPrefix | None = None

    def over(self, played: R) -> R:
        """Note what came of the play, and return it."""
        self.played = played
        return played


class PlayRunner:
    """The plays of one client, and the upgrades that go on after them."""

    def __init__(self, limits: Limits, metrics: ClientMetrics) -> None:
        self._metrics = metrics
        self._admission, self._ahead = (
            Admission(limits.plays, limits.waiting, metrics, ahead=ahead) for ahead in (False, True)
        )
        """Of plays, and of what is fetched ahead, which takes no play's place."""
        self._hints: set[PlaySources] = set()
        """Those that fetch ahead."""
        self._schedule: EdfScheduler[PlaySources] = EdfScheduler()
        self._plays: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        """Tasks that play, and what is done once they no longer do."""
        self._upgrades: set[asyncio.Task[None]] = set()
        """Upgrades of caches that are in use."""
        self._closing = False

    async def close(self) -> None:
        """End all plays and upgrades; plays that wait for their turn are refused."""
        first, self._closing = not self._closing, True
        self._admission.close()
        self._ahead.close()
        for task in self._plays if first else ():  # each is cancelled once
            task.cancel()
        if self._plays:
            await asyncio.wait(self._plays.values())
        await cancel_all(self._upgrades)

    @asynccontextmanager
    async def play(
        self,
        peers: Sequence[ClientPeer],
        deadline_s: float,
        options: PlayOptions,
        purpose: Purpose = "play",
    ) -> AsyncIterator[Turn]:
        """Yield a play's turn once it has come; the body plays, and says what came of it by `Turn.over`.

        A hint takes neither the turns of plays nor, while they want it, the link. A trial, beside a play that computes,
        is not counted, nor is a play of which the body says nothing, which goes on in another turn. The sources are
        ``peers``, which are dialled when it asks something of them. Closing the client ends the body, not the task that
        it runs in.

        Raises:
            BusyError: there are too many plays.
            PlayError: the client was closed meanwhile.
        """
        clock, result, ahead = Clock(deadline_s), "failed", purpose == "hint"
        try:
            with ExitStack() as reporting:
                for peer in peers:
                    reporting.enter_context(told_if_exhausted(peer.relieve))
                if options.telemetry is not None:
                    options = replace(options, log=reporting.enter_context(options.telemetry.play(options.log)))
                async with self._connected(peers, clock, ahead=ahead) as connection:
                    turn = Turn(connection, clock, options, self._under_way)
                    with self._until_closed():
                        yield turn
                    played = turn.played
                    if isinstance(played, Played) and played.upgrades is not None:
                        self._keep(connection, played.upgrades)
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
            asking = asyncio.current_task()
            if self._closing and asking is not None and not asking.cancelling():
                raise PlayError("the client was closed before the cache was there") from None
            raise
        finally:
            if purpose != "trial" and result:
                self._metrics.plays_total.labels("hint" if ahead else result).inc()

    # -------------------------------------------------------------- internals

    def _under_way(self) -> int:
        """Return how many plays there are; hints, and upgrades of caches in use, take what these leave."""
        return max(1, len(self._schedule) - len(self._upgrades) - len(self._hints))

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Let `close` end what is done meanwhile, as a timeout would."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # a coroutine runs in one
        over = self._plays[task] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            if self._closing:
                task.uncancel()
            del self._plays[task]
            over.set_result(None)

    @asynccontextmanager
    async def _connected(self, peers: Sequence[ClientPeer], clock: Clock, *, ahead: bool) -> AsyncIterator[PlaySources]:
        """Wait for a turn, and yield the connections of one play; leaving cancels whatever it still fetches."""
        loop = asyncio.get_running_loop()
        async with (self._ahead if ahead else self._admission).enter(clock.deadline_s):
            if self._closing:  # its turn came in the moment of closing, when nobody knew of its task
                raise asyncio.CancelledError
            connection = PlaySources([peer.downloads for peer in peers], lambda own: self._place(connection, own))
            # A loop that stood still may have used up the deadline: the play then gets what comes at once.
            due_s = loop.time() + max(_MIN_LEFT_S, clock.left())
            if ahead:
                self._hints.add(connection)
            self._reprioritise(self._schedule.add(connection, math.inf if ahead else due_s))
            late = loop.call_at(due_s, self._reschedule, connection, due_s + clock.deadline_s)
            try:
                yield connection
            finally:
                late.cancel()
                if not connection.kept:
                    await self._give_up(connection)

    def _keep(self, connection: PlaySources, upgrades: Upgrades) -> None:
        """Leave a connection to the upgrades of a cache in use, behind all plays."""

        async def until_over() -> None:
            try:
                with suppress(Exception):  # the caller gets it from `Upgrades.wait`
                    await upgrades.wait()
            finally:
                upgrades.cancel()
                await self._give_up(connection)

        connection.kept = True
        self._reschedule(connection, math.inf)
        task = asyncio.create_task(until_over())
        self._upgrades.add(task)
        task.add_done_callback(self._upgrades.discard)

    async def _give_up(self, connection: PlaySources) -> None:
        try:
            await connection.close()
        finally:  # the play may be cancelled at this very moment
            self._hints.discard(connection)
            self._reprioritise(self._schedule.remove(connection))

    def _place(self, connection: PlaySources, priority: int) -> int:
        # A play that has the link for itself uses all priorities.
        if len(self._schedule) < 2:
            return priority
        if connection.kept:
            return _LAST
        if connection in self._hints:
            return _LAST if priority >= LEAST_URGENT else wire_priority(LEVELS - 1, DEARER + priority // 2)
        return wire_priority(self._schedule.level(connection), priority, late=connection.late)

    def _reschedule(self, connection: PlaySources, due_s: float) -> None:
        """Change a play's deadline: once it is late, others go before it."""
        if connection in self._hints:
            return
        connection.late = True
        changed = self._schedule.remove(connection)
        self._reprioritise([*changed, *self._schedule.add(connection, due_s), connection])

    def _reprioritise(self, changed: Iterable[PlaySources]) -> None:
        # The first and the last of several plays had, or now has, the link for itself.
        for connection in changed if len(self._schedule) > 2 else list(self._schedule):
            connection.reprioritise()
