"""The requests of a play: how urgent each is, which to cancel, and which tracks are still worth requesting.

Priorities go from 0 (most urgent) to 255. What is required comes first, in the order in which the policy requested the
groups: those on the cheapest track, then those on others, unless the first groups are needed first. Upgrades follow,
most loss saved per byte first. Their priorities are on one scale for all plays, so that plays that share a connection
can be served in this order, too: the same bytes then save the most in all of them together. An upgrade does not go
before an older one of its play that is under way, as of two halves neither is worth anything, unless it saves many
times as much per byte.

Those are cancelled that will be late while a cheaper one would not, those that a collapsed link brings too slowly to be
worth it, and those that have stalled.

Abandoning follows dash.js and hls.js, applied to a deadline, and weighs the whole play. If everything in flight plus
every missing group at its cheapest cannot arrive in time at the expected rate, cancel the transfer whose replacement by
the cheapest track frees the most bytes, provided that the play can then meet the deadline if all such transfers are
replaced, or end sooner if it is late already. Layers that were requested together with a base delay the others like the
base. Other upgrades normally delay nothing. One is weighed only if its first byte came when a required transfer was
due, as not every peer respects priorities. Once nothing but upgrades is in flight, one that cannot end in time is
cancelled if a smaller one of the same group can: until then the group could have nothing else.

Stalls occur on real networks only. A publisher serves the more urgent request first, or the earlier one, or all alike.
So a transfer has been forgotten if a less urgent, later one overtook it and it stays silent. If nothing moves at all,
requesting again costs little but proves nothing, unless the repeated transfer starts and stalls too.
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

DEARER = 64
"""Priorities from here on are those of missing groups on other tracks than the cheapest."""
LEAST_URGENT = 128
"""Priorities from here on are those of upgrades, which are served after everything that is required."""
_OCTAVE = 3.0
"""Priorities per factor of two in loss saved per byte."""
_OVERTAKES, _OVERTAKES_HELD = 24, 9
"""Priorities between two upgrades from which on the later one overtakes the older one; and between it and one that
waits behind that, which would wait for ever if all that is a little better overtook both."""
_MOST_WORTH = 2.0**-12
"""Loss saved per byte that has the most urgent priority, nats per generated token; the least urgent is 1e-17."""


def upgrade_priority(saved: float, nbytes: int) -> int:
    """Return the priority of an upgrade that saves ``saved`` nats per generated token and takes ``nbytes`` bytes."""
    if saved <= 0:
        return 255
    octaves = math.log2(_MOST_WORTH * max(1, nbytes) / saved)
    return LEAST_URGENT + int(min(max(_OCTAVE * octaves, 0.0), 255.0 - LEAST_URGENT))


class RequestPriorities:
    """Gives the requests of one play their priorities."""

    def __init__(self, groups: int) -> None:
        """Begin without requests."""
        self._groups = groups
        self._places: dict[int, int] = {}
        """Request order of each group that was required."""
        self._last = (-1, LEAST_URGENT, LEAST_URGENT)
        """The upgrade that was requested last, its priority, and the one that it is worth."""

    def required(self, group: int, *, dearer: bool) -> int:
        """Return the priority of a group that is missing; it stays the same if the group is requested again.

        ``dearer``: it is requested on another track than the cheapest, which other groups need not wait for.
        """
        # The policy knows which groups the engine needs first.
        place = self._places.setdefault(group, len(self._places)) * DEARER // self._groups
        return DEARER + place if dearer else place

    def upgrade(self, request: int, saved: float, nbytes: int, in_flight: Container[int]) -> int:
        """Return the priority of an upgrade; see `upgrade_priority`.

        Args:
            request: its number.
            saved: what it saves, nats per generated token.
            nbytes: its bytes, with those of the layers below it that are requested together with it.
            in_flight: numbers of the requests in flight.
        """
        before, least, worth = self._last
        own = priority = upgrade_priority(saved, nbytes)
        if before in in_flight and (own > least - _OVERTAKES or own > worth - _OVERTAKES_HELD):
            priority = max(own, least)
        self._last = (request, priority, own)
        return priority


# -------------------------------------------------------------- which to cancel

_ON_ITS_WAY = 2.0
"""A request should have its first byte after this multiple of the usual time to first byte."""
_MARGIN = 1.05
"""The rest must need this multiple of the time left before a transfer is abandoned: estimates fluctuate."""
_ONCE_BEGUN = 0.7
"""The same for further transfers at the same moment: what was expected of the link was wrong, and may be still."""
_COLLAPSED, _COLLAPSED_SHARE, _MUCH_SMALLER = 0.3, 0.3, 4.0
"""A link has collapsed at this share of its best rate, if what is needed takes that share of the time left; a track is
much smaller by this factor."""
_SAVED = 0.2
"""Upgrades are replaced if that saves this share of what they cost, and a round trip at least."""

LEAST_SILENCE_S = 0.2
"""A shorter silence proves nothing, seconds: machines are busy with something else for that long now and then."""
_OVERTAKEN_TTFB = 3.0
_SILENT_TTFB = 4.0
"""A stalled transfer has been silent for at least this multiple of the usual time to first byte."""


def choose_late(
    view: View, instead: Callable[[int], Track | None], *, begun: bool = False
) -> tuple[Transfer, str] | None:
    """Return the transfer to abandon now and the reason, or None.

    Args:
        view: the play.
        instead: returns the cheapest track left for a group.
        begun: another transfer was abandoned at this moment.
    """
    if view.rate <= 0 or not view.in_flight:
        return None
    cheapest, needed = view.ladder.tracks[0], view.in_flight.required
    if not view.missing and not needed:
        return None  # see `hopeless`
    limit_s, decode_s = (_ONCE_BEGUN if begun else _MARGIN) * view.time_left, view.last_decode_s(cheapest.name)
    if (view.outstanding_bytes + view.floor_bytes()) / view.rate + decode_s <= limit_s:
        return None  # as most often, without a look at every transfer
    due_s = view.now if not needed else next(iter(needed.values())).requested_s
    due_s += _ON_ITS_WAY * view.ttfb_s
    weighed = [
        one
        for one in view.in_flight.values()
        if one.priority < LEAST_URGENT or (one.first_byte_s is not None and one.first_byte_s >= due_s)
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
    # One by one they would never seem worth it where many are too large: what matters is how far all of them help.
    after_s = need_s - freed / view.rate + view.ttfb_s
    if best is None or after_s >= need_s:
        return None
    if after_s > view.time_left and view.time_left > 0 and after_s > 0.9 * need_s:
        return None  # it would neither meet the deadline nor end much sooner
    what = "an upgrade in the way" if best.upgrade else f"{other.name} instead"
    return best, f"the rest takes {need_s:.2f} s of {view.time_left:.2f} s left; {what} frees {best_freed / 1e3:.0f} kB"


def choose_collapsed(
    view: View, best_rate: float, instead: Callable[[int], Track | None], here: Callable[[int], str | None]
) -> list[tuple[Transfer, str]]:
    """Return the transfers to ask for on a smaller track, and that, since the link has collapsed.

    What it was at its best is no measure of what it will be. Of missing groups, those that have not begun cost next to
    nothing on the cheapest track, and may be improved once they are in place. Once none is missing, upgrades that have
    not begun are replaced by those that are worth most at the rate that is left, if that pays for a round trip.

    Args:
        view: the play.
        best_rate: the best rate so far, bytes per second.
        instead: returns the cheapest track left for a group.
        here: returns the track on which a group has arrived or is in place.
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
    """Return the upgrades in flight to replace by smaller ones at what time costs now; or none."""
    tracks, found, saved, total = view.catalog.by_name, list[tuple[Transfer, str]](), 0.0, 0.0

    def cost(group: int, track: str, current: str, nbytes: int) -> float:
        seconds = max(nbytes / view.lower_bound, view.decode_s(track) * view.catalog.share(group) / view.decoders)
        late = seconds > view.time_left
        return view.loss(group, current if late else track) + view.time_price * seconds

    for one in view.in_flight.upgrades.values() if view.lower_bound > 0 else ():
        group, current = one.group, here(one.group)
        if one.first_byte_s is not None or one.local or tracks[one.track].refines or current not in tracks:
            continue
        kept = least = cost(group, one.track, current, one.bytes)
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
        total, saved = total + kept, saved + kept - least
        if best != one.track:
            found.append((one, best))
    return found if saved > max(_SAVED * total, view.time_price * view.ttfb_s) else []


def choose_hopeless(view: View, here: Callable[[int], str | None]) -> tuple[Transfer, str] | None:
    """Return an upgrade that cannot end in time although a smaller one of its group can, and the reason; or None.

    Args:
        view: the play.
        here: returns the track on which a group has arrived or is in place.
    """
    if view.rate <= 0 or not view.arrived:
        return None
    seen: set[int] = set()
    ahead = 0
    for one in sorted(view.in_flight.upgrades.values(), key=lambda one: (one.priority, one.request)):
        ends_s = (ahead + one.remaining) / view.rate + view.last_decode_s(one.track)
        # Of several layers of a group the lowest counts: the others cannot be in place without it.
        if one.group not in seen and ends_s > _MARGIN * view.time_left:
            smaller = _smaller(view, one, here(one.group), ahead)
            if smaller is not None:
                what = f"{one.track} takes {ends_s:.2f} s of {view.time_left:.2f} s left"
                return one, f"{what}; {smaller} would be in time"
        seen.add(one.group)
        ahead += one.remaining
    return None


def _smaller(view: View, one: Transfer, current: str | None, ahead: int) -> str | None:
    """Return a better track than the current one that would surely be in time instead of an upgrade, or None."""
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
    """Finds the stalled transfers of one play."""

    def __init__(self, patience_s: float) -> None:
        """Set the seconds without bytes after which a transfer has stalled; half of that if another overtakes it."""
        self._patience_s = patience_s
        self._heard: dict[int, float] = {}
        self._overtaken: dict[int, float] = {}
        """When each transfer was overtaken. Before that it may have been waiting for its turn."""
        self._leading: dict[tuple[int, int], list[int]] = {}
        """Heap of the requests that none has overtaken, by source and priority. It may hold some that are over."""
        self._stood: set[tuple[int, str]] = set()
        """Groups and tracks that have stalled before."""
        self._any_s: dict[int, float] = {}
        """When any bytes of a source came last."""
        self._known_s: float | None = None
        """Since when the usual time to first byte is known: what waits for a first byte may stall from then on."""
        self._sources: set[int] = set()
        """Those that were asked for anything."""

    def asked(self, transfer: Transfer) -> None:
        """Note a new request."""
        self._sources.add(transfer.source)
        heappush(self._leading.setdefault((transfer.source, transfer.priority), []), transfer.request)

    def heard(self, transfer: Transfer, now: float) -> None:
        """Note that bytes of a transfer came: it has overtaken the earlier ones of its source that are more urgent."""
        self._any_s[transfer.source] = self._heard[transfer.request] = now
        self._known_s = now if self._known_s is None else self._known_s
        if self._overtaken.pop(transfer.request, None) is not None:
            self.asked(transfer)
        for (source, priority), requests in self._leading.items():
            behind = source == transfer.source and priority < transfer.priority
            while behind and requests and requests[0] < transfer.request:
                self._overtaken[heappop(requests)] = now

    def waited(self, transfers: Iterable[Transfer], now: float) -> None:
        """Restart all clocks: until now, other plays used the link."""
        self._any_s = dict.fromkeys(self._any_s, now)
        self._known_s = None if self._known_s is None else now
        for transfer in transfers:
            if transfer.request in self._heard:
                self._heard[transfer.request] = now
            if self._overtaken.pop(transfer.request, None) is not None:
                self.asked(transfer)

    def stalled(
        self, transfers: Mapping[int, Transfer], ttfb_s: float, now: float, *, drain_s: float = 0.0
    ) -> list[tuple[Transfer, bool]]:
        """Return the stalled transfers, each with whether the publisher is certainly at fault.

        Args:
            transfers: those in flight, by request.
            ttfb_s: the usual time to first byte, seconds.
            now: the time of the play, seconds.
            drain_s: seconds that everything in flight takes at the present rate. As long as something moves on a slow
                link, a transfer that was overtaken may wait that long for its turn.
        """
        found: list[tuple[Transfer, bool]] = []
        if self._known_s is None:
            return found
        nothing_s = {source: now - self._any_s.get(source, self._known_s) for source in self._sources}
        longest_s = max(self._patience_s, _SILENT_TTFB * ttfb_s, LEAST_SILENCE_S)
        silent = {source for source, seconds in nothing_s.items() if seconds >= longest_s}
        if len(silent) == len(nothing_s):
            looked_at: Iterable[Transfer] = transfers.values()
        else:  # of a source that is not silent, only what was overtaken can have stalled
            self._overtaken = {request: at for request, at in self._overtaken.items() if request in transfers}
            looked_at = [transfers[request] for request in sorted(self._overtaken)]
            if silent:
                looked_at = [
                    one for one in transfers.values() if one.source in silent or one.request in self._overtaken
                ]
        for transfer in looked_at:
            turn_s = max(LEAST_SILENCE_S, drain_s if nothing_s[transfer.source] < LEAST_SILENCE_S else 0.0)
            quiet_s = now - self._heard.get(transfer.request, transfer.requested_s)
            if (since := self._overtaken.get(transfer.request)) is not None:
                if min(quiet_s, now - since) >= max(self._patience_s / 2, _OVERTAKEN_TTFB * ttfb_s, turn_s):
                    found.append((transfer, True))
            elif quiet_s >= longest_s:
                again = (transfer.group, transfer.track) in self._stood
                found.append((transfer, again and transfer.request in self._heard))
        self._stood.update((transfer.group, transfer.track) for transfer, _ in found)
        return found


# ------------------------------------------------------------ which have failed

_TRACKS = 2
"""Tracks on which a group may fail before its upgrades end."""


class RetryTracker:
    """The failures of one play.

    No group is requested more than ``attempts`` times in vain on the same track. Its upgrades end once that happened on
    two tracks: one damaged track must not rule out the others, nor may a hostile origin have every track fetched.
    """

    def __init__(self, ladder: Ladder, attempts: int) -> None:
        self._ladder, self._attempts = ladder, attempts
        self._failures: Counter[tuple[int, str]] = Counter()
        self._of_group: Counter[int] = Counter()
        """Failures of each group on all tracks together."""
        self._dropped: Counter[tuple[int, str]] = Counter()
        self._faults: dict[str, str] = {}
        self._abandoned: set[int] = set()
        self.unavailable: set[tuple[int, str]] = set()
        """See `View.unavailable`."""

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last faults of a transfer and of the engine, for a play that is given up."""
        return tuple(self._faults.values())

    def failed(self, group: int, track: str, reason: str, *, upgrade: bool, counts: bool = True) -> None:
        """Note that a request failed; ``upgrade``: the group is in place on another track.

        ``counts``: it counts as an attempt.
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
        """Note that a track of a group exists now that did not before."""
        if self._failures[group, track] < self._attempts:
            self.unavailable.discard((group, track))

    def engine_failed(self, reason: str) -> None:
        """Note that the engine failed."""
        self._faults["engine"] = f"the engine failed: {reason}"

    def abandoned(self, group: int) -> None:
        """Note that a required transfer was abandoned because it would have been late."""
        self._abandoned.add(group)

    def dropped(self, group: int, track: str) -> None:
        """Note that an upgrade was cancelled because it could not end in time."""
        self._dropped[group, track] += 1
        if self._dropped[group, track] >= self._attempts:  # the policy insists
            self.unavailable.add((group, track))

    def cheapest_left(self, group: int) -> Track | None:
        """Return the cheapest track on which a group has not failed too often; None if there is none."""
        return next((track for track in self._ladder.tracks if (group, track.name) not in self.unavailable), None)

    def usable(self, group: int, track: str, *, engine: bool) -> str | None:
        """Return the track on which to request a missing group: ``track`` if possible, else the cheapest one left.

        None if none is left, or if there is an engine and the group has failed ``attempts`` times on all tracks
        together: then the engine gets it, and no more time is lost.
        """
        if group in self._abandoned:
            track = self._ladder.cheapest  # the same request would only be abandoned again
        if engine and self._of_group[group] >= self._attempts:
            return None
        if (group, track) not in self.unavailable:
            return track
        left = self.cheapest_left(group)
        return None if left is None else left.name
