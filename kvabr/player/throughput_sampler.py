"""Throughput samples for the estimator: the bytes of all requests over the time that the link was busy.

A sample that the publisher or this process limited may raise the estimate, never lower it. Silence always counts, since
nothing arrives that could say what is at fault.
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

_SHORTEST_SHARE = 1 / 400
"""Least length of a sample, as a share of the deadline; shorter ones are merged."""
_LONGEST_SHARE = 1 / 12
"""Most length of a sample during slow start, as a share of the deadline."""
_SILENCE_SHARE = 1 / 25
"""A link is silent if requests have waited for this share of the deadline and three times the time to first byte."""
_PACKET = 1200
"""Least size of a chunk that says anything about a rate, bytes."""
_RAMP = 1.25
"""A sample this many times faster than the one before still belongs to slow start."""
_ALIKE = 0.9
"""Share of the first sample's rate from which the second may be of the same window: the first is of a moment."""
_RAMP_BYTES = 0.5
"""Share of the bytes of the sample before that a sample must have to say something about slow start: windows grow."""


class Limited(Protocol):
    """Callback for samples that the network did not limit."""

    def __call__(self, by: Limit, rate: float, now: float, *, fed: bool) -> None:
        """Take a sample of ``rate`` bytes per second; ``fed`` says whether the estimator got it."""


class ThroughputSampler:
    """Samples the link of one play whose bytes are reported as they flow, as in the simulator."""

    def __init__(self, estimator: Estimator, deadline_s: float, limited: Limited | None = None) -> None:
        self._estimator = estimator
        self._limited = limited
        self._deadline_s = deadline_s
        self._known: tuple[float, float, float] | None = None
        """Cached estimates, until the estimator gets a sample: they are read far more often than they change."""
        self._begin()
        self._told: float | None = None
        """Rate that earlier plays told, or 0.0: slow start up to there is nothing new."""
        self._ramp_rate: float | None = 0.0
        """Rate of the last sample during slow start, while each is clearly faster than the one before; then None."""
        self._ramp_bytes = 0
        """Bytes of that sample."""
        self._brief = False
        """Whether it is the first sample, which is so short that the next one may be of the same window."""
        self._shortest_s = _SHORTEST_SHARE * deadline_s
        self._silence_s = _SILENCE_SHARE * deadline_s
        self._since: float | None = None
        """When the current sample began; None while nothing arrives."""
        self._bytes = 0
        self._held: dict[Limit, int] = {}
        """Bytes of the current sample that the network did not limit, by what did."""
        self._quiet_since = 0.0

    @property
    def growing(self) -> bool:
        """Whether the last sample was clearly faster than the one before, as in slow start, and than earlier plays."""
        return (self._ramp_rate or 0.0) > (self._told or 0.0)

    def estimates(self) -> tuple[float, float, float]:
        """Return the rate and its lower bound, bytes per second, and the time to first byte, seconds."""
        if self._known is not None:
            return self._known
        estimator = self._estimator
        with self._asking():
            rate, lower, ttfb = estimator.rate(), estimator.lower_bound(), estimator.ttfb()
        if not all(isinstance(value, int | float) and 0.0 <= value < math.inf for value in (rate, lower, ttfb)):
            what = f"estimates rate {rate!r}, lower bound {lower!r}, first byte {ttfb!r}; finite numbers from 0"
            raise self._fault(what)
        self._known = rate, min(rate, lower), ttfb
        return self._known

    def _begin(self) -> None:
        with self._asking():
            self._estimator.start(self._deadline_s)

    def _sample(self, nbytes: int, seconds: float, now: float) -> None:
        if self._told is None:
            self._told = self.estimates()[0]
        with self._asking():
            self._estimator.sample(nbytes, seconds, now)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Forget the estimates; say which estimator has raised."""
        self._known = None
        try:
            yield
        except Exception as error:
            raise self._fault(f"raised {error!r}", error) from error

    def _fault(self, what: str, error: Exception | None = None) -> PolicyError:
        cls = type(self._estimator)
        return PolicyError(f"estimator {getattr(cls, 'name', cls.__name__)} {what} ({where(cls, error)})")

    def first_byte(self, waited_s: float | None, now: float) -> None:
        """Note that a request got its first byte after ``waited_s`` seconds; None: it came unasked."""
        if waited_s is not None:
            with self._asking():
                self._estimator.first_byte(waited_s)
        if self._since is None:
            self._since = now
            self._bytes = 0
            self._held.clear()

    def received(self, nbytes: int, now: float, limit: Limit = "network") -> None:
        """Count bytes that arrived; ``limit`` says what limited them."""
        if limit == "kept":
            return
        self._bytes += nbytes
        if limit != "network":
            self._held[limit] = self._held.get(limit, 0) + nbytes
        self._quiet_since = now

    def settle(self, now: float, *, idle: bool) -> None:
        """Note that a transfer ended. If none is left that receives bytes (``idle``), the sample ends too."""
        if self._since is None:
            return
        seconds = now - self._since
        if seconds >= self._least_s() or (idle and self._bytes and seconds > 0):
            self._conclude(seconds, now)
            self._since = now
        if idle:
            self._since = None

    def _least_s(self) -> float:
        """Return the least length of a sample: the first is wanted soon, later ones must show the end of slow start."""
        if not self._ramp_rate:
            return self._shortest_s
        # A first byte that came late, as after an outage, says nothing about slow start.
        return max(self._shortest_s, min(self.estimates()[2], _LONGEST_SHARE * self._deadline_s))

    def _conclude(self, seconds: float, now: float) -> None:
        """Pass the sample to the estimator and start a new one."""
        if self._says_something(self._bytes / seconds, now):
            if not self._bytes:  # what was on its way does not come: see `_silent`
                self._ramp_rate = None if self._ramp_rate else self._ramp_rate
            elif self._ramp_rate is not None and self._bytes >= _RAMP_BYTES * self._ramp_bytes:
                self._forget_slow_start(self._bytes / seconds, seconds)
            self._sample(self._bytes, seconds, now)
        self._bytes = 0
        self._held.clear()

    def _says_something(self, rate: float, now: float) -> bool:
        """Return whether a sample measures the link: not if most of it was limited by something else and it is slow."""
        if 2 * sum(self._held.values()) <= self._bytes:
            return True
        fed = rate > self.estimates()[0]
        if self._limited is not None:
            self._limited(max(self._held, key=lambda limit: self._held[limit]), rate, now, fed=fed)
        return fed

    def _forget_slow_start(self, rate: float, seconds: float) -> None:
        """Restart the estimator during slow start: while the window doubles, only the last sample measures the link."""
        if self._ramp_rate is None:
            return
        if rate > _RAMP * self._ramp_rate:
            self._brief = not self._ramp_rate and seconds < self.estimates()[2]
            self._ramp_rate, self._ramp_bytes = rate, self._bytes
            self._begin()
        else:
            self._ramp_rate = self._ramp_rate if self._brief and rate >= _ALIKE * self._ramp_rate else None
            self._brief = False

    def _silent(self, seconds: float, now: float) -> None:
        """Note that nothing came: a link that is faster afterwards recovers, and will not go on growing."""
        self._ramp_rate = None if self._ramp_rate else self._ramp_rate
        self._sample(0, seconds, now)

    def revived(self) -> None:
        """Forget what the link has brought so far: it was dead, and may be another now."""
        self._ramp_rate = None
        self._begin()

    def waited(self, now: float) -> None:
        """Skip the time until now: other plays used the link."""
        with self._asking():
            self._estimator.waited(now)
        if self._since is not None:
            if self._bytes and now > self._since:
                self._conclude(now - self._since, now)
            self._since = now
        self._quiet_since = now

    def tick(self, now: float, *, waiting: bool, idle: bool) -> None:
        """Let time pass. A link on which every request waits for much longer than a round trip has a rate of zero."""
        if not idle:
            self.settle(now, idle=False)
        elif not waiting:  # a link of which nothing is asked is not silent
            self._quiet_since = now
        elif now - self._quiet_since > max(self._silence_s, 3 * self.estimates()[2]):
            self._silent(now - self._quiet_since, now)
            self._quiet_since = now


class ChunkedThroughputSampler(ThroughputSampler):
    """Samples the link of a play over a real transport, which reports bytes in chunks some time after they came.

    The time that the first chunk took is unknown, so it does not count; later chunks took the time since it, as in
    packet dispersion. If nothing follows the first chunk, the time that it was waited for gives a lower bound of the
    rate, which may raise the estimate but never lower it.
    """

    def __init__(self, estimator: Estimator, deadline_s: float, limited: Limited | None = None) -> None:
        super().__init__(estimator, deadline_s, limited)
        self._arrived_s = 0.0
        self._first_chunk = 0
        self._waited_s = 0.0
        """Seconds that the first chunk was waited for; 0.0 once a sample has followed it."""

    def first_byte(self, waited_s: float | None, now: float) -> None:
        """See `ThroughputSampler.first_byte`."""
        if self._since is None:
            self._arrived_s, self._first_chunk, self._waited_s = now, 0, waited_s or 0.0
        super().first_byte(waited_s, now)

    def received(self, nbytes: int, now: float, limit: Limit = "network") -> None:
        """Count a chunk that arrived; ``limit`` says what limited it."""
        if self._since is not None and now <= self._since:
            self._first_chunk += nbytes
            self._quiet_since = now
        else:
            super().received(nbytes, now, limit)
        self._arrived_s = now

    def settle(self, now: float, *, idle: bool) -> None:
        """See `ThroughputSampler.settle`."""
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
    """A sampler for each source of a play. What they estimate is what all sources together should bring."""

    def __init__(
        self, estimators: Sequence[Estimator], deadline_s: float, limited: Limited | None = None, *, chunked: bool
    ) -> None:
        """Begin with an estimator of each source; ``chunked``: bytes are reported some time after they came."""
        meter = ChunkedThroughputSampler if chunked else ThroughputSampler
        self._each = [meter(estimator, deadline_s, limited) for estimator in estimators]
        self.told_rate = sum(estimator.told for estimator in estimators)
        """Rate that earlier plays told, bytes per second; 0.0: none."""

    def __getitem__(self, source: int) -> ThroughputSampler:
        return self._each[source]

    @property
    def growing(self) -> bool:
        """See `ThroughputSampler.growing`; of those that bring most."""
        growing = [each for each in self._each if each.growing]
        if len(growing) in {0, len(self._each)}:
            return bool(growing)
        return 2 * sum(each.estimates()[0] for each in growing) >= self.estimates()[0]

    def estimates(self) -> tuple[float, float, float]:
        """Return the rate of all sources, its lower bound, and the soonest first byte; see `ThroughputSampler`."""
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
            each.tick(now, waiting=source in in_flight.asked, idle=source not in in_flight.receiving)
