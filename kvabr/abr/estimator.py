"""What every bandwidth estimator is: it hears of bytes and seconds, and says a rate and a bound below it.

A sample is what the whole play received while its link was busy, over all requests in flight together: the rate of one
transfer among several says nothing about the link. Time to first byte is estimated apart, since a small group on a
long link would otherwise look like a slow link (hls.js does the same).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a path before a play begins: how it did for plays before this one."""

    rate: float
    """Bytes per second that it carried."""
    ttfb_s: float
    """Least time to first byte, seconds; 0.0 if unknown."""
    weight: float = 1.0
    """How far it is to be believed, from 0 (not at all) to 1 (it was heard a moment ago)."""


class Estimator(ABC):
    """Estimates the rate of one network path, bytes per second."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._first_byte: float | None = None
        self._expected_byte = 0.0
        self._heard_s = -math.inf

    def start(self, horizon_s: float) -> None:  # noqa: B027  # a hook that few need
        """Begin a play whose deadline is ``horizon_s`` seconds away: memory much longer than that is of no use.

        Called again, while the connection is in slow start, to forget the samples so far.
        """

    def prime(self, prior: Prior) -> None:
        """Hear, before a play begins, how the path did before; an estimator may know better than to believe it."""
        self._expected_byte = prior.ttfb_s

    def sound(self, nbytes: float, seconds: float, now: float) -> bool:
        """Whether a sample can be one: some time, no less than no bytes, and no earlier than the one before.

        What is not sound is of a clock that jumped or of a caller that erred; the estimators of kvabr ignore it.
        """
        sound = 1e-9 < seconds < math.inf and 0.0 <= nbytes < math.inf and self._heard_s <= now < math.inf
        if sound:
            self._heard_s = now
        return sound

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
        if not 0.0 <= seconds < math.inf:
            return
        if self._first_byte is None or seconds < self._first_byte:
            self._first_byte = seconds

    def ttfb(self) -> float:
        """Time to first byte that a request should expect, seconds: the least of the play.

        Before the first, what plays before this one waited, or 0.0.

        The least, not the mean: what a request waits beyond it is queueing behind the play's own transfers, which the
        rate already accounts for. A mean would feed on itself: more waiting, more requests in flight to hide it, more
        waiting.
        """
        return self._expected_byte if self._first_byte is None else self._first_byte
