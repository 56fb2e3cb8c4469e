"""``percentile``: weighted sliding percentile (as in ExoPlayer), robust against outliers."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from kvabr.abr.estimator import Estimator


class SlidingPercentile(Estimator):
    """Percentiles of the recent samples, each weighted by the square root of its bytes."""

    name: ClassVar[str] = "percentile"

    def __init__(self, middle: float = 0.5, low: float = 0.1, window: int = 32) -> None:
        """Set the percentiles of the estimate and of the lower bound (both 0 to 1), and the number of samples."""
        super().__init__()
        self._middle, self._low = middle, low
        self._samples: deque[tuple[float, float]] = deque(maxlen=window)

    def start(self, horizon_s: float) -> None:  # noqa: ARG002
        """Forget all samples."""
        self._samples.clear()

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Add the sample."""
        if self.sound(nbytes, seconds, now):
            self._samples.append((nbytes / seconds, math.sqrt(nbytes) + 1.0))

    def _at(self, share: float) -> float:
        if not self._samples:
            return 0.0
        ranked = sorted(self._samples)
        wanted = share * sum(weight for _, weight in ranked)
        reached = 0.0
        for rate, weight in ranked:
            reached += weight
            if reached >= wanted:
                return rate
        return ranked[-1][0]

    def rate(self) -> float:
        """Return the middle percentile."""
        return self._at(self._middle)

    def lower_bound(self) -> float:
        """Return the low percentile."""
        return self._at(self._low)
