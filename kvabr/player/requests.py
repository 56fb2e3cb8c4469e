"""The requests of a play: their priorities, which to cancel, and which tracks are still available.

Priorities range from 0 (most urgent) to 255. Required groups are first, in order of request: those on the cheapest
track, then others, unless the engine needs the first groups first. Upgrades follow, by loss saved per byte, on one
scale for all plays of a connection. An upgrade overtakes one in flight only if it saves many times as much per byte,
because two halves are worthless.

Abandoning follows dash.js and hls.js, applied to a deadline and the whole play. If everything in flight, plus every
missing group on its cheapest track, cannot arrive in time, the transfer is cancelled that frees the most bytes when
replaced by the cheapest track, if replacing all such transfers meets the deadline or ends a late play sooner. Layers
requested with a base count as part of it. Other upgrades count only if their first byte arrived when a required
transfer was due, since not every peer respects priorities. Once only upgrades are in flight, one that cannot arrive in
time is cancelled if a smaller one can.

A publisher may serve requests by priority, by age, or all alike. So a transfer counts as stalled only if a less urgent,
later one overtook it and it stays silent. If no transfer moves, stalled transfers are repeated, and only those that
stall again prove a fault of the publisher.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from heapq import heappop, heappush

from kvabr.abr.ladder import Ladder
from kvabr.abr.view import Transfer, View
from kvabr.types.catalog import Track

# ------------------------------------------------------------------- how urgent

DEARER_PRIORITY = 64
"""First priority of missing groups on tracks other than the cheapest."""
UPGRADE_PRIORITY = 128
"""First priority of upgrades, after all required groups."""
_OCTAVE = 3.0
"""Number of priorities per factor of two in loss saved per byte."""
_OVERTAKES, _OVERTAKES_HELD = 24, 9
"""Priority difference for overtaking an older upgrade, and for overtaking one that itself waits for an older upgrade,
so that slightly better upgrades do not starve them."""
_MAX_WORTH = 2.0**-12
"""Nats per generated token saved per byte at the most urgent priority of upgrades; at the least urgent, 1e-17."""


def upgrade_priority(saved: float, nbytes: int) -> int:
    """Return the priority of an upgrade that saves ``saved`` nats per generated token for ``nbytes`` bytes."""
    if saved <= 0:
        return 255
    octaves = math.log2(_MAX_WORTH * max(1, nbytes) / saved)
    return UPGRADE_PRIORITY + int(min(max(_OCTAVE * octaves, 0.0), 255.0 - UPGRADE_PRIORITY))


class RequestPriorities:
    """Assigns priorities to the requests of one play."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._places: dict[int, int] = {}
        self._last = (-1, UPGRADE_PRIORITY, UPGRADE_PRIORITY)
        """Last requested upgrade, its priority, and the priority that its own savings give."""

    def required(self, group: int, *, dearer: bool) -> int:
        """Return the priority of a missing group, the same for all of its requests.

        ``dearer``: the track is not the cheapest, so other groups on the cheapest track go first.
        """
        # If an engine needs the first groups first, the policy requests them first.
        place = self._places.setdefault(group, len(self._places)) * DEARER_PRIORITY // self._groups
        return DEARER_PRIORITY + place if dearer else place

    def upgrade(self, request: int, saved: float, nbytes: int, in_flight: Container[int]) -> int:
        """Return the priority of an upgrade; see `upgrade_priority`.

        ``nbytes`` includes lower layers of the same upgrade; ``in_flight``: numbers of the requests in flight.
        """
        before, least, worth = self._last
        own = priority = upgrade_priority(saved, nbytes)
        if before in in_flight and (own > least - _OVERTAKES or own > worth - _OVERTAKES_HELD):
            priority = max(own, least)
        self._last = (request, priority, own)
        return priority


# -------------------------------------------------------------- which to cancel

_OVERDUE_FACTOR = 2.0
"""Multiple of the usual time to first byte after which a first byte is overdue."""
_MARGIN = 1.05
"""Multiple of the time left that the rest must exceed before a transfer is abandoned, since estimates fluctuate."""
_NEXT_OVERDUE_FACTOR = 0.7
"""The same for further transfers abandoned at the same time, since the rate may be overestimated."""
_COLLAPSED, _COLLAPSED_SHARE, _MUCH_SMALLER = 0.3, 0.3, 4.0
"""A link has collapsed if its rate is below the first fraction of its best, and required bytes need more than the
second fraction of the time left. Last: size ratio to a much smaller track."""
_MIN_REPLACED_SAVING = 0.2
"""Minimum savings by replacing upgrades, as a fraction of their cost."""

MIN_SILENCE_S = 0.2
"""Minimum seconds of silence for a fault: machines are often busy for less."""
_OVERTAKEN_TTFB = 3.0
_SILENT_TTFB = 4.0
"""Minimum silence of a stall, as a multiple of the usual time to first byte."""


def choose_late(
    view: View, instead: Callable[[int], Track | None], *, begun: bool = False
) -> tuple[Transfer, str] | None:
    """Return the transfer to abandon now and the reason, or None.

    ``instead`` returns a group's cheapest available track; ``begun``: another transfer was just abandoned.
    """
    if view.rate <= 0 or not view.in_flight:
        return None
    cheapest, needed = view.ladder.tracks[0], view.in_flight.required
    if not view.missing and not needed:
        return None  # see `choose_hopeless`
    limit_s, decode_s = (_NEXT_OVERDUE_FACTOR if begun else _MARGIN) * view.time_left, view.last_decode_s(cheapest.name)
    if (view.outstanding_bytes + view.floor_bytes()) / view.rate + decode_s <= limit_s:
        return None  # the usual case, without inspecting all transfers
    due_s = view.now if not needed else next(iter(needed.values())).requested_s
    due_s += _OVERDUE_FACTOR * view.ttfb_s
    weighed = [
        one
        for one in view.in_flight.values()
        if one.priority < UPGRADE_PRIORITY or (one.first_byte_s is not None and one.first_byte_s >= due_s)
    ]
    need_s = (sum(one.remaining for one in weighed) + view.floor_bytes()) / view.rate + decode_s
    if need_s <= limit_s:
        return None
    best: Transfer | None = None
    best_freed, freed, other = 0, 0, cheapest
    for transfer in weighed:
        found = instead(transfer.group)
        if found is None and not transfer.upgrade:
            continue
        more = transfer.remaining - (0 if transfer.upgrade or found is None else found.bytes[transfer.group])
        freed += max(0, more)
        if more > best_freed:
            best, best_freed, other = transfer, more, found or cheapest
    # Replacing only one of many large transfers never seems to pay, so count all of them.
    after_s = need_s - freed / view.rate + view.ttfb_s
    if best is None or after_s >= need_s:
        return None
    if after_s > view.time_left and view.time_left > 0 and after_s > 0.9 * need_s:
        return None  # too late for the deadline, and hardly earlier
    what = "dropping an upgrade" if best.upgrade else f"switching to {other.name}"
    return (
        best,
        f"the rest takes {need_s:.2f} s, with {view.time_left:.2f} s left; {what} frees {best_freed / 1e3:.0f} kB",
    )


def choose_collapsed(
    view: View, best_rate: float, instead: Callable[[int], Track | None], here: Callable[[int], str | None]
) -> list[tuple[Transfer, str]]:
    """Return the transfers to replace after the link has collapsed, each with its smaller track.

    The best rate may never return. Missing groups without a first byte are replaced by the cheapest track, which costs
    little and can be upgraded later. Once no group is missing, upgrades without a first byte are replaced by the best
    ones for the current rate, if that saves more than a round trip costs. ``instead`` returns a group's cheapest
    available track, ``here`` its track, received or in place; ``best_rate`` in bytes per second.
    """
    needed = view.in_flight.required_bytes
    if not 0 < view.rate < _COLLAPSED * best_rate:
        return []
    if view.arrived:
        return _smaller_upgrades(view, here)
    if needed <= _COLLAPSED_SHARE * view.time_left * view.rate:
        return []
    found = []
    for one in view.in_flight.required.values():
        track = instead(one.group) if one.first_byte_s is None else None
        if track is not None and one.remaining >= _MUCH_SMALLER * track.bytes[one.group]:
            found.append((one, track.name))
    return found


def _smaller_upgrades(view: View, here: Callable[[int], str | None]) -> list[tuple[Transfer, str]]:
    tracks, found, saved, total = view.catalog.by_name, list[tuple[Transfer, str]](), 0.0, 0.0

    def cost(group: int, track: str, current: str, nbytes: int) -> float:
        seconds = max(nbytes / view.lower_bound, view.decode_s(track) * view.catalog.share(group) / view.decoders)
        late = seconds > view.time_left
        return view.loss(group, current if late else track) + view.time_price * seconds

    for one in view.in_flight.upgrades.values() if view.lower_bound > 0 else ():
        group, current = one.group, here(one.group)
        if one.first_byte_s is not None or one.local or tracks[one.track].refines or current not in tracks:
            continue
        present = least = cost(group, one.track, current, one.bytes)
        best = one.track
        for name in tracks:
            layers = view.layers(name, current)
            nbytes = sum(view.bytes(group, layer) for layer in layers)
            if not 0 < nbytes < one.bytes or any((group, layer) in view.unavailable for layer in layers):
                continue
            if view.loss(group, name) >= view.loss(group, current):
                continue
            if (other := cost(group, name, current, nbytes)) < least:
                least, best = other, name
        total, saved = total + present, saved + present - least
        if best != one.track:
            found.append((one, best))
    return found if saved > max(_MIN_REPLACED_SAVING * total, view.time_price * view.ttfb_s) else []


def choose_hopeless(view: View, here: Callable[[int], str | None]) -> tuple[Transfer, str] | None:
    """Return an upgrade that cannot arrive in time although a smaller one of its group can, and the reason; or None.

    ``here`` returns a group's track, received or in place.
    """
    if view.rate <= 0 or not view.arrived:
        return None
    seen: set[int] = set()
    ahead = 0
    for one in sorted(view.in_flight.upgrades.values(), key=lambda one: (one.priority, one.request)):
        ends_s = (ahead + one.remaining) / view.rate + view.last_decode_s(one.track)
        # Count from a group's lowest layer, which the others need.
        if one.group not in seen and ends_s > _MARGIN * view.time_left:
            smaller = _smaller(view, one, here(one.group), ahead)
            if smaller is not None:
                what = f"{one.track} takes {ends_s:.2f} s, with {view.time_left:.2f} s left"
                return one, f"{what}; {smaller} would be in time"
        seen.add(one.group)
        ahead += one.remaining
    return None


def _smaller(view: View, one: Transfer, current: str | None, ahead: int) -> str | None:
    """Return a better track than ``current`` that will arrive in time in place of ``one``, or None."""
    group, tracks = one.group, view.catalog.by_name
    if current not in tracks or view.lower_bound <= 0:
        return None
    for track in view.catalog.tracks:
        layers = view.layers(track.name, current)
        nbytes = sum(view.bytes(group, layer) for layer in layers)
        if track.loss[group] >= view.loss(group, current) or nbytes >= one.remaining:
            continue
        comes_s = view.ttfb_s + (ahead + nbytes) / view.lower_bound + view.last_decode_s(track.name)
        if comes_s < view.time_left and not any((group, layer) in view.unavailable for layer in layers):
            return track.name
    return None


class StallDetector:
    """Detects the stalled transfers of one play."""

    def __init__(self, patience_s: float) -> None:
        """``patience_s``: seconds of silence of a stalled transfer; half as many if it was overtaken."""
        self._patience_s = patience_s
        self._received_s: dict[int, float] = {}
        self._overtaken: dict[int, float] = {}
        """When each transfer was overtaken; silence before that may have been queueing."""
        self._leading: dict[tuple[int, int], list[int]] = {}
        """Heaps of requests that were not overtaken, by source and priority; completed requests may remain."""
        self._stood: set[tuple[int, str]] = set()
        self._any_s: dict[int, float] = {}
        self._known_s: float | None = None
        """When the time to first byte became known. From then on, a missing first byte can be a stall."""
        self._sources: set[int] = set()

    def requested(self, transfer: Transfer) -> None:
        """Record a new request."""
        self._sources.add(transfer.source)
        heappush(self._leading.setdefault((transfer.source, transfer.priority), []), transfer.request)

    def received(self, transfer: Transfer, now: float) -> None:
        """Record received bytes: the transfer overtakes earlier, more urgent ones of its source."""
        self._any_s[transfer.source] = self._received_s[transfer.request] = now
        self._known_s = now if self._known_s is None else self._known_s
        if self._overtaken.pop(transfer.request, None) is not None:
            self.requested(transfer)
        for (source, priority), requests in self._leading.items():
            behind = source == transfer.source and priority < transfer.priority
            while behind and requests and requests[0] < transfer.request:
                self._overtaken[heappop(requests)] = now

    def waited(self, transfers: Iterable[Transfer], now: float) -> None:
        """Restart all clocks, since other plays used the link."""
        self._any_s = dict.fromkeys(self._any_s, now)
        self._known_s = None if self._known_s is None else now
        for transfer in transfers:
            if transfer.request in self._received_s:
                self._received_s[transfer.request] = now
            if self._overtaken.pop(transfer.request, None) is not None:
                self.requested(transfer)

    def stalled(
        self, transfers: Mapping[int, Transfer], ttfb_s: float, now: float, *, drain_s: float = 0.0
    ) -> list[tuple[Transfer, bool]]:
        """Return the stalled transfers, each with True if the publisher is certainly at fault.

        Args:
            transfers: those in flight, by request.
            ttfb_s: the usual time to first byte, seconds.
            now: the time of the play, seconds.
            drain_s: seconds to receive everything in flight at the current rate; on a slow link, overtaken transfers
                may have to wait that long.
        """
        found: list[tuple[Transfer, bool]] = []
        if self._known_s is None:
            return found
        nothing_s = {source: now - self._any_s.get(source, self._known_s) for source in self._sources}
        longest_s = max(self._patience_s, _SILENT_TTFB * ttfb_s, MIN_SILENCE_S)
        silent = {source for source, seconds in nothing_s.items() if seconds >= longest_s}
        if len(silent) == len(nothing_s):
            looked_at: Iterable[Transfer] = transfers.values()
        else:  # at an active source only overtaken transfers can have stalled
            self._overtaken = {request: at for request, at in self._overtaken.items() if request in transfers}
            looked_at = [transfers[request] for request in sorted(self._overtaken)]
            if silent:
                looked_at = [
                    one for one in transfers.values() if one.source in silent or one.request in self._overtaken
                ]
        for transfer in looked_at:
            busy_s = max(MIN_SILENCE_S, drain_s if nothing_s[transfer.source] < MIN_SILENCE_S else 0.0)
            quiet_s = now - self._received_s.get(transfer.request, transfer.requested_s)
            if (since := self._overtaken.get(transfer.request)) is not None:
                if min(quiet_s, now - since) >= max(self._patience_s / 2, _OVERTAKEN_TTFB * ttfb_s, busy_s):
                    found.append((transfer, True))
            elif quiet_s >= longest_s:
                again = (transfer.group, transfer.track) in self._stood
                found.append((transfer, again and transfer.request in self._received_s))
        self._stood.update((transfer.group, transfer.track) for transfer, _ in found)
        return found


# ------------------------------------------------------------ which have failed

_TRACKS = 2


class RetryTracker:
    """The failures of one play.

    A group is requested at most ``attempts`` times on a track that fails. After failing on two tracks, it is no longer
    upgraded: one damaged track must not exclude others, and a hostile origin must not cause every track to be fetched.
    """

    def __init__(self, ladder: Ladder, attempts: int) -> None:
        self._ladder, self._attempts = ladder, attempts
        self._failures: Counter[tuple[int, str]] = Counter()
        self._of_group: Counter[int] = Counter()
        self._dropped: Counter[tuple[int, str]] = Counter()
        self._faults: dict[str, str] = {}
        self._abandoned: set[int] = set()
        self.unavailable: set[tuple[int, str]] = set()

    @property
    def last_faults(self) -> tuple[str, ...]:
        """Messages of the last faults of a transfer and of the engine."""
        return tuple(self._faults.values())

    def failed(self, group: int, track: str, reason: str, *, upgrade: bool, counts: bool = True) -> None:
        """Record a failed request.

        ``upgrade``: the group is in place on another track; ``counts``: True if it counts as an attempt.
        """
        self._failures[group, track] += counts
        self._of_group[group] += counts
        if self._failures[group, track] >= self._attempts:
            self.unavailable.add((group, track))
            every = [(group, one.name) for one in self._ladder.catalog.tracks]
            if upgrade and sum(one in self.unavailable for one in every) >= _TRACKS:
                self.unavailable.update(every)
        self._faults["transfer"] = f"last fault: {reason}"

    def added(self, group: int, track: str) -> None:
        """Record that a track of an existing group is now available."""
        if self._failures[group, track] < self._attempts:
            self.unavailable.discard((group, track))

    def engine_failed(self, reason: str) -> None:
        """Record a failure of the engine."""
        self._faults["engine"] = f"the engine failed: {reason}"

    def abandoned(self, group: int) -> None:
        """Record that a required transfer was abandoned as late."""
        self._abandoned.add(group)

    def dropped(self, group: int, track: str) -> None:
        """Record that an upgrade was cancelled as late."""
        self._dropped[group, track] += 1
        if self._dropped[group, track] >= self._attempts:  # the policy keeps requesting it
            self.unavailable.add((group, track))

    def cheapest_left(self, group: int) -> Track | None:
        """Return the cheapest available track of a group, or None."""
        return next((track for track in self._ladder.tracks if (group, track.name) not in self.unavailable), None)

    def usable(self, group: int, track: str, *, engine: bool) -> str | None:
        """Return the track to request for a missing group: ``track`` if possible, else the cheapest available one.

        Returns None if no track is left. With an ``engine``, it also returns None after ``attempts`` failures on all
        tracks together, so that the engine computes the group without further delay.
        """
        if group in self._abandoned:
            track = self._ladder.cheapest  # the same request would be abandoned again
        if engine and self._of_group[group] >= self._attempts:
            return None
        if (group, track) not in self.unavailable:
            return track
        left = self.cheapest_left(group)
        return None if left is None else left.name
