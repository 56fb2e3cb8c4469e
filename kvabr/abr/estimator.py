"""What every bandwidth estimator is: it hears of bytes and seconds, and says a rate and a bound below it.

A sample is what the whole play received while its link was busy, over all requests in flight together: the rate of one
transfer among several says nothing about the link. Time to first byte is estimated apart, since a small group on a
long link would otherwise look like a slow link (hls.js does the same).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Estimator(ABC):
    """Estimates the rate of one network path, bytes per second."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._first_byte: float | None = None

    def start(self, horizon_s: float) -> None:  # noqa: B027  # a hook that few need
        """Begin a play whose deadline is ``horizon_s`` seconds away: memory much longer than that is of no use.

        Called again, while the connection is in slow start, to forget the samples so far.
        """

    @abstractmethod
    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Hear that ``nbytes`` (zero is news too) arrived within ``seconds`` of a busy link, ending at ``now``."""

    @abstractmethod
    def rate(self) -> float:
        """The expected rate, bytes per second; 0.0 until the first sample."""

    @abstractmethod
    def lower_bound(self) -> float:
        """A rate that the link should exceed most of the time; never above `rate`."""

    def first_byte(self, seconds: float) -> None:
        """Hear that a request waited ``seconds`` for its first byte."""
        if self._first_byte is None or seconds < self._first_byte:
            self._first_byte = seconds

    def ttfb(self) -> float:
        """Time to first byte that a request should expect, seconds: the least of the play, 0.0 before the first.

        The least, not the mean: what a request waits beyond it is queueing behind the play's own transfers, which the
        rate already accounts for. A mean would feed on itself: more waiting, more requests in flight to hide it, more
        waiting.
        """
        return self._first_byte or 0.0
