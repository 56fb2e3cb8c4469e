"""Which plays may run, and whose requests go first.

`Admission` bounds how many plays run at once. The others wait in the order of their deadlines, or are refused while
that still helps: a play that begins too late takes the link from others, and its engine could be computing instead.

`EdfScheduler` serves the earliest deadline first, in the few priorities that a connection has. MoQT has 256; those of a
play are in `kvabr.player.priorities`. What plays need at least, groups on the cheapest track, goes before other tracks
of missing groups, and these before upgrades. The first two are divided into `LEVELS` levels each, one for each of the
plays whose deadlines come first; all further plays share the last. So among what is needed the play that ends first
goes first: if the link can serve all plays in time, this order does. Upgrades have the same scale in all plays, what
they save per byte, and keep their priorities: the last layers of one play must not come before the first of another.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import insort
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from kvabr.player.priorities import DEARER, LEAST_URGENT
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.errors import BusyError

K = TypeVar("K")

LEVELS = 16


class Admission:
    """Bounds the plays of one event loop."""

    def __init__(self, plays: int, waiting: int, wait_share: float, metrics: ClientMetrics) -> None:
        """Begin with no plays; see `kvabr.client.options.Limits` for the bounds."""
        self._max_plays, self._max_waiting, self._share = plays, waiting, wait_share
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
            await asyncio.wait([turn], timeout=self._share * deadline_s)
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
        return BusyError(f"{what}; a client plays {self._max_plays} at once: compute this prompt instead, or try later")

    def _count(self, by: int) -> None:
        self._playing += by
        self._metrics.plays_in_flight.set(self._playing)

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
