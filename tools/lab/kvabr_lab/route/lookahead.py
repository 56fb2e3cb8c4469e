"""The cost of a decision to later requests.

A queued prefill delays later requests unless they can go elsewhere. `Lookahead` remembers the resource use of recent
requests. For every place of a new request, it replays series of past requests on the resulting queues, and sends each
request where its first token is soonest. The price of a place is their additional delay, compared with the place that
delays them least.

This is a rollout: one step of policy improvement over the selfish rule (Bertsekas). Unlike queueing formulas, it makes
no assumptions about arrivals or lengths, handles any number of workers, and allows other requests to go elsewhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from kvabr_lab.route.forecast import BOTH, FETCH, LOCAL, REMOTE, Forecast

_EQUAL_REQUESTS = 8
"""Number of consecutive requests with equal delays after which a choice has no further effect."""
_SAME_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Demand:
    """Resource use of a past request if there are no queues."""

    at_s: float
    local_s: float
    remote_s: float
    bytes: float
    last_s: float
    """Seconds on the link of the last group, which is computed last."""
    tail_s: float
    """Seconds from the arrival of the last group until the first token."""
    fetch_s: float
    """Seconds of local prefill after fetching; infinity if there is nothing to fetch."""
    fetch_bytes: float
    both: bool


class Queues:
    """Times at which workers and the link become free."""

    def __init__(self, here: Sequence[float], there: Sequence[float], link: float) -> None:
        self.here, self.there, self.link = list(here), list(there), link
        heapify(self.here)
        heapify(self.there)

    def put(self, one: Forecast, now: float, byte_s: float) -> None:
        """Add a request as its forecast describes."""
        if one.place in (LOCAL, FETCH):
            begin = max(self.here[0], now)
            if one.place == FETCH:
                self.link = max(self.link, now) + one.bytes * byte_s
                begin = max(begin, self.link)
            heapreplace(self.here, begin + one.prefill_s)
            return
        begin = max(self.there[0], now)
        heapreplace(self.there, begin + one.prefill_s)
        self.link = max(self.link, begin) + one.bytes * byte_s
        if one.place == BOTH:
            heapreplace(self.here, max(self.here[0], now) + one.front_s)

    def serve(self, one: _Demand, now: float, byte_s: float) -> float:
        """Serve a request at the place where its first token is soonest; return the seconds until then."""
        here, there = self.here, self.there
        here_s = max(now, here[0])
        there_s = max(now, there[0])
        local_end = here_s + one.local_s
        link_s = max(there_s, self.link) + one.bytes * byte_s
        computed_s = there_s + one.remote_s
        last_s = computed_s + one.last_s
        remote_end = max(link_s, last_s) + one.tail_s
        if one.fetch_s < math.inf:
            through_s = max(now, self.link) + one.fetch_bytes * byte_s
            fetch_end = max(through_s, here_s) + one.fetch_s
            if fetch_end < local_end and fetch_end < remote_end:
                self.link = through_s
                heapreplace(here, fetch_end)
                return fetch_end - now
        if one.both and here_s < remote_end and there_s < local_end:
            # Both sites work on it and end together, each at its own rate.
            carry_s = one.bytes * byte_s
            start = max(there_s, self.link)
            meets = (1 + here_s / one.local_s + start / carry_s) / (1 / one.local_s + 1 / carry_s)
            meets = max(meets, last_s)
            if meets + one.tail_s < min(local_end, remote_end) and meets > max(here_s, start):
                heapreplace(here, meets)
                heapreplace(there, computed_s)
                self.link = meets
                return meets + one.tail_s - now
        if local_end <= remote_end:
            heapreplace(here, local_end)
            return local_end - now
        heapreplace(there, computed_s)
        self.link = link_s
        return remote_end - now

    def idle(self, now: float) -> bool:
        """Return True if all work is done."""
        return self.link <= now and max(self.here) <= now and max(self.there) <= now


class Lookahead:
    """Remembers and replays requests."""

    def __init__(self, *, kept: int = 256, stretches: int = 40, ahead: int = 24) -> None:
        """Remember ``kept`` requests. A decision replays ``stretches`` series of ``ahead`` requests."""
        self._kept: deque[_Demand] = deque(maxlen=kept)
        self._most, self._ahead = stretches, ahead

    def note(self, options: Sequence[Forecast], now: float, *, both: bool = True) -> None:
        """Remember a request by its forecasts."""
        by = {one.place: one for one in options}
        local, remote, fetch = by[LOCAL], by[REMOTE], by.get(FETCH)
        if not math.isfinite(remote.ttft_s):
            return
        self._kept.append(
            _Demand(
                now,
                local.prefill_s,
                remote.prefill_s,
                remote.bytes,
                remote.last_s,
                remote.tail_s,
                math.inf if fetch is None else fetch.prefill_s,
                0.0 if fetch is None else fetch.bytes,
                both and local.prefill_s > 0 and remote.bytes > 0,
            )
        )

    def priced(
        self,
        options: Sequence[Forecast],
        here: Sequence[float],
        there: Sequence[float],
        link: float,
        rate: float,
        now: float,
    ) -> tuple[Forecast, ...]:
        """Return the forecasts with the delay that they cause for other requests.

        ``here``, ``there`` and ``link`` are the times at which workers and the link become free; ``rate`` is in
        bytes/s.
        """
        stretches = self._stretches() if rate > 0 and len(options) > 1 else []
        if not stretches:
            return tuple(options)
        byte_s = 1 / rate
        starts = []
        for one in options:
            begun = Queues(here, there, link)
            if math.isfinite(one.ttft_s):
                begun.put(one, now, byte_s)
            starts.append(begun)
        waits = [0.0] * len(options)
        for begun_s, stretch in stretches:
            self._again(stretch, starts, waits, byte_s, now - begun_s)
        least = min(waits)
        pairs = zip(options, waits, strict=True)
        return tuple(replace(one, others_s=(wait - least) / len(stretches)) for one, wait in pairs)

    def _stretches(self) -> list[tuple[float, Sequence[_Demand]]]:
        kept = list(self._kept)
        ahead = min(self._ahead, len(kept) // 2)
        if ahead < 1:
            return []
        room = len(kept) - ahead - 1
        count = min(self._most, room + 1)
        firsts = [1 + room * number // max(1, count - 1) for number in range(count)]
        return [(kept[first - 1].at_s, kept[first : first + ahead]) for first in firsts]

    @staticmethod
    def _again(
        stretch: Sequence[_Demand], starts: Sequence[Queues], waits: list[float], byte_s: float, later_s: float
    ) -> None:
        states = [Queues(one.here, one.there, one.link) for one in starts]
        alike = 0
        for one in stretch:
            at_s = one.at_s + later_s
            if alike >= _EQUAL_REQUESTS or all(state.idle(at_s) for state in states):
                return
            least, most = math.inf, 0.0
            for index, state in enumerate(states):
                wait = state.serve(one, at_s, byte_s)
                waits[index] += wait
                least, most = min(least, wait), max(most, wait)
            alike = alike + 1 if most - least < _SAME_S else 0
