"""Two sites and the link between them, request by request.

The model:

- Each site has workers that prefill one prompt at a time, in the order of arrival. What waits for a fetched prefix
  does not keep a worker from others. A prefill takes what its cost says, times a factor that belongs to the request
  (log-normal): a router's forecasts are never quite right.
- The link carries what the trace says. Requests share it: what was requested first goes first, and what is not computed
  yet leaves room for others. A remote prefill sends in pieces while it computes.
- Each site keeps the caches of prompts, least recently used out. The local site, where all decoding is done, has every
  prompt and its answer after that; the remote one what it prefilled.

Nothing that comes later changes what happens to a request, so each is settled as soon as it arrives.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvabr.replay.day.requests import TOKEN_S, DayRequest
from kvabr.replay.link import FIRST_BYTE_S, PAYLOAD_SHARE, Capacity
from kvabr.replay.trace import Trace
from kvabr.route import FETCH, LOCAL, REMOTE, CacheSize, Place
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

_FORGET_S = 60.0
"""Busy times that ended so long ago are forgotten."""


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One site."""

    cost: PrefillCost
    workers: int = 1
    cache_tokens: int = 2_000_000
    """Tokens whose cache it keeps."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.cache_tokens < 0:
            raise UsageError(f"a site of {self.workers} workers that keeps {self.cache_tokens} tokens: not possible")


@dataclass(frozen=True, slots=True)
class WorldShape:
    """Both sites and what lies between them."""

    local: SiteShape
    remote: SiteShape
    cache: CacheSize
    trace: Trace
    """The link from the remote site to the local one, headers included."""
    rtt_s: float
    live: bool = True
    """Whether the remote site sends while it computes."""
    pieces: int = 32
    """Pieces in which a remote prefill is sent, at most: more take longer to simulate."""
    scatter: float = 0.1
    """Standard deviation of the logarithm of a prefill's time over its forecast."""

    def __post_init__(self) -> None:
        if not (0 <= self.rtt_s <= 60 and 0 <= self.scatter <= 3):
            raise UsageError(f"a round trip of {self.rtt_s} s, prefills that scatter by {self.scatter}: not possible")

    @property
    def mean_rate(self) -> float:
        """Bytes of payload per second that the link carries in the mean."""
        return self.trace.mean_rate * PAYLOAD_SHARE


@dataclass(frozen=True, slots=True)
class DayOutcome:
    """What became of one request."""

    place: Place
    ttft_s: float
    local_s: float
    """Seconds of a local worker."""
    remote_s: float
    """Seconds of a remote worker."""
    bytes: float
    """Bytes over the link."""


@dataclass(frozen=True, slots=True)
class SiteView:
    """What a router can know of a site when a request arrives."""

    queue_s: float
    """Expected seconds until a worker is free."""
    cached_tokens: int
    """Tokens of the prompt in place."""


class BusyTimes:
    """When something is busy: intervals that do not touch, in order."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def copy(self) -> BusyTimes:
        """Return a copy."""
        made = BusyTimes()
        made._begins, made._ends = self._begins[:], self._ends[:]
        return made

    def forget(self, before: float) -> None:
        """Drop what ended before a time."""
        gone = bisect_right(self._ends, before)
        if gone:
            del self._begins[:gone], self._ends[:gone]

    def free(self, after: float, lasts: float) -> float:
        """Return the first time from ``after`` on that is free for ``lasts``."""
        index = bisect_right(self._ends, after)
        for begin, end in zip(self._begins[index:], self._ends[index:], strict=True):
            if begin - after >= lasts:
                break
            after = end
        return after

    def gaps(self, after: float) -> list[tuple[float, float]]:
        """Return the free intervals from ``after`` on; the last one is infinite."""
        index = bisect_right(self._ends, after)
        found = []
        for begin, end in zip(self._begins[index:], self._ends[index:], strict=True):
            if begin > after:
                found.append((after, begin))
            after = end
        found.append((after, math.inf))
        return found

    def take(self, begin: float, end: float) -> None:
        """Make an interval busy, whatever it was."""
        if end <= begin:
            return
        first = bisect_right(self._ends, begin)
        if first and self._ends[first - 1] >= begin:
            first -= 1
        last = bisect_right(self._begins, end)
        if last > first:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]


class WorkerPool:
    """Prefill workers of one site: what they will do, and what can be known of it."""

    def __init__(self, workers: int) -> None:
        self._busy = [BusyTimes() for _ in range(workers)]
        self._jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(workers)]
        """Begin, end and forecast of what each worker has to do."""

    def copy(self) -> WorkerPool:
        """Return a copy."""
        made = WorkerPool(0)
        made._busy, made._jobs = [one.copy() for one in self._busy], [jobs[:] for jobs in self._jobs]
        return made

    def queue_s(self, now: float) -> float:
        """Return the expected seconds until a worker is free, from the forecasts of what is before it."""
        least = math.inf
        for index, jobs in enumerate(self._jobs):
            left = [job for job in jobs if job[1] > now]
            self._jobs[index] = left
            waits = 0.0
            for begin, _, forecast in left:
                waits += max(0.0, begin + forecast - now) if begin <= now else forecast
            least = min(least, waits)
        return least

    def free(self, after: float) -> float:
        """Return when a worker is free for the first time, from ``after`` on."""
        return min(busy.free(after, 0.0) for busy in self._busy)

    def work(self, ready: float, seconds: float, forecast: float, now: float) -> float:
        """Let the worker that is free first do something; return when it begins."""
        for busy in self._busy:
            busy.forget(now - _FORGET_S)
        begins = [busy.free(ready, seconds) for busy in self._busy]
        begin = min(begins)
        index = begins.index(begin)
        self._busy[index].take(begin, begin + seconds)
        self._jobs[index].append((begin, begin + seconds, forecast))
        return begin


class SharedWire:
    """The link, as far as it is not taken by what was requested before."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity, self._busy = capacity, BusyTimes()
        self._coming: list[tuple[float, float]] = []
        self._coming_bytes = 0.0
        self._samples: list[tuple[float, float, float]] = []

    def copy(self) -> SharedWire:
        """Return a copy."""
        made = SharedWire(self._capacity)
        made._busy, made._coming, made._samples = self._busy.copy(), self._coming[:], self._samples[:]
        made._coming_bytes = self._coming_bytes
        return made

    def send(self, ready: float, nbytes: float) -> float:
        """Carry bytes as soon as there is room from ``ready`` on; return when the last one is through."""
        left, busy_s, first, end = nbytes, 0.0, -1.0, ready
        for begin, until in self._busy.gaps(ready):
            first = begin if first < 0 else first
            if math.isfinite(until):
                room = self._capacity.between(begin, until)
                if room < left:
                    left -= room
                    busy_s += until - begin
                    continue
            end = self._capacity.when(begin, left)
            busy_s += end - begin
            break
        # All gaps before the last one are filled, so everything in between is busy now.
        self._busy.take(first, end)
        heapq.heappush(self._coming, (end, nbytes))
        self._coming_bytes += nbytes
        heapq.heappush(self._samples, (end, nbytes, busy_s))
        return end

    def backlog(self, now: float) -> float:
        """Return the bytes of earlier requests that are not through."""
        self._busy.forget(now - _FORGET_S)
        while self._coming and self._coming[0][0] <= now:
            self._coming_bytes -= heapq.heappop(self._coming)[1]
        return max(0.0, self._coming_bytes) if self._coming else 0.0

    def samples(self, now: float) -> list[tuple[float, float, float]]:
        """Return what came by ``now`` and was not returned before: end, bytes, and seconds of a busy link."""
        found = []
        while self._samples and self._samples[0][0] <= now:
            found.append(heapq.heappop(self._samples))
        return found


class PrefixCache:
    """The caches that a site keeps: parts of prompts, least recently used out."""

    def __init__(self, tokens: int) -> None:
        self._room, self._kept = tokens, 0
        self._parts: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """Tokens of each part, and from when on it is in place."""

    def copy(self) -> PrefixCache:
        """Return a copy."""
        made = PrefixCache(self._room)
        made._parts, made._kept = self._parts.copy(), self._kept
        return made

    def match(self, parts: tuple[tuple[int, int], ...], now: float) -> int:
        """Return how many tokens at the beginning of a prompt are in place."""
        found = 0
        for number, tokens in parts:
            known = self._parts.get(number)
            if known is None or known[1] > now:
                break
            found += tokens
        return found

    def add(self, parts: tuple[tuple[int, int], ...], ready: float) -> None:
        """Keep a prompt, from a time on; what is in place already stays so."""
        # The beginning is used last, since what stands behind it is worth nothing without it.
        for number, tokens in reversed(parts):
            known = self._parts.pop(number, None)
            self._kept += tokens if known is None else 0
            self._parts[number] = (tokens, ready if known is None else min(known[1], ready))
        while self._kept > self._room:
            _, (tokens, _) = self._parts.popitem(last=False)
            self._kept -= tokens


class World:
    """Both sites and the link, at the time of the last request."""

    def __init__(self, shape: WorldShape) -> None:
        """Begin with empty queues and caches."""
        self.shape = shape
        capacity = Capacity(shape.trace.scaled(PAYLOAD_SHARE), slow_start=False)
        self._set(
            WorkerPool(shape.local.workers),
            WorkerPool(shape.remote.workers),
            SharedWire(capacity),
            PrefixCache(shape.local.cache_tokens),
            PrefixCache(shape.remote.cache_tokens),
        )

    def _set(
        self, here: WorkerPool, there: WorkerPool, wire: SharedWire, kept_here: PrefixCache, kept_there: PrefixCache
    ) -> None:
        self.wire = wire
        self._here, self._there, self._kept_here, self._kept_there = here, there, kept_here, kept_there

    def copy(self) -> Self:
        """Return a world that goes its own way from here on."""
        made = object.__new__(type(self))
        made.shape = self.shape
        made._set(
            self._here.copy(), self._there.copy(), self.wire.copy(), self._kept_here.copy(), self._kept_there.copy()
        )
        return made

    @property
    def rtt_s(self) -> float:
        """Round trip with the time to handle a request, seconds."""
        return self.shape.rtt_s + FIRST_BYTE_S

    def view(self, request: DayRequest, now: float) -> tuple[SiteView, SiteView]:
        """Return what a router can know of the sites when a request arrives."""
        here = self._view(request, now, self._here, self._kept_here)
        return here, self._view(request, now, self._there, self._kept_there)

    @staticmethod
    def _view(request: DayRequest, now: float, pool: WorkerPool, kept: PrefixCache) -> SiteView:
        queue_s = pool.queue_s(now)
        return SiteView(queue_s, kept.match(request.parts, now + queue_s))

    def serve(self, request: DayRequest, place: Place, now: float) -> DayOutcome:
        """Settle a request that arrives now and goes to a place.

        Requests must come in the order of their arrival. `FETCH` without anything to fetch is `LOCAL`.
        """
        luck = self._luck(request)
        if place == REMOTE:
            made = self._remote(request, luck, now)
        else:
            made = self._local(request, luck[0], now, fetch=place == FETCH)
        self._kept_here.add((*request.parts, request.answer), now + made.ttft_s)
        return made

    def _whole(self, kept: PrefixCache, request: DayRequest, when: float) -> int:
        """Return the tokens of a prompt that a site has in place at a time, in whole groups."""
        return self.shape.cache.whole_groups(kept.match(request.parts, when), request.tokens)

    def _luck(self, request: DayRequest) -> tuple[float, float]:
        """Return how much longer than forecast its prefill takes, locally and remotely."""
        scatter = self.shape.scatter
        return math.exp(scatter * request.luck[0]), math.exp(scatter * request.luck[1])

    def _local(self, request: DayRequest, luck: float, now: float, *, fetch: bool) -> DayOutcome:
        tokens = request.tokens
        # What the request before it is about to compute counts, as it is in place when this one begins.
        here = self._whole(self._kept_here, request, self._here.free(now))
        there = self._whole(self._kept_there, request, now) if fetch else 0
        ready, nbytes = now, 0.0
        if there > here:
            size = self.shape.cache
            nbytes = (there - here) * size.per_token + size.constant
            pieces = [(now + self.rtt_s / 2, count) for count in self._cut(there - here)]
            ready = self._carry(pieces)
        before = max(here, there)
        forecast_s = self.shape.local.cost.seconds(before, tokens - before)
        begin = self._here.work(ready, luck * forecast_s, forecast_s, now)
        place = FETCH if nbytes else LOCAL
        return DayOutcome(place, begin + luck * forecast_s - now, luck * forecast_s, 0.0, nbytes)

    def _remote(self, request: DayRequest, luck: tuple[float, float], now: float) -> DayOutcome:
        tokens, size = request.tokens, self.shape.cache
        cost, half_s = self.shape.remote.cost, self.rtt_s / 2
        free = self._there.free(now + half_s)
        there = self._whole(self._kept_there, request, free)
        # What is on its way here anyway is not sent twice.
        here = self._whole(self._kept_here, request, free)
        forecast_s = cost.seconds(there, tokens - there)
        begin = self._there.work(now + half_s, luck[1] * forecast_s, forecast_s, now)
        end = begin + luck[1] * forecast_s
        known = now + half_s if self._whole(self._kept_there, request, now) >= there else begin
        pieces = [(known if self.shape.live else end, n) for n in self._cut(max(0, there - here))]
        at = max(here, there)
        for n in self._cut(tokens - at):
            at += n
            pieces.append((begin + luck[1] * cost.seconds(there, at - there) if self.shape.live else end, n))
        arrived = self._carry(pieces)
        step_s = luck[0] * self.shape.local.cost.seconds(tokens - 1, 1)
        nbytes = (tokens - here) * size.per_token + size.constant
        self._kept_there.add(request.parts, end)
        return DayOutcome(REMOTE, arrived + step_s - now, 0.0, luck[1] * forecast_s, nbytes)

    def _cut(self, tokens: int) -> list[int]:
        """Return the lengths of pieces of whole groups, the last group alone."""
        if tokens <= 0:
            return []
        group = self.shape.cache.group_tokens
        last = self.shape.cache.last_group(tokens)
        each = max(1, -(-((tokens - last) // group) // max(1, self.shape.pieces - 1))) * group
        full, rest = divmod(tokens - last, each)
        return [each] * full + ([rest] if rest else []) + [last]

    def _carry(self, pieces: list[tuple[float, int]]) -> float:
        """Carry and decode pieces, each ready at a time; return when the last one is in place."""
        size, half_s = self.shape.cache, self.rtt_s / 2
        decoded, sent = 0.0, 0.0
        for index, (ready, tokens) in enumerate(pieces):
            constant = size.constant if index == len(pieces) - 1 else 0.0
            sent = self.wire.send(max(ready, sent), tokens * size.per_token + constant)
            group = min(tokens, size.group_tokens)
            # A piece is decoded group by group as it comes; what is left when it is complete is one group.
            decoded = max(decoded + (tokens - group) * size.decode_s, sent + half_s) + group * size.decode_s
        return decoded


class Day:
    """A world and the requests that are still to come to it."""

    def __init__(self, requests: Sequence[DayRequest], world: World) -> None:
        """Begin with the first request of the first conversation."""
        self._requests, self.world = requests, world
        self._firsts = [(request.at_s, request.number) for request in requests if request.at_s is not None]
        self._index = 0
        self._following: list[tuple[float, int]] = []

    def copy(self) -> Day:
        """Return a day that goes its own way from here on."""
        made = object.__new__(Day)
        made._requests, made._firsts, made._index = self._requests, self._firsts, self._index
        made.world, made._following = self.world.copy(), self._following[:]
        return made

    def next(self) -> tuple[DayRequest, float] | None:
        """Return the request that arrives next, and when; None at the end of the day."""
        first = self._firsts[self._index] if self._index < len(self._firsts) else None
        if self._following and (first is None or self._following[0] < first):
            first = self._following[0]
        return None if first is None else (self._requests[first[1]], first[0])

    def serve(self, place: Place) -> DayOutcome:
        """Send the next request to a place, and return what becomes of it."""
        arriving = self.next()
        if arriving is None:
            raise UsageError("the day is over: there are no more requests")
        request, now = arriving
        if self._following and self._following[0] == (now, request.number):
            heapq.heappop(self._following)
        else:
            self._index += 1
        made = self.world.serve(request, place, now)
        if request.following is not None:
            pause_s = self._requests[request.following].pause_s
            then = now + made.ttft_s + TOKEN_S * request.answer[1] + pause_s
            heapq.heappush(self._following, (then, request.following))
        return made
