"""The sources of a play: measures each, chooses one for each request, and moves requests between them.

Groups are named by content, so any source may serve them. Each request goes to the source that should deliver it first,
given its time to first byte, queued bytes and rate. Requests move if another source would be faster than their queue,
or if their source falls silent. A refused or lost request counts as an attempt only once all sources have failed. A
source that sends wrong content is dropped for the play.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvabr.abr.estimators import Estimator
from kvabr.abr.view import InFlight, Transfer, View
from kvabr.player.requests import MIN_SILENCE_S
from kvabr.types.errors import PolicyError
from kvabr.types.events import Limit
from kvabr.types.plugins import where

_MIN_SHARE = 1 / 400
"""Minimum length of a sample, as a fraction of the deadline; shorter samples are merged."""
_MAX_SHARE = 1 / 12
"""Maximum length of a sample in slow start, as a fraction of the deadline."""
_SILENCE_SHARE = 1 / 25
"""A link is silent after this fraction of the deadline or three times the time to first byte, whichever is longer."""
_PACKET = 1200
"""Minimum bytes of a chunk that says something about the link."""
_RAMP = 1.25
"""Minimum growth factor between samples in slow start."""
_SAME_WINDOW_SHARE = 0.9
"""Fraction of a short first sample's rate from which the second sample may belong to the same window."""
_RAMP_BYTES = 0.5
"""Minimum bytes of a sample in slow start, as a fraction of the previous one's, since windows grow."""


class Limited(Protocol):
    """Callback for samples that something other than the network limited."""

    def __call__(self, by: Limit, rate: float, now: float, *, fed: bool) -> None:
        """Handle a sample of ``rate`` bytes per second; ``fed``: the estimator received it."""


class ThroughputSampler:
    """Samples a link from bytes that are reported as they flow, as in the simulator.

    A sample is the bytes of all requests over the time that the link was busy. A sample limited by the publisher or by
    this process never lowers the estimate. Silence always counts, since its cause is invisible.
    """

    def __init__(self, estimator: Estimator, deadline_s: float, limited: Limited | None = None) -> None:
        self._estimator = estimator
        self._limited = limited
        self._deadline_s = deadline_s
        self._known: tuple[float, float, float] | None = None
        self._begin()
        self._prior_rate: float | None = None
        """Estimated rate before the first sample, or 0.0; reaching it is not growth."""
        self._ramp_rate: float | None = 0.0
        """Rate of the last sample in slow start; None after slow start."""
        self._ramp_bytes = 0
        self._brief = False
        """True if the first sample was short, and may share its window with the next."""
        self._shortest_s = _MIN_SHARE * deadline_s
        self._silence_s = _SILENCE_SHARE * deadline_s
        self._since: float | None = None
        self._bytes = 0
        self._held: dict[Limit, int] = {}
        self._quiet_since = 0.0

    @property
    def growing(self) -> bool:
        """True if the last sample clearly exceeds the previous one, as in slow start, and the rate of earlier plays."""
        return (self._ramp_rate or 0.0) > _RAMP * (self._prior_rate or 0.0)

    def estimates(self) -> tuple[float, float, float]:
        """Return the rate and its lower bound in bytes per second, and the time to first byte in seconds."""
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
        """Count received bytes; ``limit`` names what limited their rate."""
        if limit == "kept":
            return
        self._bytes += nbytes
        if limit != "network":
            self._held[limit] = self._held.get(limit, 0) + nbytes
        self._quiet_since = now

    def settle(self, now: float, *, idle: bool) -> None:
        """Handle the end of a transfer; ``idle``: also of the sample."""
        if self._since is None:
            return
        seconds = now - self._since
        if seconds >= self._least_s() or (idle and self._bytes and seconds > 0):
            self._conclude(seconds, now)
            self._since = now
        if idle:
            self._since = None

    def _least_s(self) -> float:
        """Return the minimum length of a sample: short at first, then long enough to see the end of slow start."""
        if not self._ramp_rate:
            return self._shortest_s
        # A late first byte, as after an outage, is not slow start.
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
        """Return True if a sample measures the link; a slow sample with another limit does not."""
        if 2 * sum(self._held.values()) <= self._bytes:
            return True
        fed = rate > self.estimates()[0]
        if self._limited is not None:
            self._limited(max(self._held, key=lambda limit: self._held[limit]), rate, now, fed=fed)
        return fed

    def _forget_slow_start(self, rate: float, seconds: float) -> None:
        """Restart the estimator in slow start, since only the last sample of a growing window measures the link."""
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
        """Forget all samples, since the link was dead and may have changed."""
        self._ramp_rate = None
        self._begin()

    def waited(self, now: float) -> None:
        """Skip the time until now, since other plays used the link."""
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
    """Samples a link over a real transport, which reports bytes in chunks and late.

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
    """One sampler per source, with estimates for all sources together."""

    def __init__(
        self, estimators: Sequence[Estimator], deadline_s: float, limited: Limited | None = None, *, chunked: bool
    ) -> None:
        """``chunked``: bytes are reported in chunks and late."""
        meter = ChunkedThroughputSampler if chunked else ThroughputSampler
        self._each = [meter(estimator, deadline_s, limited) for estimator in estimators]
        self.prior_rate = sum(estimator.prior_rate for estimator in estimators)
        """Rate of earlier plays in bytes per second; 0.0 if unknown."""
        self.prior_own = all(estimator.own for estimator in estimators if estimator.prior_rate)

    def __getitem__(self, source: int) -> ThroughputSampler:
        return self._each[source]

    @property
    def growing(self) -> bool:
        """True if sources with at least half of the total rate are growing."""
        growing = [each for each in self._each if each.growing]
        if len(growing) in {0, len(self._each)}:
            return bool(growing)
        return 2 * sum(each.estimates()[0] for each in growing) >= self.estimates()[0]

    def estimates(self) -> tuple[float, float, float]:
        """Return the total rate and lower bound, and the shortest time to first byte."""
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


Offer = Container[str] | None
"""Tracks of an asset that a source has; None: all."""


class _NotKnown:
    def __contains__(self, track: object, /) -> bool:
        return False


NOT_KNOWN: Container[str] = _NotKnown()
"""The offer of a source that has not answered yet."""

_SILENT_TTFB = 4.0
"""Multiple of the time to first byte after which a source is silent (but at least `MIN_SILENCE_S`)."""
_UNKNOWN_TTFB_S = 0.25
_PROBE_FACTOR = 3.0
"""Multiple of that time between probes of a silent source, doubled after each failure."""
_MAX_TRIES = 8
_MIN_SAMPLE_BYTES = 1 << 15
"""Minimum size of a request for measuring a source again."""
_MOVE_FACTOR, _MIN_MOVE_S = 1.5, 0.05
"""A request without a first byte moves if its source needs this many times as long, and this many seconds longer."""
_MOVE_BEGUN_FACTOR = 3.0
"""The same factor after the first byte, since moving discards received bytes."""


class Sources:
    """The sources of one play, by index."""

    def __init__(
        self,
        samplers: SourceSamplers,
        view: View,
        offers: Sequence[Offer] | None,
        round_trips: Sequence[float | None] = (),
    ) -> None:
        """Start without requests; ``samplers`` estimate each source's rate.

        ``offers``: tracks of each source, which may change; None: there is one source. ``round_trips``: seconds to each
        source, if known.
        """
        self._samplers, self._view, self._in_flight = samplers, view, view.in_flight
        self._offers: Sequence[Offer] = (None,) if offers is None else offers
        self._round_trips = round_trips or (None,) * len(self._offers)
        self.several = len(self._offers) > 1
        self._refused: set[tuple[int, int, str]] = set()
        self._dropped: set[int] = set()
        self._silent: dict[int, float] = {}
        """When to probe each silent source, with one group."""
        self._tried: int | None = None
        self._tries: dict[int, int] = {}
        self._received_s: dict[int, float] = {}
        """When each source last delivered bytes, or was first used after a pause."""

    def choose(self, group: int, track: str, size: int, now: float) -> int:
        """Return the source for a group of ``size`` bytes."""
        if not self.several:
            return 0
        having = self._having(track)
        tried, self._tried = self._tried, None
        if tried is not None and tried in having:
            self._received_s[tried] = now
            self._tries[tried] = min(_MAX_TRIES, self._tries.get(tried, 0) + 1)
            return tried
        sound = [source for source in having if source not in self._silent]
        fresh = [source for source in sound if (source, group, track) not in self._refused]
        chosen = min(fresh or sound or having or [0], key=lambda source: (self._ends_s(source, size), source))
        idle = [source for source in fresh if source != chosen and self._idle(source, now)]
        if idle and size >= _MIN_SAMPLE_BYTES and self._ends_s(chosen, size) > 2 * self._ttfb_s(idle[0]):
            chosen = idle[0]
            self._tries[chosen] = min(_MAX_TRIES, self._tries.get(chosen, 0) + 1)
        elif chosen not in self._silent:
            self._tries.pop(chosen, None)
        if chosen not in self._in_flight.requests_by_source:
            self._received_s[chosen] = now
        return chosen

    def _idle(self, source: int, now: float) -> bool:
        since_s = self._received_s.get(source, now)
        again_s = self._patience_s(source) * 2 ** self._tries.get(source, 0)
        return source not in self._in_flight.requests_by_source and now - since_s >= again_s

    def received(self, source: int, now: float) -> None:
        """Record that a source delivered bytes."""
        if self.several:
            self._received_s[source] = now
            if self._silent.pop(source, None) is not None:
                self._tries.pop(source, None)
                self._samplers[source].revived()

    def waited(self, now: float) -> None:
        """Restart the clocks after other plays used the links."""
        self._received_s = dict.fromkeys(self._received_s, now)

    def failed(self, transfer: Transfer, *, lost: bool = False) -> bool:
        """Record that a source failed a request, or was ``lost``; return True if another source may serve it."""
        if not self.several:
            return False
        if lost:
            self.drop(transfer)
        self._refused.add((transfer.source, transfer.group, transfer.track))
        left = self._having(transfer.track)
        return self._awaited or any((source, transfer.group, transfer.track) not in self._refused for source in left)

    def drop(self, transfer: Transfer) -> bool:
        """Drop the source of a transfer unless it is the last one; return True if it was dropped."""
        if not self.several or transfer.local:
            return False
        if self._awaited or len(self._having(transfer.track)) > 1:
            self._dropped.add(transfer.source)
        return transfer.source in self._dropped

    @property
    def trying(self) -> bool:
        """True if the next request probes a silent source."""
        return self._tried is not None

    @property
    def waiting_for_first(self) -> bool:
        """True if requests must wait until a source answers."""
        return self._awaited and all(
            source in self._dropped or offer is NOT_KNOWN for source, offer in enumerate(self._offers)
        )

    @property
    def _awaited(self) -> bool:
        return any(offer is NOT_KNOWN for offer in self._offers)

    def misplaced(self, now: float) -> Iterator[tuple[Transfer, str]]:
        """Yield transfers to move, and why; the caller cancels each as it is yielded."""
        if not self.several:
            return
        for source in list(self._in_flight.requests_by_source):
            silent = self._is_silent(source, now)
            if silent and any(self._brings(other, now) for other in range(len(self._offers)) if other != source):
                self._leave_alone(source, now)
            if source in self._dropped or source in self._silent:
                why = "its source was dropped" if source in self._dropped else "its source is silent"
                for transfer in self._of(source):
                    if self._others(transfer) and (silent or source in self._dropped):
                        yield transfer, why
            elif not silent:
                for late in self._late(source):
                    yield late, "another source delivers it sooner"
        yield from self._probes(now)

    def _probes(self, now: float) -> Iterator[tuple[Transfer, str]]:
        """Yield a request to repeat at a silent source: one that is queued elsewhere, or at another silent source."""
        self._tried = None
        for source, again_s in self._silent.items():
            if now < again_s or source in self._in_flight.requests_by_source or self._tried is not None:
                continue
            waiting = [one for one in self._in_flight.values() if self._may_try(source, one, now)]
            if waiting:
                self._tried = source
                self._leave_alone(source, now)
                # The policy might not request a cancelled upgrade again.
                last = max(waiting, key=lambda one: (not one.upgrade, one.priority, one.request))
                yield last, "retrying a silent source"

    def _may_try(self, source: int, one: Transfer, now: float) -> bool:
        if one.local or not self._has(source, one.track) or (source, one.group, one.track) in self._refused:
            return False
        if self._is_silent(one.source, now):
            return True
        tried = one.source in self._silent
        return not tried and one.first_byte_s is None and self._brings(one.source, now)

    def _leave_alone(self, source: int, now: float) -> None:
        self._silent[source] = now + _PROBE_FACTOR * self._patience_s(source) * 2 ** self._tries.get(source, 0)

    def _late(self, source: int) -> list[Transfer]:
        """Return the last requests in a source's queue that others would deliver clearly earlier."""
        found: list[Transfer] = []
        moved = dict.fromkeys(range(len(self._offers)), 0)
        requests = sorted(self._of(source), key=lambda one: (one.first_byte_s is None, one.priority, one.request))
        while requests and (others := self._others(last := requests.pop())):
            begun = last.first_byte_s is not None
            if not begun and source in self._tries:
                break  # keep this request, to measure the source's rate
            own_s = self._ends_s(source, moved[source] if not begun else last.remaining, alone=begun)
            other_s, other = min((self._ends_s(each, moved[each] + last.bytes), each) for each in others)
            if own_s <= (_MOVE_BEGUN_FACTOR if begun else _MOVE_FACTOR) * other_s + _MIN_MOVE_S:
                break
            moved[source] -= last.remaining
            moved[other] += last.bytes
            found.append(last)
        return found

    def _of(self, source: int) -> list[Transfer]:
        return [one for one in self._in_flight.values() if one.source == source and not one.local]

    def _patience_s(self, source: int) -> float:
        return max(MIN_SILENCE_S, _SILENT_TTFB * self._ttfb_s(source))

    def _is_silent(self, source: int, now: float) -> bool:
        return now - self._received_s.get(source, now) >= self._patience_s(source)

    def _brings(self, source: int, now: float) -> bool:
        """Return True if a source is unused, or delivered bytes recently; else there may be an outage of all."""
        waiting = source in self._in_flight.requests_by_source
        return not waiting or now - self._received_s.get(source, now) < MIN_SILENCE_S / 2

    def _others(self, transfer: Transfer) -> list[int]:
        return [
            source
            for source in self._having(transfer.track)
            if source != transfer.source
            and source not in self._silent
            and (source, transfer.group, transfer.track) not in self._refused
        ]

    def _having(self, track: str) -> list[int]:
        return [source for source in range(len(self._offers)) if self._has(source, track)]

    def _has(self, source: int, track: str) -> bool:
        offer = self._offers[source]
        return (offer is None or track in offer) and source not in self._dropped

    def _ends_s(self, source: int, nbytes: int, *, alone: bool = False) -> float:
        """Return the seconds until a source has delivered ``nbytes``, ``alone`` or after its queue.

        An unknown rate is taken as the lowest known one.
        """
        rate, _, ttfb_s = self._samplers[source].estimates()
        if rate <= 0:
            others = (self._samplers[each].estimates()[0] for each in range(len(self._offers)))
            rate = min((one for one in others if one > 0), default=1.0)
        left = 0 if alone else self._in_flight.left.get(source, 0)
        return (left + nbytes) / rate + ttfb_s

    def _ttfb_s(self, source: int) -> float:
        """Return a source's time to first byte in seconds; if unknown, its round trip or the longest of any source."""
        known = [self._samplers[each].estimates()[2] for each in range(len(self._offers))]
        return known[source] or self._round_trips[source] or max(known) or _UNKNOWN_TTFB_S
