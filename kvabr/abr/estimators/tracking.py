"""``tracking``: a mean that restarts when the link drops for good, with a bound based on its past errors.

The rate is the lesser of a fast and a slow moving mean (as in Shaka and dash.js). Change detection is a cumulative sum
(Page, 1954) of how far samples fall below the expectation, in units of their own deviation. Past a threshold, earlier
samples are forgotten.

The bound is the share of the estimate that the link carries at least nine times out of ten: delivered over expected
bytes, at the end of each stretch of time. Until a play has seen enough stretches, quantiles of real traces fill in (as
in adaptive conformal inference; Gibbs and Candes, 2021).

A burst with more bytes than expected since the last sample, idle time included, shows that the link is faster, and the
estimate restarts there. A rate of earlier plays (`prime`) counts as a stretch of samples; the first sample, perhaps in
slow start, may raise the estimate but not lower it.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from itertools import islice
from typing import ClassVar

from kvabr.abr.estimator import SLOT_SHARE, WINDOW, Prior
from kvabr.abr.estimators.classic import DecayingMean, MergedSamples

_STRETCH_SHARE = 1 / 4
"""Length of the stretch covered by a bound, as a share of the deadline."""
_MISS_PROBABILITY = 0.1
"""Target probability of a rate below the bound."""
_BORROWED = (
    0.60, 0.73, 0.81, 0.87, 0.91, 0.94, 0.96, 0.98, 0.99, 1.01,
    1.03, 1.05, 1.07, 1.10, 1.14, 1.18, 1.25, 1.35, 1.50, 2.00,
)  # fmt: skip
"""Carried over expected bytes on real traces: twenty quantiles."""
_MAX_STRETCHES = 40
"""Number of past stretches in the bound."""
_DRIFT = 0.5
"""Deviations below the expectation that are ignored."""
_CHANGE_THRESHOLD = 12.0
"""Sum of deviations, beyond the drift, that signals a change."""
_MIN_DEVIATION = 0.25
"""Minimum deviation of a sample's logarithm: no link is steadier."""
_PRIOR_SHARE = 1 / 16
"""The rate of earlier plays counts as samples of this share of the deadline."""
_MAX_SLOW_START_SHARE = 0.5
"""Maximum time for slow start to reach the rate of earlier plays, as a share of the deadline; otherwise ignored."""
_MIN_BURST_FACTOR = 1.5
"""Minimum size of a burst that restarts the estimate, as a multiple of the expected bytes."""
_MIN_LOG = -3.0
"""Logarithm assigned to a sample of 0 bytes."""


class Tracking(MergedSamples):
    """The smaller of a fast and a slow mean, restarted after drops; its bound holds nine times out of ten."""

    name: ClassVar[str] = "tracking"

    def __init__(self, fast_share: float = 1 / 16, slow_share: float = 1 / 4) -> None:
        """Set the half-lives of the means, as shares of the deadline."""
        self._shares = (fast_share, slow_share)
        self._prior: Prior | None = None
        self.changes = 0
        """Number of drops detected."""
        super().__init__(SLOT_SHARE)

    def _forget(self) -> None:
        horizon_s = self._horizon_s
        fast_s, self._slow_s = (share * horizon_s for share in self._shares)
        self._ahead_s = _STRETCH_SHARE * horizon_s
        self._fast, self._slow = DecayingMean(fast_s), DecayingMean(self._slow_s)
        self._total_bytes = self._total_s = 0.0
        self._open: deque[tuple[float, float, float]] = deque()
        """Unfinished stretches: seconds and bytes at their start, and the expected rate."""
        self._recent: deque[float] = deque(maxlen=_MAX_STRETCHES)
        self._ranked: list[float] = []
        self._usual, self._square = 0.0, _MIN_DEVIATION**2
        """Mean and mean square of a sample's logarithm relative to the mean rate."""
        self._sum = self._since_bytes = self._since_s = 0.0
        self._sure_share: float | None = None
        self._taken_s: float | None = None
        self._prior_only = False
        """True if the rate of earlier plays is known and no sample has arrived."""
        if (prior := self._prior) is not None:
            rounds = math.log2(max(1.0, prior.rate * prior.ttfb_s / WINDOW))
            self._prior_only = rounds * prior.ttfb_s <= _MAX_SLOW_START_SHARE * horizon_s
            if self._prior_only:
                self._restart(prior.rate, _PRIOR_SHARE * prior.weight * horizon_s)

    def prime(self, prior: Prior) -> None:
        super().prime(prior)
        if prior.rate > 0 < prior.weight:
            self._prior = prior

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Accumulate; finish the merged sample once it is long enough, or at an unexpected burst."""
        super().sample(nbytes, seconds, now)
        if not self._seconds or self._taken_s is None:
            if nbytes > 0:  # a burst after silence must make up for it
                self._taken_s = now
            return
        # Slow start delivers a window at once, but only one per round trip.
        passed_s = max(self._span_s, self.ttfb(), now - self._taken_s)
        if self._slow.weight and self._bytes >= _MIN_BURST_FACTOR * self._slow.value() * passed_s:
            self._restart(self._bytes / passed_s, passed_s)
            self._bytes = self._seconds = 0.0
            self._taken_s = now

    def rate(self) -> float:
        """Return the smaller mean; before the first full slot, the rate so far."""
        return min(self._fast.value(), self._slow.value()) if self._slow.weight else self._so_far()

    def lower_bound(self) -> float:
        """Return the share of the estimate that nine stretches out of ten carried."""
        if self._sure_share is None:
            self._sure_share = self._quantile()
        return self._sure_share * self.rate()

    def _restart(self, rate: float, seconds: float) -> None:
        self._fast.restart(rate, seconds)
        self._slow.restart(rate, seconds)

    def _add(self, nbytes: float, seconds: float) -> None:
        rate = nbytes / seconds
        if self._prior_only:
            self._prior_only = False
            if rate < self._slow.value():
                return
        if self._slow.weight:
            self._watch(rate, seconds)
        self._fast.add(rate, seconds)
        self._slow.add(rate, seconds)
        self._total_bytes += rate * seconds
        self._total_s += seconds
        self._judge()
        self._open.append((self._total_s, self._total_bytes, self.rate()))

    def _watch(self, rate: float, seconds: float) -> None:
        expected = self._slow.value()
        ratio = rate / expected if expected > 0 else 1.0
        off = max(_MIN_LOG, math.log(ratio)) if ratio > 0 else _MIN_LOG
        slots = seconds / self._span_s
        deviation = max(_MIN_DEVIATION, math.sqrt(max(0.0, self._square - self._usual**2)))
        self._sum = max(0.0, self._sum + slots * ((self._usual - off) / deviation - _DRIFT))
        keep = 0.5 ** (seconds / self._slow_s)
        self._usual = keep * self._usual + (1 - keep) * off
        self._square = keep * self._square + (1 - keep) * off * off
        if not self._sum:
            self._since_bytes = self._since_s = 0.0
            return
        self._since_bytes += rate * seconds
        self._since_s += seconds
        if self._sum >= _CHANGE_THRESHOLD:
            self.changes += 1
            self._restart(self._since_bytes / self._since_s, self._since_s)
            self._sum = self._since_bytes = self._since_s = 0.0
            self._open.clear()

    def _judge(self) -> None:
        while self._open and self._total_s - self._open[0][0] >= self._ahead_s:
            began_s, began, expected = self._open.popleft()
            if expected <= 0:
                continue
            carried = (self._total_bytes - began) / (self._total_s - began_s) / expected
            if len(self._recent) == _MAX_STRETCHES:
                self._ranked.remove(self._recent[0])
            self._recent.append(carried)
            insort(self._ranked, carried)
        self._sure_share = None

    def _quantile(self) -> float:
        wanted = max(1, math.ceil(_MISS_PROBABILITY * (len(self._ranked) + len(_BORROWED))))
        lowest = heapq.merge(self._ranked[:wanted], _BORROWED[:wanted])
        return min(1.0, next(islice(lowest, wanted - 1, None)))
