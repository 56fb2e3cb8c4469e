"""``ewma``: the smaller of a fast and a slow exponentially weighted mean (as in Shaka and dash.js)."""

from __future__ import annotations

import math
from typing import ClassVar

from kvabr.abr.estimator import Estimator


class DualEwma(Estimator):
    """The smaller of a fast and a slow mean: drops count at once, rises only when they last."""

    name: ClassVar[str] = "ewma"

    def __init__(self, fast_share: float = 1 / 16, slow_share: float = 1 / 4, caution: float = 1.0) -> None:
        """Set the half-lives and the width of the bound.

        Args:
            fast_share: half-life of the fast mean, as a share of the deadline.
            slow_share: half-life of the slow mean, as a share of the deadline.
            caution: the lower bound lies this many (weighted) standard deviations of the samples below the estimate,
                but is at least a quarter of it.
        """
        super().__init__()
        self._shares = (fast_share, slow_share)
        self._caution = caution
        self.start(4.0)

    def start(self, horizon_s: float) -> None:
        """Scale the half-lives to the play."""
        self._fast_life, self._slow_life = (share * horizon_s for share in self._shares)
        self._fast = self._slow = self._square = 0.0
        self._fast_weight = self._slow_weight = 0.0

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Weight the sample by its duration."""
        if not self.sound(nbytes, seconds, now):
            return
        rate = nbytes / seconds
        keep = 0.5 ** (seconds / self._fast_life)
        self._fast = keep * self._fast + (1 - keep) * rate
        self._fast_weight = keep * self._fast_weight + (1 - keep)
        keep = 0.5 ** (seconds / self._slow_life)
        self._slow = keep * self._slow + (1 - keep) * rate
        self._square = keep * self._square + (1 - keep) * rate * rate
        self._slow_weight = keep * self._slow_weight + (1 - keep)

    def rate(self) -> float:
        """Return the smaller mean, corrected for the bias of a young average towards zero."""
        if not self._slow_weight:
            return 0.0
        return min(self._fast / self._fast_weight, self._slow / self._slow_weight)

    def lower_bound(self) -> float:
        """Return the estimate less ``caution`` deviations, at least a quarter of the estimate."""
        if not self._slow_weight:
            return 0.0
        mean = self._slow / self._slow_weight
        deviation = math.sqrt(max(0.0, self._square / self._slow_weight - mean * mean))
        rate = self.rate()
        return max(0.25 * rate, rate - self._caution * deviation)
