"""Turns what arrives into samples for the estimator: bytes of all requests together, over the time of a busy link.

A sample that the publisher or this machine's processor held up says only that the link is at least that fast: it may
raise the estimate, never lower it. Silence always counts, since nothing at all arrives to say who is at fault.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from kvabr.abr.estimator import Estimator
from kvabr.abr.plugins import where
from kvabr.types.errors import PolicyError
from kvabr.types.events import Limit

_SHORTEST_SHARE = 1 / 400
"""Samples shorter than this share of the deadline are gathered into longer ones."""
_SILENCE_SHARE = 1 / 25
"""A request that has waited this share of the deadline and thrice the usual time for its first byte has stalled."""

_PACKET = 1200
"""Fewer bytes than this say nothing about a rate."""
_NUMBER = (int, float)
_RAMP = 1.25
"""A sample so many times faster than the one before still belongs to slow start."""


class Limited(Protocol):
    """Hears of samples that the network did not hold up."""

    def __call__(self, by: Limit, rate: float, now: float, *, fed: bool) -> None:
        """``fed`` tells whether the estimator heard of it."""


class ThroughputSampler:
    """Watches one play's link."""

    def __init__(self, estimator: Estimator, deadline_s: float, limited: Limited | None = None) -> None:
        self._estimator = estimator
        self._limited = limited
        self._deadline_s = deadline_s
        self._known: tuple[float, float, float] | None = None
        """The estimates, until the estimator hears of something: they are asked for far more often than that."""
        self._begin()
        self._ramp_rate: float | None = 0.0
        """Rate of the last sample while every sample is clearly faster than the one before; None once that is over."""
        self._shortest_s = _SHORTEST_SHARE * deadline_s
        self._silence_s = _SILENCE_SHARE * deadline_s
        self._since: float | None = None
        """When the sample being gathered began; None while nothing arrives."""
        self._bytes = 0
        self._held: dict[Limit, int] = {}
        """Of these bytes, those that were held up by another than the network."""
        self._quiet_since = 0.0

    def estimates(self) -> tuple[float, float, float]:
        """Rate and lower bound, bytes per second, and time to first byte, seconds.

        Raises:
            PolicyError: the estimator raises, or returns what is no finite number from 0.
        """
        if self._known is not None:
            return self._known
        estimator = self._estimator
        try:
            rate, lower, ttfb = estimator.rate(), estimator.lower_bound(), estimator.ttfb()
        except Exception as error:
            raise self._fault(f"raised {error!r}", error) from error
        for value in (rate, lower, ttfb):
            if not isinstance(value, _NUMBER) or not 0.0 <= value < math.inf:
                break
        else:
            self._known = rate, min(rate, lower), ttfb
            return self._known
        raise self._fault(f"estimates rate {rate!r}, lower bound {lower!r}, first byte {ttfb!r}; finite numbers from 0")

    def _begin(self) -> None:
        self._known = None
        try:
            self._estimator.start(self._deadline_s)
        except Exception as error:
            raise self._fault(f"raised {error!r}", error) from error

    def _sample(self, nbytes: int, seconds: float, now: float) -> None:
        self._known = None
        try:
            self._estimator.sample(nbytes, seconds, now)
        except Exception as error:
            raise self._fault(f"raised {error!r}", error) from error

    def _fault(self, what: str, error: Exception | None = None) -> PolicyError:
        cls = type(self._estimator)
        return PolicyError(f"estimator {getattr(cls, 'name', cls.__name__)} {what} ({where(cls, error)})")

    def first_byte(self, waited_s: float, now: float) -> None:
        """A request got its first byte after so many seconds."""
        self._known = None
        try:
            self._estimator.first_byte(waited_s)
        except Exception as error:
            raise self._fault(f"raised {error!r}", error) from error
        if self._since is None:
            self._since = now
            self._bytes = 0
            self._held.clear()

    def received(self, nbytes: int, now: float, limit: Limit = "network") -> None:
        """Bytes arrived; ``limit`` says who held them up."""
        if limit == "kept":
            return
        self._bytes += nbytes
        if limit != "network":
            self._held[limit] = self._held.get(limit, 0) + nbytes
        self._quiet_since = now

    def settle(self, now: float, *, idle: bool) -> None:
        """A transfer ended; if none is left that moves, the sample ends with it."""
        if self._since is None:
            return
        seconds = now - self._since
        if seconds >= self._least_s() or (idle and self._bytes and seconds > 0):
            self._conclude(seconds, now)
            self._since = now
        if idle:
            self._since = None

    def _least_s(self) -> float:
        """The first sample of all is wanted soon; those that follow must show whether the window still doubles."""
        return max(self._shortest_s, self._estimator.ttfb()) if self._ramp_rate else self._shortest_s

    def _conclude(self, seconds: float, now: float) -> None:
        """Give the bytes gathered to the estimator, and begin to gather anew."""
        if self._says_something(self._bytes / seconds, now):
            if self._ramp_rate is not None:
                self._forget_slow_start(self._bytes / seconds)
            self._sample(self._bytes, seconds, now)
        self._bytes = 0
        self._held.clear()

    def _says_something(self, rate: float, now: float) -> bool:
        """Whether a sample is of the link: not if others held up most of it, unless the link is even faster."""
        if 2 * sum(self._held.values()) <= self._bytes:
            return True
        fed = rate > self.estimates()[0]
        if self._limited is not None:
            self._limited(max(self._held, key=lambda limit: self._held[limit]), rate, now, fed=fed)
        return fed

    def _forget_slow_start(self, rate: float) -> None:
        """While the connection's window still doubles, only the last sample says anything about the link."""
        if self._ramp_rate is not None and rate > _RAMP * self._ramp_rate:
            self._ramp_rate = rate
            self._begin()
        else:
            self._ramp_rate = None

    def waited(self, now: float) -> None:
        """Until now, others had the link: that time says nothing about it."""
        if self._since is not None:
            if self._bytes:
                self._conclude(now - self._since, now)
            self._since = now
        self._quiet_since = now

    def tick(self, now: float, *, waiting: bool, idle: bool) -> None:
        """Time passes. A link on which everything waits far longer than a round trip carries nothing: that is news."""
        if not idle:
            self.settle(now, idle=False)
        elif waiting and now - self._quiet_since > max(self._silence_s, 3 * self._estimator.ttfb()):
            self._sample(0, now - self._quiet_since, now)
            self._quiet_since = now


class ChunkedThroughputSampler(ThroughputSampler):
    """Watches the link of a play over a real transport."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._arrived_s = 0.0
        self._first_lump = 0
        self._waited_s = 0.0
        """Seconds that the first lump was waited for; 0.0 once a sample has followed it."""

    def first_byte(self, waited_s: float, now: float) -> None:
        """A request got its first byte after so many seconds."""
        if self._since is None:
            self._arrived_s, self._first_lump, self._waited_s = now, 0, waited_s
        super().first_byte(waited_s, now)

    def received(self, nbytes: int, now: float, limit: Limit = "network") -> None:
        """A lump arrived; ``limit`` says who held it up."""
        if self._since is not None and now <= self._since:
            self._first_lump += nbytes
            self._quiet_since = now
        else:
            super().received(nbytes, now, limit)
        self._arrived_s = now

    def settle(self, now: float, *, idle: bool) -> None:
        """A transfer ended, or time passes."""
        if self._since is None:
            return
        seconds = self._arrived_s - self._since
        if self._bytes and seconds >= self._least_s():
            self._conclude(seconds, now)
            self._since, self._waited_s = self._arrived_s, 0.0
        elif idle:
            self._at_least(self._first_lump + self._bytes, self._waited_s + seconds, now)
        elif not self._bytes and now - self._since > max(self._silence_s, 3 * self._estimator.ttfb()):
            self._sample(0, now - self._since, now)
            self._since = now
        if idle:
            self._since = None

    def _at_least(self, nbytes: int, seconds: float, now: float) -> None:
        if self._waited_s > 0 and nbytes >= _PACKET and nbytes / seconds > self.estimates()[0]:
            self._sample(nbytes, seconds, now)
