"""Replays of a cache that is played during its prefill: its producer, and the clairvoyant bound.

No byte of group k can leave before its publication P(k). For an end T of the play, this gives nested capacities: for
every k, the bytes of groups k and later fit into the link's bytes from P(k) to T. A greedy algorithm solves the linear
relaxation: take the steps of all hulls, most loss saved per byte first, each as large as its capacities allow. The best
T is searched as in `kvabr.replay.clairvoyant`. Decoding time counts only for the last group, so the bound is loose for
slow decoders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np

from kvabr.abr.ladder import every_option, rank
from kvabr.replay.clairvoyant import INFEASIBLE, ROUNDING_LOSS, Bound
from kvabr.replay.frontier import Array
from kvabr.replay.link import Capacity
from kvabr.types.catalog import Catalog
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.errors import UsageError


@dataclass(frozen=True, slots=True)
class Producer:
    """Publication times of the groups of a cache."""

    seconds: float
    """Seconds of the whole prefill, at the pace of the catalog's prefill cost."""
    begins_s: float = 0.0
    """Start of the prefill, seconds after the play began; may be negative."""
    surprise: float = 1.0
    """Actual duration of the prefill divided by the duration that the player expects."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"the prefill must take a positive number of seconds, got {self.seconds}")
        if not (math.isfinite(self.begins_s) and 0 < self.surprise < math.inf):
            raise UsageError("the start of a prefill must be finite, and its surprise positive")

    def expected_s(self, catalog: Catalog) -> list[float]:
        """Return the expected publication time of each group, in seconds after the play began."""
        return self._times(catalog, self.seconds)

    def published_s(self, catalog: Catalog) -> list[float]:
        """Return the actual publication time of each group, in seconds after the play began."""
        return self._times(catalog, self.seconds * self.surprise)

    def _times(self, catalog: Catalog, seconds: float) -> list[float]:
        cost = catalog.prefill or PrefillCost.from_rate(1.0)
        size, tokens = catalog.spec.group_tokens, catalog.tokens
        chunks = [(first, min(size, tokens - first)) for first in range(0, tokens, size)]
        took_s = list(accumulate(cost.seconds(first, count) for first, count in chunks))
        ends = [self.begins_s + seconds * took / took_s[-1] for took in took_s]
        return [ends[catalog.unit(group).chunk] for group in range(catalog.groups)]


_ABSOLUTE_GAP, _RELATIVE_GAP = 1e-7, 1e-3
_MAX_ENDS = 400
"""Maximum number of ends to try; the search may stop at any time with a valid bound."""
_ROUNDING_BYTES = 1e-6


class LiveClairvoyant:
    """Lower bound for players that know the link and the producer's times."""

    def __init__(
        self,
        catalog: Catalog,
        decode_scale: float = 1.0,
        decode_latency_s: float = 0.0,
        max_loss: float = math.inf,
    ) -> None:
        """Prepare the steps of all hulls; for ``decode_latency_s`` and ``max_loss`` see `Clairvoyant`."""
        self._max_loss = max_loss
        options = every_option(catalog)
        self._least: Array = np.array([hull[0].bytes for hull in options], float)
        self._worst = sum(hull[0].loss for hull in options)
        self._steps = [(step.group, float(step.bytes), step.saving) for step in rank(options)]
        fastest = min(track.decode_s for track in catalog.tracks if track.refines is None)
        self._tail_s = decode_latency_s + fastest * decode_scale * catalog.share(catalog.groups - 1)

    def best(
        self,
        capacity: Capacity,
        published_s: Sequence[float],
        deadline_s: float,
        *,
        time_price: float,
        delay_s: float = 0.0,
    ) -> Bound:
        """Return the bound of one play.

        ``published_s`` is the publication time of each group, ascending; ``time_price`` is the price of a second before
        the first token, in nats per token; ``delay_s`` is the latency from publisher to player, in addition to the
        link.
        """
        begins = [time_s + delay_s for time_s in published_s]
        first_s = begins[-1]
        if first_s >= deadline_s or (least_loss := self.loss_at(capacity, begins, deadline_s)) == math.inf:
            return INFEASIBLE
        best, end_s, loss = math.inf, deadline_s, least_loss

        def reached(at_s: float) -> float:
            nonlocal best, end_s, loss
            found = self.loss_at(capacity, begins, at_s)
            if found + time_price * at_s < best:
                best, end_s, loss = found + time_price * at_s, at_s, found
            return found

        intervals = [(reached(deadline_s) + time_price * first_s, first_s, deadline_s, least_loss)]
        for _ in range(_MAX_ENDS):
            floor, start_s, stop_s, at_stop = intervals[0]
            if floor >= best - max(_ABSOLUTE_GAP, _RELATIVE_GAP * best):
                break
            heappop(intervals)
            middle_s = (start_s + stop_s) / 2
            at_middle = reached(middle_s)
            if at_middle < math.inf:
                heappush(intervals, (at_middle + time_price * start_s, start_s, middle_s, at_middle))
            heappush(intervals, (at_stop + time_price * middle_s, middle_s, stop_s, at_stop))
        objective = min(best, intervals[0][0])
        objective = min(objective, MISS_PENALTY + time_price * deadline_s)
        return Bound(feasible=True, least_loss=least_loss, objective=objective, loss=loss, end_s=end_s, engine_s=0.0)

    def loss_at(self, capacity: Capacity, begins_s: Sequence[float], end_s: float) -> float:
        """Return the lowest loss of any cache that is complete at ``end_s``; infinite if none can be within the limit.

        ``begins_s`` is the earliest arrival of each group's bytes, ascending.
        """
        last_s = end_s - self._tail_s
        if last_s < begins_s[-1]:
            return math.inf
        left: Array = np.array([capacity.between(begin_s, last_s) for begin_s in begins_s])
        left -= np.cumsum(self._least[::-1])[::-1]
        if left.min() < -_ROUNDING_BYTES:
            return math.inf
        loss = self._worst
        for group, nbytes, saving in self._steps:
            fits = min(nbytes, float(left[: group + 1].min()))
            if fits > 0:
                left[: group + 1] -= fits
                loss -= saving * (fits / nbytes)
        return loss if loss <= self._max_loss + ROUNDING_LOSS else math.inf
