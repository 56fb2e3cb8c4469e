"""The sources of a play: chooses one for each request, and moves requests between them.

Groups are named by content, so any source may serve them. Each request goes to the source that should deliver it first,
given its time to first byte, queued bytes and rate. Requests move if another source would be faster than their queue,
or if their source falls silent. Other sources are tried before a refused or lost request counts as an attempt. A source
that sends wrong content is dropped for the play.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from kvabr.abr.view import Transfer, View
from kvabr.player.requests import MIN_SILENCE_S
from kvabr.player.throughput_sampler import SourceSamplers

Offer = Container[str] | None
"""A source's tracks of an asset; None: all."""


class _NotKnown:
    def __contains__(self, track: object, /) -> bool:
        return False


NOT_KNOWN: Container[str] = _NotKnown()
"""Offer of a source that has not answered yet."""

_SILENT_TTFB = 4.0
"""Times to first byte that make a silence (at least `MIN_SILENCE_S`)."""
_UNKNOWN_TTFB_S = 0.25
_PROBE_FACTOR = 3.0
"""Multiple of that silence between probes of a source, doubled after each failure."""
_MAX_TRIES = 8
_MIN_SAMPLE_BYTES = 1 << 15
"""Least request size for measuring a source again."""
_MOVE_FACTOR, _MIN_MOVE_S = 1.5, 0.05
"""A request without a first byte moves if its source needs this many times as long and this many seconds longer."""
_MOVE_BEGUN_FACTOR = 3.0
"""Same factor after the first byte, since moving discards received bytes."""


class Sources:
    """The sources of one play, by number."""

    def __init__(
        self,
        samplers: SourceSamplers,
        view: View,
        offers: Sequence[Offer] | None,
        round_trips: Sequence[float | None] = (),
    ) -> None:
        """Start without requests; ``samplers`` estimate each source's rate.

        ``offers``: each source's tracks, which may change; None: there is one source. ``round_trips``: to each source,
        seconds, if known.
        """
        self._samplers, self._view, self._in_flight = samplers, view, view.in_flight
        self._offers: Sequence[Offer] = (None,) if offers is None else offers
        self._round_trips = round_trips or (None,) * len(self._offers)
        self.several = len(self._offers) > 1
        self._refused: set[tuple[int, int, str]] = set()
        self._dropped: set[int] = set()
        self._silent: dict[int, float] = {}
        """When to probe each silent source with one group."""
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
        """Record that a source failed a request, or is ``lost``; return whether another may serve it."""
        if not self.several:
            return False
        if lost:
            self.drop(transfer)
        self._refused.add((transfer.source, transfer.group, transfer.track))
        left = self._having(transfer.track)
        return self._awaited or any((source, transfer.group, transfer.track) not in self._refused for source in left)

    def drop(self, transfer: Transfer) -> bool:
        """Drop a source unless it is the last one; return whether it was dropped."""
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
        """True if requests must wait for a source to answer."""
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
        """Yield the request to repeat at a silent source: one queued elsewhere, or at another silent source."""
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
        """Return a source's last queued requests that others would deliver clearly sooner."""
        found: list[Transfer] = []
        moved = dict.fromkeys(range(len(self._offers)), 0)
        requests = sorted(self._of(source), key=lambda one: (one.first_byte_s is None, one.priority, one.request))
        while requests and (others := self._others(last := requests.pop())):
            begun = last.first_byte_s is not None
            if not begun and source in self._tries:
                break  # this request measures the source's rate
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
        """Return whether a source is unused or recently delivered bytes; otherwise all may be in an outage."""
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

        An unknown rate counts as the lowest.
        """
        rate, _, ttfb_s = self._samplers[source].estimates()
        if rate <= 0:
            others = (self._samplers[each].estimates()[0] for each in range(len(self._offers)))
            rate = min((one for one in others if one > 0), default=1.0)
        left = 0 if alone else self._in_flight.left.get(source, 0)
        return (left + nbytes) / rate + ttfb_s

    def _ttfb_s(self, source: int) -> float:
        """Return a source's time to first byte; if unknown, its round trip or the longest known time."""
        known = [self._samplers[each].estimates()[2] for each in range(len(self._offers))]
        return known[source] or self._round_trips[source] or max(known) or _UNKNOWN_TTFB_S
