"""Simulates two sites and the link between them, request by request.

- Each site has workers that prefill one prompt at a time, in order of arrival. Requests that wait for a fetched prefix
  do not block a worker. A prefill takes its cost times a random log-normal factor, so forecasts are never exact.
- Requests use the link in order of arrival. A remote prefill sends pieces during the computation.
- At the same time, the local site may compute from the front, as kvabr's player does. Pieces before the planned front
  are held back, later pieces are sent in reverse order, and both sites stop where they meet.
- Each site has an LRU cache of prompts. The local (decode) site keeps every prompt with its answer; the remote site
  keeps the prompts that it prefilled.

Later requests never affect earlier ones, so the outcome of a request is computed at its arrival.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Self

from kvabr.replay.link import FIRST_BYTE_S, PAYLOAD_SHARE, Capacity
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr_lab.day.queues import PrefixCache, SharedWire, WorkerPool
from kvabr_lab.day.requests import TOKEN_S, DayRequest
from kvabr_lab.route import BOTH, FETCH, LOCAL, REMOTE, CacheSize, Place


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A prefill site."""

    cost: PrefillCost
    workers: int = 1
    cache_tokens: int = 2_000_000

    def __post_init__(self) -> None:
        if self.workers < 1 or self.cache_tokens < 0:
            raise UsageError(
                f"a site must have at least 1 worker, and room for 0 or more cached tokens, got {self.workers} and "
                f"{self.cache_tokens}"
            )


@dataclass(frozen=True, slots=True)
class WorldShape:
    """Both sites and the link."""

    local: SiteShape
    remote: SiteShape
    cache: CacheSize
    trace: Trace
    """Rate of the link from the remote to the local site, including headers."""
    rtt_s: float
    live: bool = True
    """True if the remote site sends during the prefill."""
    both: bool = True
    """True if the local site can compute the start of a prompt at the same time."""
    pieces: int = 24
    """Approximate number of pieces of a remote prefill; they shrink towards both ends, down to a group."""
    scatter: float = 0.1
    """Standard deviation of the logarithm of a prefill's time relative to its forecast."""
    warm: tuple[tuple[int, int], ...] = ()
    """Beginnings of prompts that both sites have cached at first, as `DayRequest.parts`, most important first."""

    def __post_init__(self) -> None:
        if not (0 <= self.rtt_s <= 60 and 0 <= self.scatter <= 3):
            raise UsageError(
                f"the round trip must be 0 to 60 s and the scatter 0 to 3, got {self.rtt_s} and {self.scatter}"
            )

    @property
    def mean_rate(self) -> float:
        """Mean payload rate, bytes/s."""
        return self.trace.mean_rate * PAYLOAD_SHARE


class Choice(NamedTuple):
    """Where and how a request is served."""

    place: Place
    front_tokens: int = 0
    """For `BOTH`: tokens to compute locally; the rest arrives over the link."""


class _Piece(NamedTuple):
    begin: int
    until: int
    ready: float


@dataclass(frozen=True, slots=True)
class DayOutcome:
    """Outcome of a request."""

    choice: Choice
    ttft_s: float
    local_s: float
    remote_s: float
    bytes: float

    @property
    def place(self) -> Place:
        """The chosen place."""
        return self.choice.place


@dataclass(frozen=True, slots=True)
class SiteView:
    """What a router knows about a site when a request arrives."""

    queue_s: float
    """Expected seconds until a worker is free."""
    cached_tokens: int


class World:
    """Both sites and the link, at the time of the latest request."""

    def __init__(self, shape: WorldShape) -> None:
        self.shape = shape
        capacity = Capacity(shape.trace.scaled(PAYLOAD_SHARE), slow_start=False)
        self._set(
            WorkerPool(shape.local.workers),
            WorkerPool(shape.remote.workers),
            SharedWire(capacity),
            PrefixCache(shape.local.cache_tokens),
            PrefixCache(shape.remote.cache_tokens),
        )
        for part in reversed(shape.warm):
            self._kept_here.add((part,), 0.0)
            self._kept_there.add((part,), 0.0)

    def _set(
        self, here: WorkerPool, there: WorkerPool, wire: SharedWire, kept_here: PrefixCache, kept_there: PrefixCache
    ) -> None:
        self.wire = wire
        self._here, self._there, self._kept_here, self._kept_there = here, there, kept_here, kept_there

    def copy(self) -> Self:
        """Return an independent copy."""
        made = object.__new__(type(self))
        made.shape = self.shape
        made._set(
            self._here.copy(), self._there.copy(), self.wire.copy(), self._kept_here.copy(), self._kept_there.copy()
        )
        return made

    @property
    def rtt_s(self) -> float:
        """Round trip including processing."""
        return self.shape.rtt_s + FIRST_BYTE_S

    def view(self, request: DayRequest, now: float) -> tuple[SiteView, SiteView]:
        """Return what a router knows about the two sites when a request arrives."""
        here = self._view(request, now, self._here, self._kept_here)
        return here, self._view(request, now, self._there, self._kept_there)

    @staticmethod
    def _view(request: DayRequest, now: float, pool: WorkerPool, kept: PrefixCache) -> SiteView:
        queue_s = pool.queue_s(now)
        return SiteView(queue_s, kept.match(request.parts, now + queue_s))

    def serve(self, request: DayRequest, choice: Choice, now: float) -> DayOutcome:
        """Serve a request that arrives now; arrivals must be in order. `FETCH` with nothing to fetch is `LOCAL`."""
        self.wire.forget(now)
        luck = self._luck(request)
        if choice.place in (REMOTE, BOTH):
            made = self._remote(request, luck, now, choice)
        else:
            made = self._local(request, luck[0], now, fetch=choice.place == FETCH)
        self._kept_here.add((*request.parts, request.answer), now + made.ttft_s)
        return made

    def _whole(self, kept: PrefixCache, request: DayRequest, when: float) -> int:
        return self.shape.cache.whole_groups(kept.match(request.parts, when), request.tokens)

    def _luck(self, request: DayRequest) -> tuple[float, float]:
        """Return the local and the remote prefill time of a request relative to the forecasts."""
        scatter = self.shape.scatter
        return math.exp(scatter * request.luck[0]), math.exp(scatter * request.luck[1])

    def _local(self, request: DayRequest, luck: float, now: float, *, fetch: bool) -> DayOutcome:
        tokens = request.tokens
        # Include tokens of the previous request: they are cached when this request begins.
        here = self._whole(self._kept_here, request, self._here.free(now))
        there = self._whole(self._kept_there, request, now) if fetch else 0
        ready, nbytes = now, 0.0
        if there > here:
            size = self.shape.cache
            nbytes = (there - here) * size.per_token + size.constant
            ready = self._carry([_Piece(here, there, now + self.rtt_s / 2)], there)
        before = max(here, there)
        forecast_s = self.shape.local.cost.seconds(before, tokens - before)
        begin = self._here.work(ready, luck * forecast_s, forecast_s, now)
        place = FETCH if nbytes else LOCAL
        return DayOutcome(Choice(place), begin + luck * forecast_s - now, luck * forecast_s, 0.0, nbytes)

    def _remote(self, request: DayRequest, luck: tuple[float, float], now: float, choice: Choice) -> DayOutcome:
        tokens, size = request.tokens, self.shape.cache
        cost, half_s = self.shape.remote.cost, self.rtt_s / 2
        free = self._there.free(now + half_s)
        there = self._whole(self._kept_there, request, free)
        here = self._whole(self._kept_here, request, free)
        forecast_s = cost.seconds(there, tokens - there)
        begin = self._there.work(now + half_s, luck[1] * forecast_s, forecast_s, now)
        end = begin + luck[1] * forecast_s
        front = size.whole_groups(choice.front_tokens, tokens) if choice.place == BOTH else 0
        known = now + half_s if self._whole(self._kept_there, request, now) >= there else begin
        pieces, at = [], here
        for n in (*self._known(there - here, front - here), *_cut(tokens - max(here, there), size, self.shape.pieces)):
            at += n
            ready = known if at <= there else begin + luck[1] * cost.seconds(there, at - there)
            pieces.append(_Piece(at - n, at, ready if self.shape.live else end))
        if front > here:
            # Hold back pieces before the front until the other site has computed everything.
            pieces = [one._replace(ready=max(one.ready, end)) if one.until <= front else one for one in pieces]
            made = self._meet(request, luck[0], now, choice, pieces)
        else:
            step_s = luck[0] * self.shape.local.cost.seconds(tokens - 1, 1)
            nbytes = (tokens - here) * size.per_token + size.constant
            made = DayOutcome(Choice(REMOTE), self._carry(pieces, tokens) + step_s - now, 0.0, 0.0, nbytes)
        self._kept_there.add(request.parts, end)
        return replace(made, remote_s=luck[1] * forecast_s)

    def _meet(
        self, request: DayRequest, luck: float, now: float, choice: Choice, pieces: Sequence[_Piece]
    ) -> DayOutcome:
        tokens, cost = request.tokens, self.shape.local.cost
        before = self._whole(self._kept_here, request, now)
        forecast_s = cost.seconds(before, choice.front_tokens - before)
        begin, until = self._here.gap(now, luck * forecast_s)
        coming = deque(sorted(pieces, key=lambda piece: (piece.ready, piece.begin)))
        ready: list[_Piece] = []
        # The engine computes missing pieces in order.
        missing = {one: luck * (cost.seconds(one.begin, one.until - one.begin) - cost.constant_s) for one in pieces}
        starts = begin + luck * max(cost.constant_s, cost.seconds(before, pieces[0].begin - before))
        left_s, step_s = sum(missing.values()), luck * cost.seconds(tokens - 1, 1)
        sent = decoded = nbytes = 0.0
        met = ends = starts + left_s if starts + left_s <= until else math.inf
        while missing and (at := sent if ready else max(sent, coming[0].ready)) < met:
            while coming and coming[0].ready <= at:
                insort(ready, coming.popleft())
            piece = ready.pop()
            if starts + sum(takes for one, takes in missing.items() if one.begin <= piece.begin) <= at <= until:
                ready.clear()  # the engine has passed this piece, and therefore all earlier ones
                if not coming:
                    break
                continue
            amount = self._bytes(piece.until - piece.begin, last=piece.until == tokens)
            sent = self.wire.send(at, amount)
            nbytes += amount
            decoded = self._decoded(decoded, sent, piece.until - piece.begin)
            left_s -= missing.pop(piece)
            there = max(decoded, starts + left_s if missing else now)
            end = there if pieces[-1] in missing else there + step_s
            if end < ends and (not missing or starts + left_s <= until):
                met, ends = there, end
            if there == decoded:
                break
        local_s = max(0.0, min(met, until) - begin)
        if local_s:
            self._here.work(begin, local_s, forecast_s, now)
        chosen = Choice(BOTH, choice.front_tokens) if local_s else Choice(REMOTE)
        return DayOutcome(chosen, ends - now, local_s, 0.0, nbytes)

    def _known(self, tokens: int, front: int) -> list[int]:
        if tokens <= 0 or front <= 0:
            return [tokens] if tokens > 0 else []
        group = self.shape.cache.group_tokens
        most = max(1, -(-tokens // group // max(1, self.shape.pieces))) * group
        found = []
        for begin, until in pairwise((0, *([front] if front < tokens else []), tokens)):
            full, rest = divmod(until - begin, most)
            found += [most] * full + ([rest] if rest else [])
        return found

    def _carry(self, pieces: list[_Piece], tokens: int) -> float:
        decoded = sent = 0.0
        for piece in pieces:
            length = piece.until - piece.begin
            sent = self.wire.send(piece.ready, self._bytes(length, last=piece.until == tokens), sent)
            decoded = self._decoded(decoded, sent, length)
        return decoded

    def _bytes(self, tokens: int, *, last: bool) -> float:
        size = self.shape.cache
        return tokens * size.per_token + (size.constant if last else 0.0)

    def _decoded(self, before: float, sent: float, tokens: int) -> float:
        """Return when a piece is decoded that is sent at ``sent``, if the previous one is decoded at ``before``."""
        size = self.shape.cache
        group = min(tokens, size.group_tokens)
        # Pieces are decoded group by group as they arrive, so only one group remains.
        return max(before + (tokens - group) * size.decode_s, sent + self.rtt_s / 2) + group * size.decode_s


@lru_cache(maxsize=4096)
def _cut(tokens: int, size: CacheSize, max_pieces: int) -> tuple[int, ...]:
    """Return the lengths of pieces of whole groups: one group, then twice as many, and so on, and back to one.

    With equal pieces, the first piece would leave too late for a slow link, and the last too late for a fast link.
    """
    group, last = size.group_tokens, size.last_group(tokens)
    left = (tokens - last) // group
    most = max(1, -(-left // max(1, max_pieces)))
    ramp: list[int] = []
    while 3 * sum(ramp) < left and (not ramp or 2 * ramp[-1] < most):
        ramp.append(2 * ramp[-1] if ramp else 1)
    if 2 * sum(ramp) > left:
        ramp = []
    full, rest = divmod(left - 2 * sum(ramp), most)
    lengths = (*ramp, *[most] * full, *([rest] if rest else []), *reversed(ramp))
    return (*(n * group for n in lengths), last)


class Day:
    """A world and its remaining requests."""

    def __init__(self, requests: Sequence[DayRequest], world: World) -> None:
        self._requests, self.world = requests, world
        self._firsts = [(request.at_s, request.number) for request in requests if request.at_s is not None]
        self._index = 0
        self._following: list[tuple[float, int]] = []

    def copy(self) -> Day:
        """Return an independent copy."""
        made = object.__new__(Day)
        made._requests, made._firsts, made._index = self._requests, self._firsts, self._index
        made.world, made._following = self.world.copy(), self._following[:]
        return made

    def next(self) -> tuple[DayRequest, float] | None:
        """Return the next request and its arrival time; None at the end."""
        first = self._firsts[self._index] if self._index < len(self._firsts) else None
        if self._following and (first is None or self._following[0] < first):
            first = self._following[0]
        return None if first is None else (self._requests[first[1]], first[0])

    def serve(self, choice: Choice) -> DayOutcome:
        """Serve the next request at a place."""
        arriving = self.next()
        if arriving is None:
            raise UsageError("the day is over: there are no more requests")
        request, now = arriving
        if self._following and self._following[0] == (now, request.number):
            heapq.heappop(self._following)
        else:
            self._index += 1
        made = self.world.serve(request, choice, now)
        if request.following is not None:
            pause_s = self._requests[request.following].pause_s
            then = now + made.ttft_s + TOKEN_S * request.answer[1] + pause_s
            heapq.heappush(self._following, (then, request.following))
        return made
