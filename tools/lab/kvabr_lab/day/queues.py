"""Resources of a day: prefill workers, a shared link, and prompt caches."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Iterator

from kvabr.replay.link import Capacity
from kvabr_lab.route import PROBE_BYTES, PROBE_S, PROBE_WAIT_S

_MAX_AGE_S = 60.0
_MAX_SAMPLE_S = 1.0


class BusyTimes:
    """A resource's busy intervals, disjoint and in order."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def copy(self) -> BusyTimes:
        """Return a copy."""
        made = BusyTimes()
        made._begins, made._ends = self._begins[:], self._ends[:]
        return made

    @property
    def last_s(self) -> float:
        """End of the last interval."""
        return self._ends[-1] if self._ends else -math.inf

    def forget(self, before: float) -> None:
        """Drop intervals that end before a time."""
        gone = bisect_right(self._ends, before)
        if gone:
            del self._begins[:gone], self._ends[:gone]

    def gaps(self, after: float) -> list[tuple[float, float]]:
        """Return the free intervals from ``after`` on; the last interval is infinite."""
        index = bisect_right(self._ends, after)
        found = []
        for begin, end in zip(self._begins[index:], self._ends[index:], strict=True):
            if begin > after:
                found.append((after, begin))
            after = end
        found.append((after, math.inf))
        return found

    def within(self, low: float, high: float) -> list[tuple[float, float]]:
        """Return the busy intervals between two times."""
        first, last = bisect_right(self._ends, low), bisect_right(self._begins, high)
        pairs = zip(self._begins[first:last], self._ends[first:last], strict=True)
        return [(max(low, begin), min(high, end)) for begin, end in pairs if min(high, end) > max(low, begin)]

    def take(self, begin: float, end: float) -> None:
        """Mark an interval as busy."""
        if end <= begin:
            return
        if not self._ends or begin > self._ends[-1]:
            self._begins.append(begin)
            self._ends.append(end)
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
    """A site's prefill workers, with the actual schedule and the forecast."""

    def __init__(self, workers: int) -> None:
        self._jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(workers)]
        """Jobs of each worker in order: start, end, and forecast duration."""

    def copy(self) -> WorkerPool:
        """Return a copy."""
        made = WorkerPool(0)
        made._jobs = [jobs[:] for jobs in self._jobs]
        return made

    def queue_s(self, now: float) -> float:
        """Return the forecast seconds until a worker is free."""
        self._forget(now)
        least = math.inf
        for jobs in self._jobs:
            waits = 0.0
            for begin, _, forecast in jobs:
                waits += max(0.0, begin + forecast - now) if begin <= now else forecast
            least = min(least, waits)
        return least

    def free(self, after: float) -> float:
        """Return the first time from ``after`` on at which a worker is free."""
        return min(_first(jobs, after, 0.0) for jobs in self._jobs)

    def gap(self, ready: float, seconds: float) -> tuple[float, float]:
        """Return the first interval of ``seconds`` from ``ready`` on in which a worker is free."""
        begin, jobs = min((_first(jobs, ready, seconds), jobs) for jobs in self._jobs)
        return begin, next((job[0] for job in jobs if job[0] >= begin), math.inf)

    def work(self, ready: float, seconds: float, forecast: float, now: float) -> float:
        """Assign a job to the worker that is free first; return its start."""
        self._forget(now)
        begins = [_first(jobs, ready, seconds) for jobs in self._jobs]
        begin = min(begins)
        insort(self._jobs[begins.index(begin)], (begin, begin + seconds, forecast))
        return begin

    def _forget(self, now: float) -> None:
        for jobs in self._jobs:
            if jobs and jobs[0][1] <= now:
                jobs[:] = [job for job in jobs if job[1] > now]


def _first(jobs: list[tuple[float, float, float]], after: float, lasts: float) -> float:
    for begin, end, _ in jobs:
        if begin > after and begin - after >= lasts:
            break
        after = max(after, end)
    return after


class SharedWire:
    """The link, with capacity that earlier requests have reserved."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity, self._busy, self._shift_s = capacity, BusyTimes(), 0.0
        self._coming: list[tuple[float, float, float]] = []
        """Heap of pieces that have not arrived: end, ready time, bytes."""
        self._seen_s = self._sampled_s = 0.0
        """Time of the last call of `samples`, and end of the last sample."""

    def copy(self) -> SharedWire:
        """Return a copy."""
        made = SharedWire(self._capacity)
        made._busy, made._coming, made._shift_s = self._busy.copy(), self._coming[:], self._shift_s
        made._seen_s, made._sampled_s = self._seen_s, self._sampled_s
        return made

    def shift(self, seconds: float) -> None:
        """Move the link ``seconds`` ahead in its trace."""
        self._shift_s += seconds

    def carried(self, begin: float, end: float) -> float:
        """Return the bytes that the link carries between two times."""
        return self._capacity.between(begin + self._shift_s, end + self._shift_s)

    def _when(self, begin: float, nbytes: float) -> float:
        return self._capacity.when(begin + self._shift_s, nbytes) - self._shift_s

    def send(self, ready: float, nbytes: float, after: float = 0.0) -> float:
        """Send bytes that are ready at a time; return when the last byte arrives."""
        start = max(ready, after)
        left, first, end = nbytes, -1.0, start
        for begin, until in self._busy.gaps(start) if start < self._busy.last_s else ((start, math.inf),):
            first = begin if first < 0 else first
            if until < math.inf:
                room = self.carried(begin, until)
                if room < left:
                    left -= room
                    continue
            end = self._when(begin, left)
            break
        # All gaps before the last one are filled, so everything in between is busy.
        self._busy.take(first, end)
        heapq.heappush(self._coming, (end, ready, nbytes))
        return end

    def backlog(self, now: float) -> float:
        """Return the unsent bytes of earlier requests that are ready now."""
        return math.fsum(nbytes for end, ready, nbytes in self._coming if ready <= now < end)

    def rate(self, nbytes: float, now: float) -> float:
        """Return the rate of a transfer on an idle link."""
        if nbytes <= 0:
            return self._capacity.rate(now + self._shift_s)
        return nbytes / max(1e-9, self._when(now, nbytes) - now)

    def forget(self, now: float) -> None:
        """Drop state before a time."""
        while self._coming and self._coming[0][0] <= now:
            heapq.heappop(self._coming)
        self._busy.forget(now - _MAX_AGE_S)

    def samples(self, now: float, *, probes: bool = False) -> Iterator[tuple[float, float, float]]:
        """Yield a receiver's samples since the last call: end, bytes, seconds.

        With ``probes``, the idle link is probed, too; probes do not slow down transfers.
        """
        for begin, end in (*self._busy.within(self._seen_s, now), (now, now)):
            if probes:
                yield from self._probes(begin)
            count = math.ceil((end - begin) / _MAX_SAMPLE_S)
            for step in range(count):
                low = begin + step * (end - begin) / count
                high = begin + (step + 1) * (end - begin) / count
                if high > low:
                    self._sampled_s = high
                    yield high, self.carried(low, high), high - low
            self._seen_s = end

    def _probes(self, until: float) -> Iterator[tuple[float, float, float]]:
        while (at := max(self._seen_s, self._sampled_s + PROBE_S)) < until:
            end = min(self._when(at, PROBE_BYTES), at + PROBE_WAIT_S)
            if end > until:
                break
            self._sampled_s = end
            yield end, self.carried(at, end), end - at


class PrefixCache:
    """A site's LRU cache of prompt parts."""

    def __init__(self, tokens: int) -> None:
        self._room, self._kept = tokens, 0
        self._parts: dict[int, tuple[int, float]] = {}
        """Tokens and ready time of each part, least recently used first."""

    def copy(self) -> PrefixCache:
        """Return a copy."""
        made = PrefixCache(self._room)
        made._parts, made._kept = self._parts.copy(), self._kept
        return made

    def match(self, parts: tuple[tuple[int, int], ...], now: float) -> int:
        """Return the number of cached tokens at the start of a prompt."""
        found = 0
        for number, tokens in parts:
            known = self._parts.get(number)
            if known is None or known[1] > now:
                break
            found += tokens
        return found

    def add(self, parts: tuple[tuple[int, int], ...], ready: float) -> None:
        """Add a prompt that is ready at a time; parts that are already cached are kept."""
        # Mark the beginning as used last, since later parts are useless without it.
        for number, tokens in reversed(parts):
            known = self._parts.pop(number, None)
            self._kept += tokens if known is None else 0
            self._parts[number] = (tokens, ready if known is None else min(known[1], ready))
        while self._kept > self._room:
            number = next(iter(self._parts))
            self._kept -= self._parts.pop(number)[0]
