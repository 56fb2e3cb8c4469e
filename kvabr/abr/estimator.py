"""The contract of a bandwidth estimator: samples of bytes and seconds in, a rate and a lower bound out.

A sample is what the whole play received while its link was busy, over all requests in flight together. Time to first
byte is estimated separately: otherwise a small group on a long link looks like a slow link (hls.js does the same).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

WINDOW = 14_600
"""Bytes of the first round trip in slow start (RFC 9002, section 7.2)."""
_TRUSTED = 0.5
"""Confidence from which what earlier plays observed is told to policies."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What earlier plays observed of a path."""

    rate: float
    """Bytes per second."""
    ttfb_s: float
    """Least time to first byte, seconds; 0.0 if unknown."""
    weight: float = 1.0
    """Confidence, from 0 (none) to 1 (observed a moment ago)."""


class Estimator(ABC):
    """Estimates the rate of one network path, in bytes per second."""

    name: ClassVar[str]
    told = 0.0
    """Rate that earlier plays observed, bytes per second; 0.0: none."""

    def __init__(self) -> None:
        self._first_byte: float | None = None
        self._expected_byte = 0.0
        self._heard_s = -math.inf

    def start(self, horizon_s: float) -> None:  # noqa: B027  # a hook that few need
        """Start a play; memory much longer than its ``horizon_s`` is useless. Again, to forget slow start."""

    def prime(self, prior: Prior) -> None:
        """Take note, before a play starts, of what earlier plays observed. Estimators may ignore it."""
        self._expected_byte = prior.ttfb_s
        if prior.rate > 0 and prior.weight >= _TRUSTED:
            self.told = prior.rate

    def sound(self, nbytes: float, seconds: float, now: float) -> bool:
        """Return whether a sample is plausible; others come from clocks that jumped or from a bug in the caller."""
        sound = 1e-9 < seconds < math.inf and 0.0 <= nbytes < math.inf and self._heard_s <= now < math.inf
        if sound:
            self._heard_s = now
        return sound

    @abstractmethod
    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Record that ``nbytes`` (possibly 0) arrived within ``seconds`` of a busy link, ending at ``now``."""

    def waited(self, now: float) -> None:  # noqa: B027  # a hook that few need
        """Note that nothing came until ``now`` because other plays used the link."""

    @abstractmethod
    def rate(self) -> float:
        """Return the expected rate in bytes per second; 0.0 until the first sample."""

    @abstractmethod
    def lower_bound(self) -> float:
        """Return a rate that the link should exceed most of the time; never above `rate`."""

    def first_byte(self, seconds: float) -> None:
        """Record that a request waited ``seconds`` for its first byte."""
        if not 0.0 <= seconds < math.inf:
            return
        if self._first_byte is None or seconds < self._first_byte:
            self._first_byte = seconds

    def ttfb(self) -> float:
        """Return the time to first byte that a request should expect, in seconds; 0.0 if unknown.

        It is the minimum of the play so far, else what earlier plays observed. A mean would feed on itself: anything
        beyond the minimum is queueing behind the play's own transfers.
        """
        return self._expected_byte if self._first_byte is None else self._first_byte
