"""The contract of a bandwidth estimator: samples of bytes and seconds in, a rate and a lower bound out.

A sample is everything that the play received while its link was busy, over all requests in flight. Time to first byte
is estimated separately: otherwise a small group on a long link looks like a slow link (hls.js does the same).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

WINDOW = 14_600
"""Bytes of the first round trip in slow start (RFC 9002, section 7.2)."""
SLOT_SHARE = 1 / 200
"""Samples are merged until they span this share of the deadline; rates are not measured more often."""
_MIN_CONFIDENCE = 0.5
"""Minimum confidence for policies to see the rate of earlier plays."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Observations of a path by earlier plays."""

    rate: float
    """Bytes per second."""
    ttfb_s: float
    """Least time to first byte, seconds; 0.0 if unknown."""
    weight: float = 1.0
    """Confidence, from 0 (none) to 1 (observed a moment ago)."""


class Estimator(ABC):
    """Estimates the rate of one network path, in bytes per second."""

    name: ClassVar[str]
    prior_rate = 0.0
    """Rate observed by earlier plays, bytes per second; 0.0 if unknown."""
    own = False
    """True if this client has observed it, not a server."""

    def __init__(self) -> None:
        self._first_byte: float | None = None
        self._expected_byte = 0.0
        self._received_s = -math.inf

    def start(self, horizon_s: float) -> None:  # noqa: B027  # an optional hook
        """Start a play of ``horizon_s`` seconds; much longer memory is useless. Called again to forget slow start."""

    def prime(self, prior: Prior) -> None:
        """Note, before a play starts, the observations of earlier plays. Estimators may ignore them."""
        self._expected_byte = prior.ttfb_s
        if prior.rate > 0 and prior.weight >= _MIN_CONFIDENCE:
            self.prior_rate, self.own = prior.rate, prior.weight > _MIN_CONFIDENCE

    def sound(self, nbytes: float, seconds: float, now: float) -> bool:
        """Return whether a sample is plausible; implausible ones result from clock jumps or bugs in the caller."""
        sound = 1e-9 < seconds < math.inf and 0.0 <= nbytes < math.inf and self._received_s <= now < math.inf
        if sound:
            self._received_s = now
        return sound

    @abstractmethod
    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Record that ``nbytes`` (possibly 0) arrived within ``seconds`` of a busy link, ending at ``now``."""

    def waited(self, now: float) -> None:  # noqa: B027  # an optional hook
        """Note that no data arrived until ``now`` because other plays used the link."""

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
        """Return the expected time to first byte of a request, in seconds; 0.0 if unknown.

        It is the minimum of the play so far, or else that of earlier plays. A mean would feed on itself: any time
        beyond the minimum is queueing in the play's own transfers.
        """
        return self._expected_byte if self._first_byte is None else self._first_byte
