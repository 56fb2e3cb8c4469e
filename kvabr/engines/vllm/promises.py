"""Plays that come before the promise: what each waiting request has in place, and what vLLM is promised of it.

While a request waits, vLLM asks in every step how many tokens can be loaded. The answer is "ask again" until all
workers have reported the end of the request's play, and then the number of tokens that every worker has, verified and
compressed. vLLM allocates blocks for exactly these, and waits until they are decoded there.

Meanwhile what vLLM has in its own prefix cache changes. If it is more, less is promised. If it is less than the play
left out, the request is played again.

Host memory is bounded, and so is the number of plays. A play may fill what its dearest track takes. While others are
held, it gets a quarter of what is free, by doing without its dearest tracks; once it has ended, it counts with what it
has brought. A request that does not fit on its cheapest track waits, the earliest deadline first, and is computed if
there is no room by then. One that is larger than the bound is played when nothing else is held.

Pure: no vLLM, no clock, no threads. Time comes in as ``now``, seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from kvabr.engines.layouts import whole_blocks

_HUNG_S = 30.0
"""Seconds after its deadline at which a play without a report is given up. A worker ends its plays long before."""
_SHARE = 4
"""Of what is free, a play gets one in so many parts, so that others find room after it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A play to begin."""

    play: int
    request: str
    first: int
    """First token that is wanted; vLLM has those before it."""
    last: int
    """Token after the last that is wanted."""
    due_s: float
    bytes: int
    """Host memory that it may fill."""


@dataclass(slots=True)
class _Held:
    """A play and its memory."""

    begun: Begun
    bytes: int
    came: int = 0
    """Most bytes that a worker has reported."""
    ends: list[int] = field(default_factory=list)
    """Token after the last in place, of each worker that has reported."""
    promised: int = 0
    """Token after the last that vLLM was promised."""


class Promises:
    """The plays of requests that wait, of one engine."""

    def __init__(
        self,
        *,
        ranks: int,
        block: int,
        max_bytes: int,
        max_plays: int,
        alike: bool = False,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """Start without plays.

        Args:
            ranks: workers that report the end of each play.
            block: tokens in a block of the engine.
            max_bytes: host memory of all plays.
            max_plays: plays under way at once.
            alike: whether a play is of use only if all workers have the same in place: with windows, a worker that
                has more lacks what a shorter prefix needs.
            numbers: of the plays to come; None: from 1.
        """
        self._ranks, self._block, self._alike = ranks, block, alike
        self._max_bytes, self._max_plays = max_bytes, max_plays
        self._numbers = numbers or count(1)
        self._held: dict[str, _Held] = {}
        self._requests: dict[int, str] = {}
        self._queue: dict[str, float] = {}
        """Requests that wait for memory, and their deadlines."""
        self._order: list[tuple[float, int, str]] = []
        """A heap of the same, and of some that do not wait any more: deadline, number, request."""
        self._arrivals = count()
        self._begun: list[Begun] = []
        self._dropped: list[int] = []
        self._unplayed = 0

    @property
    def held_bytes(self) -> int:
        """Host memory of all plays that were begun and neither used nor dropped."""
        return sum(held.bytes for held in self._held.values())

    def ask(
        self, request: str, computed: int, last: int, *, room: Callable[[int], Sequence[int]], due_s: float, now: float
    ) -> int | None:
        """Return how many tokens behind the first ``computed`` are promised; None: ask again.

        Args:
            request: its id. It may be asked about again and again, with other numbers.
            computed: tokens that vLLM has itself, whole blocks.
            last: token after the last that the origin has.
            room: returns the host memory of a play, given its first token: bytes on each of its tracks, descending.
            due_s: deadline of the play; nothing begins after it.
            now: the time.
        """
        held = self._held.get(request)
        if last <= computed:
            self._queue.pop(request, None)
            return 0
        if held is None:
            return self._begin(request, computed, last, room, due_s, now)
        first = held.begun.first
        if len(held.ends) < self._ranks:
            if now < held.begun.due_s + _HUNG_S:
                return None
            held.ends = [first] * self._ranks
        end = min(*held.ends, last)
        if self._alike and len(set(held.ends)) > 1:
            end = first
        if computed < first:  # vLLM has evicted tokens that the play left out
            if end > first:
                self.drop(request)
                return self._begin(request, computed, last, room, due_s, now)
            end = computed
        held.promised = max(computed, whole_blocks(end, self._block))
        return held.promised - computed

    def report(self, play: int, end: int, nbytes: int) -> bool:
        """Note that a worker's play has ended; return whether it is wanted.

        Args:
            play: its number.
            end: all before this token is in place.
            nbytes: host memory of what it brought.
        """
        request = self._requests.get(play)
        if request is None:
            return False
        held = self._held[request]
        held.ends.append(end)
        held.came = max(nbytes, held.came)
        if len(held.ends) == self._ranks:
            held.bytes = min(held.came, held.bytes)
        return True

    def use(self, request: str, external: int) -> tuple[int, int] | None:
        """End the wait of a request: vLLM has scheduled it with ``external`` tokens of what was promised.

        Return the play and the first token to copy from it; None if nothing is to be copied.
        """
        held = self._held.get(request)
        if held is None or external <= 0:
            self.drop(request)
            return None
        self._forget(request)
        return held.begun.play, held.promised - external

    def drop(self, request: str) -> None:
        """Forget a request, and cancel its play."""
        self._queue.pop(request, None)
        held = self._held.get(request)
        if held is None:
            return
        self._forget(request)
        if held.begun in self._begun:
            self._begun.remove(held.begun)
        else:
            self._dropped.append(held.begun.play)

    def take(self) -> tuple[list[Begun], list[int], int]:
        """Return what is new: the plays to begin, those to drop before, and how many requests found no room."""
        news = self._begun, self._dropped, self._unplayed
        self._begun, self._dropped, self._unplayed = [], [], 0
        return news

    def _begin(
        self, request: str, computed: int, last: int, room: Callable[[int], Sequence[int]], due_s: float, now: float
    ) -> int | None:
        if now >= due_s:
            self._unplayed += request in self._queue
            self._queue.pop(request, None)
            return 0
        if request not in self._queue:
            self._queue[request] = due_s
            heappush(self._order, (due_s, next(self._arrivals), request))
        if request != self._head(now) or (size := self._fitting(room(computed))) is None:
            return None
        del self._queue[request]
        begun = Begun(next(self._numbers), request, computed, last, due_s, size)
        self._held[request] = _Held(begun, size)
        self._requests[begun.play] = request
        self._begun.append(begun)
        return None

    def _head(self, now: float) -> str | None:
        """Return the request that waits with the earliest deadline to come; None if there is none.

        vLLM may not ask about one whose deadline has passed, as when it has no blocks for another before it.
        """
        while self._order:
            due_s, _, request = self._order[0]
            if self._queue.get(request) == due_s:
                if now < due_s:
                    return request
                del self._queue[request]
                self._unplayed += 1
            heappop(self._order)
        return None

    def _fitting(self, sizes: Sequence[int]) -> int | None:
        """Return the memory that a play gets, of what it would take on each of its tracks; None: it has to wait."""
        if sum(len(held.ends) < self._ranks for held in self._held.values()) >= self._max_plays:
            return None
        if not (used := self.held_bytes):
            return sizes[0]
        free = self._max_bytes - used
        return next((size for size in sizes if size <= free // _SHARE), sizes[-1] if sizes[-1] <= free else None)

    def _forget(self, request: str) -> None:
        del self._requests[self._held.pop(request).begun.play]
