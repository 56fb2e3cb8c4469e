"""The contract of a bandwidth estimator: samples of bytes and seconds in, a rate and a lower bound out.

A sample is everything that the play received while its link was busy, over all requests in flight. Time to first byte
is estimated separately: otherwise a small group on a long link looks like a slow link (hls.js does the same).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

WINDOW = 14_600
"""Bytes of the first round trip in slow start (RFC 9002, section 7.2)."""
SLOT_SHARE = 1 / 200
"""Samples are merged until they span this fraction of the deadline, so rates are measured at most this often."""
LOW_SHARE = 0.7
"""Lower bound of an uncertain rate, as a fraction of the estimate."""
_MIN_CONFIDENCE = 0.5
"""Minimum confidence at which policies see the rate of earlier plays."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Observations of a path by earlier plays."""

    rate: float
    """Rate in bytes per second."""
    ttfb_s: float
    """Minimum time to first byte, in seconds; 0.0 if unknown."""
    weight: float = 1.0
    """Confidence, from 0 (none) to 1 (measured just now)."""


class Estimator(ABC):
    """Estimates the rate of one network path, in bytes per second."""

    name: ClassVar[str]
    prior_rate = 0.0
    """Rate observed by earlier plays, bytes per second; 0.0 if unknown."""
    own = False
    """True if this client has observed it; False if only a server has."""

    def __init__(self) -> None:
        self._first_byte: float | None = None
        self._expected_byte = 0.0
        self._received_s = -math.inf

    def start(self, horizon_s: float) -> None:  # noqa: B027  # an optional hook
        """Start a play of ``horizon_s`` seconds; memory need not be much longer. Called again to forget slow start."""

    def prime(self, prior: Prior) -> None:
        """Set the observations of earlier plays before a play starts. Estimators may ignore them."""
        self._expected_byte = prior.ttfb_s
        if prior.rate > 0 and prior.weight >= _MIN_CONFIDENCE:
            self.prior_rate, self.own = prior.rate, prior.weight > _MIN_CONFIDENCE

    def sound(self, nbytes: float, seconds: float, now: float) -> bool:
        """Return True if a sample is plausible; implausible ones result from clock jumps or bugs in the caller."""
        sound = 1e-9 < seconds < math.inf and 0.0 <= nbytes < math.inf and self._received_s <= now < math.inf
        if sound:
            self._received_s = now
        return sound

    @abstractmethod
    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Record that ``nbytes`` (possibly 0) arrived within ``seconds`` of a busy link, ending at ``now``."""

    def waited(self, now: float) -> None:  # noqa: B027  # an optional hook
        """Handle that no data arrived until ``now`` because other plays used the link."""

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

        It is the minimum of the play so far, or else that of earlier plays. Any time beyond the minimum is queueing in
        the play's own transfers, so a mean would increase itself.
        """
        return self._expected_byte if self._first_byte is None else self._first_byte


class MergedSamples(Estimator):
    """Merges samples until they span a fraction of the deadline."""

    def __init__(self, share: float = 0.0) -> None:
        """``share``: minimum length of a merged sample, as a fraction of the deadline; 0: no merging."""
        super().__init__()
        self._share = share
        self.start(4.0)

    def start(self, horizon_s: float) -> None:
        """Forget all samples, and scale all times to the play."""
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
    """Exponentially weighted mean, corrected for the bias of a short average towards zero."""

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


_DRIFT = 0.5
"""Shortfall of a sample that is ignored, in deviations."""
_CHANGE_THRESHOLD = 12.0
"""Sum of shortfalls, beyond the drift, that signals a change."""
_MIN_DEVIATION = 0.25
"""Minimum deviation of a sample's logarithm, since no link is steadier."""
_PRIOR_SHARE = 1 / 16
"""Weight of the rate of earlier plays: that of samples over this fraction of the deadline."""
_MAX_SLOW_START_SHARE = 0.5
"""Maximum time in which slow start may reach the rate of earlier plays, as a fraction of the deadline; if it takes
longer, that rate is ignored."""
_MIN_BURST_FACTOR = 1.5
"""Minimum size of a burst that restarts the estimate, as a multiple of the expected bytes."""
_MIN_LOG = -3.0
"""Logarithm assigned to a sample of 0 bytes."""


class Tracking(MergedSamples):
    """The smaller of a fast and a slow mean, restarted after drops; its bound is a fixed share of that.

    The rate is the smaller of a fast and a slow moving mean (as in Shaka and dash.js). Changes are detected by a
    cumulative sum (Page, 1954) of how far samples fall below the expectation, in units of their own deviation. Past a
    threshold, earlier samples are forgotten.

    A burst with more bytes than expected since the last sample, including idle time, shows that the link is faster, and
    the estimate restarts there. A rate of earlier plays (`prime`) counts as a stretch of samples; the first sample,
    perhaps in slow start, may raise the estimate but not lower it.
    """

    name: ClassVar[str] = "tracking"

    def __init__(self, fast_share: float = 1 / 16, slow_share: float = 1 / 4) -> None:
        """Set the half-lives of the means, as fractions of the deadline."""
        self._shares = (fast_share, slow_share)
        self._prior: Prior | None = None
        self.changes = 0
        """Number of drops detected."""
        super().__init__(SLOT_SHARE)

    def _forget(self) -> None:
        horizon_s = self._horizon_s
        fast_s, self._slow_s = (share * horizon_s for share in self._shares)
        self._fast, self._slow = DecayingMean(fast_s), DecayingMean(self._slow_s)
        self._usual, self._square = 0.0, _MIN_DEVIATION**2
        """Mean and mean square of a sample's logarithm relative to the mean rate."""
        self._sum = self._since_bytes = self._since_s = 0.0
        self._taken_s: float | None = None
        self._prior_only = False
        """True if the rate of earlier plays is known and no sample has arrived."""
        if (prior := self._prior) is not None:
            rounds = math.log2(max(1.0, prior.rate * prior.ttfb_s / WINDOW))
            self._prior_only = rounds * prior.ttfb_s <= _MAX_SLOW_START_SHARE * horizon_s
            if self._prior_only:
                self._restart(prior.rate, _PRIOR_SHARE * prior.weight * horizon_s)

    def prime(self, prior: Prior) -> None:
        super().prime(prior)
        if prior.rate > 0 < prior.weight:
            self._prior = prior

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        """Accumulate; finish the merged sample once it is long enough, or at an unexpected burst."""
        super().sample(nbytes, seconds, now)
        if not self._seconds or self._taken_s is None:
            if nbytes > 0:  # a burst after silence must make up for it
                self._taken_s = now
            return
        # Slow start delivers a window at once, but only one per round trip.
        passed_s = max(self._span_s, self.ttfb(), now - self._taken_s)
        if self._slow.weight and self._bytes >= _MIN_BURST_FACTOR * self._slow.value() * passed_s:
            self._restart(self._bytes / passed_s, passed_s)
            self._bytes = self._seconds = 0.0
            self._taken_s = now

    def rate(self) -> float:
        """Return the smaller mean; before the first merged sample, the rate so far."""
        return min(self._fast.value(), self._slow.value()) if self._slow.weight else self._so_far()

    def lower_bound(self) -> float:
        """Return a fixed share of the rate; recorded links carry more in nearly every part of a play."""
        return LOW_SHARE * self.rate()

    def _restart(self, rate: float, seconds: float) -> None:
        self._fast.restart(rate, seconds)
        self._slow.restart(rate, seconds)

    def _add(self, nbytes: float, seconds: float) -> None:
        rate = nbytes / seconds
        if self._prior_only:
            self._prior_only = False
            if rate < self._slow.value():
                return
        if self._slow.weight:
            self._watch(rate, seconds)
        self._fast.add(rate, seconds)
        self._slow.add(rate, seconds)

    def _watch(self, rate: float, seconds: float) -> None:
        expected = self._slow.value()
        ratio = rate / expected if expected > 0 else 1.0
        off = max(_MIN_LOG, math.log(ratio)) if ratio > 0 else _MIN_LOG
        slots = seconds / self._span_s
        deviation = max(_MIN_DEVIATION, math.sqrt(max(0.0, self._square - self._usual**2)))
        self._sum = max(0.0, self._sum + slots * ((self._usual - off) / deviation - _DRIFT))
        keep = 0.5 ** (seconds / self._slow_s)
        self._usual = keep * self._usual + (1 - keep) * off
        self._square = keep * self._square + (1 - keep) * off * off
        if not self._sum:
            self._since_bytes = self._since_s = 0.0
            return
        self._since_bytes += rate * seconds
        self._since_s += seconds
        if self._sum >= _CHANGE_THRESHOLD:
            self.changes += 1
            self._restart(self._since_bytes / self._since_s, self._since_s)
            self._sum = self._since_bytes = self._since_s = 0.0


BUILTIN = {cls.name: cls for cls in (HarmonicMean, Tracking)}
"""Estimators by name; `kvabr_lab.estimators` has others for comparison."""
