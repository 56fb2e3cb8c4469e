"""Plays that come before the promise: what each waiting request has in place, and what vLLM is promised of it.

While a request waits, vLLM asks in every step how many tokens can be loaded. The answer is "ask again" until all
workers have reported the end of the request's play, and then the number of tokens that every worker has, verified and
compressed. vLLM allocates blocks for exactly these, and waits until they are decoded there.

Meanwhile what vLLM has in its own prefix cache changes. If it is more, less is promised. If it is less than the play
left out, the request is played again.

Link and engine are shared out among all requests that wait (`kvabr.engines.vllm.shares`): those are played that can be
in time together, the earliest deadline first, one soon after the other, each by the time at which the engine must begin
with it. Those that must be computed are, as soon as the engine has time for them; a late request waits until no other
would be late for it, for one deadline more at most. While nothing is known of the link, a few are played at a time.

Host memory is bounded, and so is the number of plays. A play may fill what its dearest track takes. While others are
held, it gets a quarter of what is free, by doing without its dearest tracks; once it has ended, it counts with what it
has brought. A request that does not fit on its cheapest track waits, and is computed if there is no room by then. One
that is larger than the bound is played when nothing else is held, and lets others go first for half of its deadline.

Pure: no vLLM, no clock, no threads. Time comes in as ``now``, seconds.
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
"""Seconds after its deadline at which a play without a report is given up. A worker ends its plays long before."""
_SHARE = 4
"""Of what is free, a play gets one in so many parts, so that others find room after it."""
_BLIND = 8
"""Plays under way at once while nothing is known of the link."""
_AHEAD_S, _AHEAD_TTFB = 0.05, 2.0
"""Seconds, and times to first byte, of the link's work that is begun ahead."""
_BUSY = 0.5
"""Share of the time until the engine must begin with it that a play on its cheapest track may take for the link to have
time for dearer ones."""
_SLACK = 1.25
"""What a play gets at least, over the time in which the link should bring it."""
_LOOK_S, _MANY, _MOST = 0.05, 128, 512
"""Seconds until what waits is shared out anew if nothing has happened, or if `_MANY` requests wait, for which it takes
some 3 ms. For twice as many it takes four times as long, so it is done that much less often. Of more than `_MOST`,
those due first are looked at. The engine's scheduler waits for all of it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request would take, behind what vLLM has of it."""

    sizes: Sequence[int]
    """Host memory of its play, bytes, with each of its tracks as the dearest, descending."""
    link_bytes: int = 0
    """Bytes that the link has to bring at least."""
    played_s: float = 0.0
    """Seconds of the engine if it is played."""
    computed_s: float = 0.0
    """Seconds of the engine if it is computed."""
    loss: float = 0.0
    """Expected loss on its cheapest track, nats per generated token."""
    chunks: Sequence[str] = ()
    """Chained digests of the groups that are wanted: requests that begin with the same ones share their downloads."""


@dataclass(slots=True)
class _Waiting:
    """A request that is neither played nor computed yet."""

    first: int
    last: int
    due_s: float
    asked_s: float
    terms: Terms

    @property
    def last_s(self) -> float:
        """When it is computed at the latest: one deadline later than it should have been there."""
        return 2 * self.due_s - self.asked_s


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
    engine_price: float = GPU_PRICE
    """Price of a second of the engine, nats per generated token."""


@dataclass(slots=True)
class _Held:
    """A play and its memory."""

    begun: Begun
    load: Demand
    terms: Terms
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
        self._waiting: dict[str, _Waiting] = {}
        self._released: set[str] = set()
        """Requests that are to be computed."""
        self._begun: list[Begun] = []
        self._dropped: list[int] = []
        self._unplayed = self._crowded = 0
        self._rate = self._ttfb_s = 0.0
        """Of the link: bytes per second, 0.0 if that is not known, and seconds from a request to its first byte."""
        self._engine_s = self._looked_s = -math.inf
        """When the engine is free, and when the waiting requests were shared out last."""
        self._changed = False
        """Whether anything has happened since."""

    @property
    def held_bytes(self) -> int:
        """Host memory of all plays that were begun and neither used nor dropped."""
        return sum(held.bytes for held in self._held.values())

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its play to begin or to end."""
        return bool(self._waiting) or any(len(held.ends) < self._ranks for held in self._held.values())

    def link(self, rate: float, ttfb_s: float) -> None:
        """Note what is known of the link, bytes per second (0.0: nothing) and seconds to a first byte."""
        self._rate, self._ttfb_s = rate, ttfb_s

    def idle(self, now: float) -> None:
        """Note that the engine has nothing to do."""
        self._engine_s = min(self._engine_s, now)

    def ask(
        self, request: str, computed: int, last: int, *, terms: Callable[[int], Terms], due_s: float, now: float
    ) -> int | None:
        """Return how many tokens behind the first ``computed`` are promised; None: ask again.

        Args:
            request: its id. It may be asked about again and again, with other numbers.
            computed: tokens that vLLM has itself, whole blocks.
            last: token after the last that the origin has.
            terms: returns what the request would take, given the first token that is wanted.
            due_s: deadline of the play; nothing begins after it.
            now: the time.
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
        if self._alike and len(set(held.ends)) > 1:
            end = first
        if computed < first:  # vLLM has evicted tokens that the play left out
            if end > first:
                self.drop(request)
                return self._wait(request, computed, last, terms, due_s, now)
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
        held, self._changed = self._held[request], True
        held.ends.append(end)
        held.came = max(nbytes, held.came)
        if len(held.ends) == self._ranks:
            held.bytes = min(held.came, held.bytes)
        return True

    def use(self, request: str, external: int, now: float) -> tuple[int, int] | None:
        """End the wait of a request: vLLM has scheduled it with ``external`` tokens of what was promised.

        Return the play and the first token to copy from it; None if nothing is to be copied.
        """
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
        """Share out link and engine, and return what is new.

        That is: the plays to begin, those to drop before, how many requests found no room, and how many are computed
        so that others are in time.
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
        """Begin plays, and have requests computed, as link and engine allow."""
        few = len(self._waiting) <= _BLIND
        look_s = _LOOK_S * max(1.0, min(_MOST, len(self._waiting)) / _MANY) ** 2
        if not self._waiting or not ((self._changed and few) or now >= self._looked_s + look_s):
            return
        passed_s, self._looked_s, self._changed = now - self._looked_s, now, False
        late = [name for name, each in self._waiting.items() if now >= each.due_s]
        early = [name for name, each in self._waiting.items() if now < each.due_s]
        order = nsmallest(_MOST, early, key=lambda name: self._waiting[name].due_s)
        if not self._rate or len(self._waiting) + len(self._under_way()) == 1:  # it has link and engine for itself
            self._begin_blindly(order)
            self._compute(late, [], now, late=True)
            return
        loads = self._advance(passed_s * self._rate)
        going = sum(load.bytes for load in loads)
        loads = [load for load in loads if load.due_s > now] + self._loads(order)  # late ones end by themselves
        divided = divide(loads, self._rate, now=now, ttfb_s=self._ttfb_s, engine_s=self._engine_s)
        full = bool(divided.computed or divided.late)
        least = full or any(load.here_s - now > _BUSY * (load.by_s - now) for load in divided.played)
        spare_s = min((load.by_s for load in divided.played), default=math.inf) - max(now, self._engine_s)
        for load in (*divided.played, *divided.late):  # a part of what is late is better than nothing of it
            if load.begun:
                continue
            if going > self._rate * max(_AHEAD_S, _AHEAD_TTFB * self._ttfb_s):
                break
            scarce = load.computed_s * len(loads) > spare_s
            end_s = None if load in divided.late else self._end_s(load, now)
            if not self._begin(load.request, load, end_s, least=least, scarce=scarce):
                if self._holds_nobody_up(load.request, now):
                    continue
                break
            going += load.bytes
        self._compute([load.request for load in divided.computed], divided.played, now)
        if any(load.begun for load in divided.late):  # which may be in time yet
            late = [name for name in late if now >= self._waiting[name].last_s]
        self._compute(late, divided.played, now, late=True)

    def _advance(self, came: float) -> list[Demand]:
        """Return what plays under way still take, now that the link has brought ``came`` bytes more."""
        loads = sorted((held.load for held in self._under_way()), key=lambda load: load.due_s)
        for load in loads:
            came, load.bytes = max(0.0, came - load.bytes), max(0.0, load.bytes - came)
        return loads

    def _loads(self, order: Sequence[str]) -> list[Demand]:
        """Return what waiting requests would take, groups that come for another not counted."""
        loads, coming = [], {chunk for held in self._under_way() for chunk in held.terms.chunks}
        for name in order:
            load, chunks = _load(name, self._waiting[name]), self._waiting[name].terms.chunks
            shared = bisect_left(chunks, True, key=lambda chunk: chunk not in coming)
            load.bytes *= 1 - shared / max(1, len(chunks))
            coming.update(chunks[shared:])
            loads.append(load)
        return loads

    def _begin_blindly(self, order: Sequence[str]) -> None:
        """Begin a few plays, in this order, which have no turns."""
        scarce = len(self._waiting) + len(self._held) > 1
        for name in order:
            load = _load(name, self._waiting[name])
            if len(self._under_way()) >= _BLIND or not self._begin(name, load, scarce=scarce):
                break

    def _holds_nobody_up(self, request: str, now: float) -> bool:
        """Return whether others go before a request, which has to be played alone and is not due for long."""
        waiting = self._waiting[request]
        early = now < (waiting.asked_s + waiting.due_s) / 2
        return early and waiting.terms.sizes[-1] > self._max_bytes

    def _under_way(self) -> list[_Held]:
        return [held for held in self._held.values() if len(held.ends) < self._ranks]

    def _end_s(self, load: Demand, now: float) -> float:
        """Return when a play must end, so that the engine can begin with its prompt, and with those behind it."""
        return min(load.due_s, max(load.by_s, now + _SLACK * (load.here_s - now)) + load.played_s)

    def _compute(self, requests: Sequence[str], played: Sequence[Demand], now: float, *, late: bool = False) -> None:
        """Have requests computed for which the engine has time before it must begin with what is played."""
        for name in requests:
            held, waiting = self._held.get(name), self._waiting.get(name)
            if waiting is not None:
                load, last_s = _load(name, waiting), waiting.last_s
            else:
                assert held is not None  # noqa: S101  # it waits, or is played
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
        """Begin a play if there is room for it, and return whether there is.

        Args:
            request: that it is for.
            load: what it takes.
            end_s: when it must end; None: at its deadline.
            least: have it do with its cheapest track: the link has no time for more.
            scarce: whether the engine has no time to compute it.
        """
        waiting = self._waiting[request]
        if (size := self._fitting(waiting.terms.sizes[-1:] if least else waiting.terms.sizes)) is None:
            return False
        del self._waiting[request]
        # Another request would be late, perhaps by its whole deadline.
        price = (MISS_PENALTY + 1.0) / load.computed_s if scarce and load.computed_s > 0 else GPU_PRICE
        due_s = waiting.due_s if end_s is None else end_s
        begun = Begun(next(self._numbers), request, waiting.first, waiting.last, due_s, size, price)
        load.begun = True
        self._held[request] = _Held(begun, load, waiting.terms, size)
        self._requests[begun.play] = request
        self._begun.append(begun)
        return True

    def _fitting(self, sizes: Sequence[int]) -> int | None:
        """Return the memory that a play gets, of what it would take on each of its tracks; None: it has to wait."""
        if len(self._under_way()) >= self._max_plays:
            return None
        if not (used := self.held_bytes):
            return sizes[0]
        free = self._max_bytes - used
        return next((size for size in sizes if size <= free // _SHARE), sizes[-1] if sizes[-1] <= free else None)

    def _forget(self, request: str) -> None:
        del self._requests[self._held.pop(request).begun.play]
        self._changed = True


def _load(request: str, waiting: _Waiting) -> Demand:
    terms = waiting.terms
    return Demand(request, waiting.due_s, terms.link_bytes, terms.played_s, terms.computed_s, terms.loss)
