"""Promises to vLLM: the number of played tokens that each waiting request can use.

In every step, vLLM queries the number of tokens to load for each waiting request. Until all workers have ended the
request's play, the answer is "ask again"; then it is the number of tokens that every worker has. If vLLM's prefix cache
has shrunk below the start of the play, the request is played again.

Requests that can all meet their deadlines are played (`kvabr.engines.vllm.shares`), earliest deadline first. Other
requests are computed when the engine has time. A late request waits until it delays no other request, for at most one
more deadline.

While other plays use host memory, a play may use a quarter of the free memory; larger tracks are excluded. A request
that does not fit with its smallest track waits, and is computed if memory is not available in time. A request larger
than the total limit is played alone, and other requests go first for half of its deadline.

Pure: no vLLM, no clock, no threads. ``now`` is the time in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import count

from kvabr.engines.layouts import whole_blocks
from kvabr.engines.vllm.shares import Demand, divide
from kvabr.player.session_types import GPU_PRICE
from kvabr.types.cost import MISS_PENALTY

_HUNG_S = 30.0
"""Seconds after its deadline at which a play without a report is abandoned."""
_FREE_DIVISOR = 4
"""A play may use the free memory divided by this."""
_MAX_UNPACED_PLAYS = 8
"""Maximum concurrent plays while the link's speed is unknown."""
_AHEAD_S, _AHEAD_TTFB = 0.05, 2.0
"""Plays begin this long before the link has finished the running ones: seconds, and multiples of the time to first
byte.
"""
_BASE_BUSY_SHARE = 0.5
"""A play may use larger tracks only if its smallest track needs at most this fraction of the remaining time."""
_MIN_TRANSFER_FACTOR = 1.25
"""Minimum time for a play, relative to the expected time of its transfer."""
_LOOK_S, _QUADRATIC_FROM, _MAX_SHARED = 0.05, 128, 512
"""Seconds between divisions of link and engine without events; number of requests above which this interval grows
quadratically, like the computation time (3 ms); maximum number of requests considered.
"""


@dataclass(frozen=True, slots=True)
class Terms:
    """Sizes, loss and groups of a request, for the tokens that vLLM does not have."""

    sizes: Sequence[int]
    """Host memory in bytes if the largest track is each of its tracks in turn, descending."""
    link_bytes: int = 0
    played_s: float = 0.0
    computed_s: float = 0.0
    loss: float = 0.0
    """Expected loss on the smallest track, nats per generated token."""
    chunks: Sequence[str] = ()
    """Chained digests of the groups to load; requests with equal digests share downloads."""


@dataclass(slots=True)
class _Waiting:
    first: int
    last: int
    due_s: float
    requested_s: float
    terms: Terms

    @property
    def last_s(self) -> float:
        """Latest start of the request's computation: one deadline late."""
        return 2 * self.due_s - self.requested_s


@dataclass(frozen=True, slots=True)
class Begun:
    """A play to begin, with a limit of host memory."""

    play: int
    request: str
    first: int
    last: int
    due_s: float
    bytes: int
    engine_price: float = GPU_PRICE


@dataclass(slots=True)
class _Held:
    begun: Begun
    load: Demand
    terms: Terms
    bytes: int
    arrived_bytes: int = 0
    ends: list[int] = field(default_factory=list)
    promised: int = 0


class Promises:
    """The plays of an engine's waiting requests."""

    def __init__(
        self,
        *,
        ranks: int,
        block: int,
        max_bytes: int,
        max_plays: int,
        same_ends: bool = False,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """Start without plays.

        ``ranks`` workers report the end of each play; ``max_bytes`` limits the host memory of all plays. ``same_ends``
        requires all workers to have the same number of tokens: with windows, a longer prefix lacks blocks of a shorter
        one.
        """
        self._ranks, self._block, self._same_ends = ranks, block, same_ends
        self._max_bytes, self._max_plays = max_bytes, max_plays
        self._numbers = numbers or count(1)
        self._held: dict[str, _Held] = {}
        self._requests: dict[int, str] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._released: set[str] = set()
        self._begun: list[Begun] = []
        self._dropped: list[int] = []
        self._unplayed = self._crowded = 0
        self._rate = self._ttfb_s = 0.0
        """Link speed in bytes per second (0.0: unknown), and seconds to the first byte."""
        self._engine_s = self._looked_s = -math.inf
        self._changed = False

    @property
    def held_bytes(self) -> int:
        """Host memory of running and unused plays, bytes."""
        return sum(held.bytes for held in self._held.values())

    @property
    def waiting(self) -> bool:
        """True if a request waits for the start or end of its play."""
        return bool(self._waiting) or any(len(held.ends) < self._ranks for held in self._held.values())

    def link(self, rate: float, ttfb_s: float) -> None:
        """Set the link's speed in bytes per second (0.0: unknown), and its time to first byte in seconds."""
        self._rate, self._ttfb_s = rate, ttfb_s

    def idle(self, now: float) -> None:
        self._engine_s = min(self._engine_s, now)

    def promised_tokens(
        self, request: str, computed: int, last: int, *, terms: Callable[[int], Terms], due_s: float, now: float
    ) -> int | None:
        """Return the number of promised tokens after the first ``computed``; None: ask again.

        ``last`` is the number of tokens at the origin; ``terms`` returns the request's terms, given the first token to
        load; ``due_s`` is the deadline of the play.
        """
        held = self._held.get(request)
        if last <= computed or request in self._released:
            self._released.discard(request)
            self._waiting.pop(request, None)
            return 0
        if held is None:
            return self._wait(request, computed, last, terms, due_s, now)
        first = held.begun.first
        if len(held.ends) < self._ranks:
            if now < held.begun.due_s + _HUNG_S:
                return None
            held.ends = [first] * self._ranks
        end = min(*held.ends, last)
        if self._same_ends and len(set(held.ends)) > 1:
            end = first
        if computed < first:  # vLLM has evicted tokens before the start of the play
            if end > first:
                self.drop(request)
                return self._wait(request, computed, last, terms, due_s, now)
            end = computed
        held.promised = max(computed, whole_blocks(end, self._block))
        return held.promised - computed

    def report(self, play: int, end: int, nbytes: int) -> bool:
        """Record that a worker's play ended with all tokens before ``end``; return False if the play was dropped."""
        request = self._requests.get(play)
        if request is None:
            return False
        held, self._changed = self._held[request], True
        held.ends.append(end)
        held.arrived_bytes = max(nbytes, held.arrived_bytes)
        if len(held.ends) == self._ranks:
            held.bytes = min(held.arrived_bytes, held.bytes)
        return True

    def use(self, request: str, external: int, now: float) -> tuple[int, int] | None:
        """End the wait of a request with ``external`` promised tokens; return the play and the first token to copy."""
        held = self._held.get(request)
        if held is not None:
            part = external / max(1, held.begun.last - held.begun.first)
            self._occupy(held.load.computed_s + part * (held.load.played_s - held.load.computed_s), now)
        if held is None or external <= 0:
            self.drop(request)
            return None
        self._forget(request)
        return held.begun.play, held.promised - external

    def drop(self, request: str) -> None:
        """Forget a request, and cancel its play."""
        self._waiting.pop(request, None)
        self._released.discard(request)
        held = self._held.get(request)
        if held is None:
            return
        self._forget(request)
        if held.begun in self._begun:
            self._begun.remove(held.begun)
        else:
            self._dropped.append(held.begun.play)

    def take(self, now: float) -> tuple[list[Begun], list[int], int, int]:
        """Divide link and engine among requests, and return the resulting changes.

        Return plays to begin, plays to drop, and the numbers of requests computed because they were late, and because
        of a lack of link or engine time.
        """
        self._share_out(now)
        news = self._begun, self._dropped, self._unplayed, self._crowded
        self._begun, self._dropped, self._unplayed, self._crowded = [], [], 0, 0
        return news

    # -------------------------------------------------------------- internals

    def _wait(
        self, request: str, computed: int, last: int, terms: Callable[[int], Terms], due_s: float, now: float
    ) -> int | None:
        waiting = self._waiting.get(request)
        if waiting is None:
            if now >= due_s:
                return 0
            self._waiting[request] = _Waiting(computed, last, due_s, now, terms(computed))
            self._changed = True
        else:
            self._changed |= waiting.due_s != due_s
            waiting.due_s = due_s
            if (waiting.first, waiting.last) != (computed, last):
                waiting.first, waiting.last, waiting.terms = computed, last, terms(computed)
        return None

    def _share_out(self, now: float) -> None:
        few = len(self._waiting) <= _MAX_UNPACED_PLAYS
        look_s = _LOOK_S * max(1.0, min(_MAX_SHARED, len(self._waiting)) / _QUADRATIC_FROM) ** 2
        if not self._waiting or not ((self._changed and few) or now >= self._looked_s + look_s):
            return
        passed_s, self._looked_s, self._changed = now - self._looked_s, now, False
        late = [name for name, each in self._waiting.items() if now >= each.due_s]
        early = [name for name, each in self._waiting.items() if now < each.due_s]
        order = nsmallest(_MAX_SHARED, early, key=lambda name: self._waiting[name].due_s)
        if not self._rate or len(self._waiting) + len(self._under_way()) == 1:
            self._begin_unpaced(order)
            self._compute(late, [], now, late=True)
            return
        loads = self._advance(passed_s * self._rate)
        going = sum(load.bytes for load in loads)
        loads = [load for load in loads if load.due_s > now] + self._loads(order)  # late plays end by themselves
        divided = divide(loads, self._rate, now=now, ttfb_s=self._ttfb_s, engine_s=self._engine_s)
        full = bool(divided.computed or divided.late)
        least = full or any(load.here_s - now > _BASE_BUSY_SHARE * (load.by_s - now) for load in divided.played)
        spare_s = min((load.by_s for load in divided.played), default=math.inf) - max(now, self._engine_s)
        for load in (*divided.played, *divided.late):  # a partial late play is better than none
            if load.begun:
                continue
            if going > self._rate * max(_AHEAD_S, _AHEAD_TTFB * self._ttfb_s):
                break
            scarce = load.computed_s * len(loads) > spare_s
            end_s = None if load in divided.late else self._end_s(load, now)
            if not self._begin(load.request, load, end_s, least=least, scarce=scarce):
                if self._yields(load.request, now):
                    continue
                break
            going += load.bytes
        self._compute([load.request for load in divided.computed], divided.played, now)
        if any(load.begun for load in divided.late):  # such a play may still be in time
            late = [name for name in late if now >= self._waiting[name].last_s]
        self._compute(late, divided.played, now, late=True)

    def _advance(self, arrived_bytes: float) -> list[Demand]:
        loads = sorted((held.load for held in self._under_way()), key=lambda load: load.due_s)
        for load in loads:
            arrived_bytes, load.bytes = max(0.0, arrived_bytes - load.bytes), max(0.0, load.bytes - arrived_bytes)
        return loads

    def _loads(self, order: Sequence[str]) -> list[Demand]:
        loads, coming = [], {chunk for held in self._under_way() for chunk in held.terms.chunks}
        for name in order:
            load, chunks = _load(name, self._waiting[name]), self._waiting[name].terms.chunks
            shared = bisect_left(chunks, True, key=lambda chunk: chunk not in coming)
            load.bytes *= 1 - shared / max(1, len(chunks))
            coming.update(chunks[shared:])
            loads.append(load)
        return loads

    def _begin_unpaced(self, order: Sequence[str]) -> None:
        scarce = len(self._waiting) + len(self._held) > 1
        for name in order:
            load = _load(name, self._waiting[name])
            if len(self._under_way()) >= _MAX_UNPACED_PLAYS or not self._begin(name, load, scarce=scarce):
                break

    def _yields(self, request: str, now: float) -> bool:
        waiting = self._waiting[request]
        early = now < (waiting.requested_s + waiting.due_s) / 2
        return early and waiting.terms.sizes[-1] > self._max_bytes

    def _under_way(self) -> list[_Held]:
        return [held for held in self._held.values() if len(held.ends) < self._ranks]

    def _end_s(self, load: Demand, now: float) -> float:
        """Return when a play must end so that its request and later requests meet their deadlines."""
        return min(load.due_s, max(load.by_s, now + _MIN_TRANSFER_FACTOR * (load.here_s - now)) + load.played_s)

    def _compute(self, requests: Sequence[str], played: Sequence[Demand], now: float, *, late: bool = False) -> None:
        for name in requests:
            held, waiting = self._held.get(name), self._waiting.get(name)
            if waiting is not None:
                load, last_s = _load(name, waiting), waiting.last_s
            else:
                assert held is not None  # noqa: S101  # it either waits or is played
                load, last_s = held.load, math.inf
            by_s = min((one.by_s for one in played if late or one.due_s < load.due_s), default=math.inf)
            if max(now, self._engine_s) + load.computed_s > by_s and now < last_s:
                continue
            self.drop(name)
            self._released.add(name)
            self._occupy(load.computed_s, now)
            self._unplayed += late
            self._crowded += not late

    def _occupy(self, seconds: float, now: float) -> None:
        self._engine_s = max(now, self._engine_s) + seconds

    def _begin(
        self, request: str, load: Demand, end_s: float | None = None, *, least: bool = False, scarce: bool = False
    ) -> bool:
        """Begin a play that must end by ``end_s``; return False if there is no memory for it.

        With ``least``, play only the smallest track. ``scarce`` is True if the engine has no time to compute the
        request.
        """
        waiting = self._waiting[request]
        if (size := self._fitting(waiting.terms.sizes[-1:] if least else waiting.terms.sizes)) is None:
            return False
        del self._waiting[request]
        # Computing it would make another request late, perhaps by its whole deadline.
        price = (MISS_PENALTY + 1.0) / load.computed_s if scarce and load.computed_s > 0 else GPU_PRICE
        due_s = waiting.due_s if end_s is None else end_s
        begun = Begun(next(self._numbers), request, waiting.first, waiting.last, due_s, size, price)
        load.begun = True
        self._held[request] = _Held(begun, load, waiting.terms, size)
        self._requests[begun.play] = request
        self._begun.append(begun)
        return True

    def _fitting(self, sizes: Sequence[int]) -> int | None:
        if len(self._under_way()) >= self._max_plays:
            return None
        if not (used := self.held_bytes):
            return sizes[0]
        free = self._max_bytes - used
        return next((size for size in sizes if size <= free // _FREE_DIVISOR), sizes[-1] if sizes[-1] <= free else None)

    def _forget(self, request: str) -> None:
        del self._requests[self._held.pop(request).begun.play]
        self._changed = True


def _load(request: str, waiting: _Waiting) -> Demand:
    terms = waiting.terms
    return Demand(request, waiting.due_s, terms.link_bytes, terms.played_s, terms.computed_s, terms.loss)
