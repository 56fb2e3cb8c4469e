"""``harmonic``: harmonic mean of the last samples, and a bound by the largest recent error (Yin et al., 2015)."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from kvabr.abr.estimator import Estimator


class HarmonicMean(Estimator):
    """Mean of seconds per byte over the last samples; the bound divides by one plus the largest recent error."""

    name: ClassVar[str] = "harmonic"

    def __init__(self, window: int = 5, share: float = 1 / 20) -> None:
        """Set the number and length of samples.

        Args:
            window: samples in the mean and in the error.
            share: transfers are merged until they span this share of the deadline, because a harmonic mean of many tiny
                samples is dominated by the smallest.
        """
        super().__init__()
        self._window, self._share = window, share
        self.start(4.0)

    def start(self, horizon_s: float) -> None:
        """Forget all samples; scale the sample length to the play."""
        self._span = self._share * horizon_s
        self._costs: deque[float] = deque(maxlen=self._window)
        self._errors: deque[float] = deque(maxlen=self._window)
        self._bytes = self._seconds = 0.0

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Accumulate; close the sample once it is long enough."""
        if not self.sound(nbytes, seconds, now):
            return
        self._bytes += nbytes
        self._seconds += seconds
        if self._seconds < self._span:
            return
        measured = max(self._bytes, 1.0) / self._seconds
        if self._costs:
            self._errors.append(abs(self.rate() - measured) / measured)
        self._costs.append(1.0 / measured)
        self._bytes = self._seconds = 0.0

    def rate(self) -> float:
        """Return the harmonic mean; before the first full sample, the rate so far."""
        if self._costs:
            return len(self._costs) / sum(self._costs)
        return self._bytes / self._seconds if self._seconds else 0.0

    def lower_bound(self) -> float:
        """Return the mean over one plus the largest of the last errors."""
        return self.rate() / (1.0 + max(self._errors, default=0.5))
