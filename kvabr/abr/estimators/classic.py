"""The harmonic mean of video players, and code shared with `tracking`."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import ClassVar

from kvabr.abr.estimator import Estimator


class MergedSamples(Estimator):
    """Merges samples until they span a share of the deadline."""

    def __init__(self, share: float = 0.0) -> None:
        """Set the minimum length of a merged sample, as a share of the deadline; 0: no merging."""
        super().__init__()
        self._share = share
        self.start(4.0)

    def start(self, horizon_s: float) -> None:
        """Forget all samples, and scale everything to the play."""
        self._horizon_s, self._span_s = horizon_s, self._share * horizon_s
        self._bytes = self._seconds = 0.0
        self._forget()

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Accumulate; finish the merged sample once it is long enough."""
        if not self.sound(nbytes, seconds, now):
            return
        self._bytes += nbytes
        self._seconds += seconds
        if self._seconds >= self._span_s:
            self._add(self._bytes, self._seconds)
            self._bytes = self._seconds = 0.0

    @abstractmethod
    def _forget(self) -> None:
        """Forget all merged samples."""

    @abstractmethod
    def _add(self, nbytes: float, seconds: float) -> None:
        """Update the estimate with a merged sample."""

    def _so_far(self) -> float:
        return self._bytes / self._seconds if self._seconds else 0.0


class DecayingMean:
    """Exponentially weighted mean, corrected for the bias of a young average towards zero."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = self.weight = 0.0

    def add(self, value: float, seconds: float) -> None:
        """Add a value that held for some seconds."""
        keep = 0.5 ** (seconds / self._half_life_s)
        self._sum = keep * self._sum + (1 - keep) * value
        self.weight = keep * self.weight + (1 - keep)

    def restart(self, value: float, seconds: float) -> None:
        """Forget everything but a value that held for some seconds."""
        self.weight = 1.0 - 0.5 ** (seconds / self._half_life_s)
        self._sum = value * self.weight

    def value(self) -> float:
        """Return the mean; 0.0 without any values."""
        return self._sum / self.weight if self.weight else 0.0


class HarmonicMean(MergedSamples):
    """Harmonic mean of the last samples, and a bound by the largest recent error (Yin et al., 2015)."""

    name: ClassVar[str] = "harmonic"

    def __init__(self, window: int = 5, share: float = 1 / 20) -> None:
        """Set the number of samples in mean and error, and their minimum length: tiny ones would dominate the mean."""
        self._window = window
        super().__init__(share)

    def _forget(self) -> None:
        self._costs: deque[float] = deque(maxlen=self._window)
        self._errors: deque[float] = deque(maxlen=self._window)

    def _add(self, nbytes: float, seconds: float) -> None:
        measured = max(nbytes, 1.0) / seconds
        if self._costs:
            self._errors.append(abs(self.rate() - measured) / measured)
        self._costs.append(1.0 / measured)

    def rate(self) -> float:
        """Return the harmonic mean; before the first full sample, the rate so far."""
        return len(self._costs) / sum(self._costs) if self._costs else self._so_far()

    def lower_bound(self) -> float:
        """Return the mean over one plus the largest of the last errors."""
        return self.rate() / (1.0 + max(self._errors, default=0.5))
