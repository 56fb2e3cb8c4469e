"""The throughput of the last group, taken as it is: what CacheGen's published rule reckons with."""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.estimator import Estimator


class LastSample(Estimator):
    """The rate over the last stretch of at least one fiftieth of the deadline."""

    name: ClassVar[str] = "last"

    def __init__(self, share: float = 1 / 50) -> None:
        """Set the length of a sample as a share of the deadline."""
        super().__init__()
        self._share = share
        self.start(4.0)

    def start(self, horizon_s: float) -> None:
        """Forget what was heard; scale the sample length to the play."""
        self._span = self._share * horizon_s
        self._bytes = self._seconds = self._rate = 0.0

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Gather; replace the estimate once the stretch is long enough."""
        if not self.sound(nbytes, seconds, now):
            return
        self._bytes += nbytes
        self._seconds += seconds
        if self._seconds >= self._span:
            self._rate = self._bytes / self._seconds
            self._bytes = self._seconds = 0.0

    def rate(self) -> float:
        """The last stretch's rate; until it is long enough, what was gathered so far."""
        return self._rate or (self._bytes / self._seconds if self._seconds else 0.0)

    def lower_bound(self) -> float:
        """The same: this estimator has no doubt."""
        return self.rate()
