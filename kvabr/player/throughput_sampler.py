"""Throughput samples for the estimator: the bytes of all requests over the time that the link was busy.

A sample limited by the publisher or this process never lowers the estimate. Silence always counts, since it has no
visible cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvabr.abr.estimator import Estimator
from kvabr.abr.plugins import where
from kvabr.abr.view import InFlight
from kvabr.types.errors import PolicyError
from kvabr.types.events import Limit

_MIN_SHARE = 1 / 400
"""Least sample length, as a share of the deadline; shorter samples are merged."""
_MAX_SHARE = 1 / 12
"""Longest sample in slow start, as a share of the deadline."""
_SILENCE_SHARE = 1 / 25
"""A link is silent after this share of the deadline and three times the time to first byte."""
_PACKET = 1200
"""Smallest meaningful chunk, bytes."""
_RAMP = 1.25
"""Least growth between samples of slow start."""
_SAME_WINDOW_SHARE = 0.9
"""Share of a short first sample's rate from which the second may belong to the same window."""
_RAMP_BYTES = 0.5
"""Least bytes of a slow-start sample, over the previous one's: windows grow."""


class Limited(Protocol):
    """Callback for samples not limited by the network."""

    def __call__(self, by: Limit, rate: float, now: float, *, fed: bool) -> None:
        """Handle a sample of ``rate`` bytes per second; ``fed``: the estimator received it."""


class ThroughputSampler:
    """Samples a link from bytes reported as they flow, as in the simulator."""

    def __init__(self, estimator: Estimator, deadline_s: float, limited: Limited | None = None) -> None:
        self._estimator = estimator
        self._limited = limited
        self._deadline_s = deadline_s
        self._known: tuple[float, float, float] | None = None
        self._begin()
        self._prior_rate: float | None = None
        """Rate reported by earlier plays, or 0.0; reaching it is no growth."""
        self._ramp_rate: float | None = 0.0
        """Rate of the last slow-start sample; None after slow start."""
        self._ramp_bytes = 0
        self._brief = False
        """The first sample was short and may share its window with the next."""
        self._shortest_s = _MIN_SHARE * deadline_s
        self._silence_s = _SILENCE_SHARE * deadline_s
        self._since: float | None = None
        self._bytes = 0
        self._held: dict[Limit, int] = {}
        self._quiet_since = 0.0

    @property
    def growing(self) -> bool:
        """True if the last sample clearly exceeds the previous one, as in slow start, and earlier plays."""
        return (self._ramp_rate or 0.0) > (self._prior_rate or 0.0)

    def estimates(self) -> tuple[float, float, float]:
        """Return rate and lower bound, bytes per second, and time to first byte, seconds."""
        if self._known is not None:
            return self._known
        estimator = self._estimator
        with self._requesting():
            rate, lower, ttfb = estimator.rate(), estimator.lower_bound(), estimator.ttfb()
        if not all(isinstance(value, int | float) and 0.0 <= value < math.inf for value in (rate, lower, ttfb)):
            what = (
                f"must return finite numbers of 0 or more, got rate {rate!r}, lower bound {lower!r}, first byte "
                f"{ttfb!r}"
            )
            raise self._fault(what)
        self._known = rate, min(rate, lower), ttfb
        return self._known

    def _begin(self) -> None:
        with self._requesting():
            self._estimator.start(self._deadline_s)

    def _sample(self, nbytes: int, seconds: float, now: float) -> None:
        if self._prior_rate is None:
            self._prior_rate = self.estimates()[0]
        with self._requesting():
            self._estimator.sample(nbytes, seconds, now)

    @contextmanager
    def _requesting(self) -> Iterator[None]:
        self._known = None
        try:
            yield
        except Exception as error:
            raise self._fault(f"raised {error!r}", error) from error

    def _fault(self, what: str, error: Exception | None = None) -> PolicyError:
        cls = type(self._estimator)
        return PolicyError(f"estimator {getattr(cls, 'name', cls.__name__)} {what} ({where(cls, error)})")

    def first_byte(self, waited_s: float | None, now: float) -> None:
        """Record a first byte after ``waited_s`` seconds; None: the group was pushed."""
        if waited_s is not None:
            with self._requesting():
                self._estimator.first_byte(waited_s)
        if self._since is None:
            self._since = now
            self._bytes = 0
            self._held.clear()

    def received(self, nbytes: int, now: float, limit: Limit = "network") -> None:
        """Count received bytes; ``limit`` names the bottleneck."""
        if limit == "kept":
            return
        self._bytes += nbytes
        if limit != "network":
            self._held[limit] = self._held.get(limit, 0) + nbytes
        self._quiet_since = now

    def settle(self, now: float, *, idle: bool) -> None:
        """Record the end of a transfer, and if ``idle``, of the sample."""
        if self._since is None:
            return
        seconds = now - self._since
        if seconds >= self._least_s() or (idle and self._bytes and seconds > 0):
            self._conclude(seconds, now)
            self._since = now
        if idle:
            self._since = None

    def _least_s(self) -> float:
        """Return the least sample length: short at first, later enough to show the end of slow start."""
        if not self._ramp_rate:
            return self._shortest_s
        # A late first byte, as after an outage, is no slow start.
        return max(self._shortest_s, min(self.estimates()[2], _MAX_SHARE * self._deadline_s))

    def _conclude(self, seconds: float, now: float) -> None:
        if self._says_something(self._bytes / seconds, now):
            if not self._bytes:  # bytes in transit are lost: see `_silent`
                self._ramp_rate = None if self._ramp_rate else self._ramp_rate
            elif self._ramp_rate is not None and self._bytes >= _RAMP_BYTES * self._ramp_bytes:
                self._forget_slow_start(self._bytes / seconds, seconds)
            self._sample(self._bytes, seconds, now)
        self._bytes = 0
        self._held.clear()

    def _says_something(self, rate: float, now: float) -> bool:
        """Return whether a sample measures the link; slow samples with another bottleneck do not."""
        if 2 * sum(self._held.values()) <= self._bytes:
            return True
        fed = rate > self.estimates()[0]
        if self._limited is not None:
            self._limited(max(self._held, key=lambda limit: self._held[limit]), rate, now, fed=fed)
        return fed

    def _forget_slow_start(self, rate: float, seconds: float) -> None:
        """Restart the estimator in slow start: only the last sample of a growing window measures the link."""
        if self._ramp_rate is None:
            return
        if rate > _RAMP * self._ramp_rate:
            self._brief = not self._ramp_rate and seconds < self.estimates()[2]
            self._ramp_rate, self._ramp_bytes = rate, self._bytes
            self._begin()
        else:
            self._ramp_rate = self._ramp_rate if self._brief and rate >= _SAME_WINDOW_SHARE * self._ramp_rate else None
            self._brief = False

    def _silent(self, seconds: float, now: float) -> None:
        """Record silence; faster samples afterwards are recovery, not slow start."""
        self._ramp_rate = None if self._ramp_rate else self._ramp_rate
        self._sample(0, seconds, now)

    def revived(self) -> None:
        """Forget all samples: the dead link may have changed."""
        self._ramp_rate = None
        self._begin()

    def waited(self, now: float) -> None:
        """Skip the time until now: other plays used the link."""
        with self._requesting():
            self._estimator.waited(now)
        if self._since is not None:
            if self._bytes and now > self._since:
                self._conclude(now - self._since, now)
            self._since = now
        self._quiet_since = now

    def tick(self, now: float, *, waiting: bool, idle: bool) -> None:
        """Let time pass; if all requests wait far longer than a round trip, the rate is zero."""
        if not idle:
            self.settle(now, idle=False)
        elif not waiting:  # a link without requests is not silent
            self._quiet_since = now
        elif now - self._quiet_since > max(self._silence_s, 3 * self.estimates()[2]):
            self._silent(now - self._quiet_since, now)
            self._quiet_since = now


class ChunkedThroughputSampler(ThroughputSampler):
    """Samples a play's link over a real transport, which reports bytes in chunks with a delay.

    The first chunk has no known duration and does not count; later chunks took the time since it, as in packet
    dispersion. If there are none, the wait for the first chunk gives a lower bound of the rate, which can only raise
    the estimate.
    """

    def __init__(self, estimator: Estimator, deadline_s: float, limited: Limited | None = None) -> None:
        super().__init__(estimator, deadline_s, limited)
        self._arrived_s = 0.0
        self._first_chunk = 0
        self._waited_s = 0.0

    def first_byte(self, waited_s: float | None, now: float) -> None:
        if self._since is None:
            self._arrived_s, self._first_chunk, self._waited_s = now, 0, waited_s or 0.0
        super().first_byte(waited_s, now)

    def received(self, nbytes: int, now: float, limit: Limit = "network") -> None:
        if self._since is not None and now <= self._since:
            self._first_chunk += nbytes
            self._quiet_since = now
        else:
            super().received(nbytes, now, limit)
        self._arrived_s = now

    def settle(self, now: float, *, idle: bool) -> None:
        if self._since is None:
            return
        seconds = self._arrived_s - self._since
        if self._bytes and seconds >= self._least_s():
            self._conclude(seconds, now)
            self._since, self._waited_s = self._arrived_s, 0.0
        elif idle:
            self._at_least(self._first_chunk + self._bytes, self._waited_s + seconds, now)
        elif not self._bytes and now - self._since > max(self._silence_s, 3 * self.estimates()[2]):
            self._silent(now - self._since, now)
            self._since = now
        if idle:
            self._since = None

    def _at_least(self, nbytes: int, seconds: float, now: float) -> None:
        if self._waited_s > 0 and seconds > 0 and nbytes >= _PACKET and nbytes / seconds > self.estimates()[0]:
            self._sample(nbytes, seconds, now)


class SourceSamplers:
    """One sampler per source; estimates are for all together."""

    def __init__(
        self, estimators: Sequence[Estimator], deadline_s: float, limited: Limited | None = None, *, chunked: bool
    ) -> None:
        """``chunked``: bytes are reported with a delay."""
        meter = ChunkedThroughputSampler if chunked else ThroughputSampler
        self._each = [meter(estimator, deadline_s, limited) for estimator in estimators]
        self.prior_rate = sum(estimator.prior_rate for estimator in estimators)
        """Rate reported by earlier plays, bytes per second; 0.0 if unknown."""
        self.prior_own = all(estimator.own for estimator in estimators if estimator.prior_rate)

    def __getitem__(self, source: int) -> ThroughputSampler:
        return self._each[source]

    @property
    def growing(self) -> bool:
        """True if sources with most of the rate are growing."""
        growing = [each for each in self._each if each.growing]
        if len(growing) in {0, len(self._each)}:
            return bool(growing)
        return 2 * sum(each.estimates()[0] for each in growing) >= self.estimates()[0]

    def estimates(self) -> tuple[float, float, float]:
        """Return total rate and lower bound, and the earliest first byte."""
        first, *others = (each.estimates() for each in self._each)
        for one in others:
            soonest = min(first[2], one[2]) if first[2] > 0 and one[2] > 0 else first[2] or one[2]
            first = first[0] + one[0], first[1] + one[1], soonest
        return first

    def waited(self, now: float) -> None:
        """See `ThroughputSampler.waited`."""
        for each in self._each:
            each.waited(now)

    def tick(self, now: float, in_flight: InFlight) -> None:
        """See `ThroughputSampler.tick`."""
        for source, each in enumerate(self._each):
            each.tick(now, waiting=source in in_flight.requests_by_source, idle=source not in in_flight.receiving)
