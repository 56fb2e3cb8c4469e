"""Estimators of dash.js, CacheGen and ExoPlayer, for comparison."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from kvabr.abr.estimators import DecayingMean, MergedSamples


class DualEwma(MergedSamples):
    """The smaller of a fast and a slow mean (Shaka, dash.js): it follows drops at once, and rises only if they last."""

    name: ClassVar[str] = "ewma"

    def __init__(self, fast_share: float = 1 / 16, slow_share: float = 1 / 4, caution: float = 1.0) -> None:
        """Set the half-lives as fractions of the deadline.

        The bound is ``caution`` weighted standard deviations below the estimate, but at least a quarter of the
        estimate.
        """
        self._shares, self._caution = (fast_share, slow_share), caution
        super().__init__()

    def _forget(self) -> None:
        fast_s, slow_s = (share * self._horizon_s for share in self._shares)
        self._fast, self._slow, self._square = DecayingMean(fast_s), DecayingMean(slow_s), DecayingMean(slow_s)

    def _add(self, nbytes: float, seconds: float) -> None:
        rate = nbytes / seconds
        self._fast.add(rate, seconds)
        self._slow.add(rate, seconds)
        self._square.add(rate * rate, seconds)

    def rate(self) -> float:
        """Return the smaller mean."""
        return min(self._fast.value(), self._slow.value())

    def lower_bound(self) -> float:
        """Return the bound."""
        if not self._slow.weight:
            return 0.0
        deviation = math.sqrt(max(0.0, self._square.value() - self._slow.value() ** 2))
        rate = self.rate()
        return max(0.25 * rate, rate - self._caution * deviation)


class LastSample(MergedSamples):
    """The throughput of the last group, as in CacheGen's rule, measured over at least a fiftieth of the deadline."""

    name: ClassVar[str] = "last"

    def __init__(self, share: float = 1 / 50) -> None:
        """Set the minimum length of a sample, as a fraction of the deadline."""
        super().__init__(share)

    def _forget(self) -> None:
        self._rate = 0.0

    def _add(self, nbytes: float, seconds: float) -> None:
        self._rate = nbytes / seconds

    def rate(self) -> float:
        """Return the rate of the last sample; before the first complete sample, the rate so far."""
        return self._rate or self._so_far()

    def lower_bound(self) -> float:
        """Return the same as `rate`: there is no margin."""
        return self.rate()


class SlidingPercentile(MergedSamples):
    """Percentiles of recent samples, weighted by the square root of their bytes (ExoPlayer)."""

    name: ClassVar[str] = "percentile"

    def __init__(self, middle: float = 0.5, low: float = 0.1, window: int = 32) -> None:
        """Set the percentiles of the estimate and of the lower bound (0 to 1), and the number of samples."""
        self._middle, self._low, self._window = middle, low, window
        super().__init__()

    def _forget(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=self._window)

    def _add(self, nbytes: float, seconds: float) -> None:
        self._samples.append((nbytes / seconds, math.sqrt(nbytes) + 1.0))

    def _at(self, share: float) -> float:
        ranked = sorted(self._samples)
        wanted = share * sum(weight for _, weight in ranked)
        reached = 0.0
        for rate, weight in ranked:
            reached += weight
            if reached >= wanted:
                return rate
        return ranked[-1][0] if ranked else 0.0

    def rate(self) -> float:
        """Return the middle percentile."""
        return self._at(self._middle)

    def lower_bound(self) -> float:
        """Return the low percentile."""
        return self._at(self._low)
