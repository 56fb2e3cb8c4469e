"""``last``: the throughput of the last group, as in CacheGen's published rule."""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.estimator import Estimator


class LastSample(Estimator):
    """The rate over the last stretch of at least a fiftieth of the deadline."""

    name: ClassVar[str] = "last"

    def __init__(self, share: float = 1 / 50) -> None:
        """Set the length of a sample, as a share of the deadline."""
        super().__init__()
        self._share = share
        self.start(4.0)

    def start(self, horizon_s: float) -> None:
        """Forget all samples; scale the sample length to the play."""
        self._span = self._share * horizon_s
        self._bytes = self._seconds = self._rate = 0.0

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Accumulate; replace the estimate once the stretch is long enough."""
        if not self.sound(nbytes, seconds, now):
            return
        self._bytes += nbytes
        self._seconds += seconds
        if self._seconds >= self._span:
            self._rate = self._bytes / self._seconds
            self._bytes = self._seconds = 0.0

    def rate(self) -> float:
        """Return the rate of the last stretch; before the first full one, the rate so far."""
        return self._rate or (self._bytes / self._seconds if self._seconds else 0.0)

    def lower_bound(self) -> float:
        """Return `rate`: this estimator has no margin."""
        return self.rate()
