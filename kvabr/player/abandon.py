"""Which transfers to cancel: those that will be late while a cheaper one would not, and those that have stalled.

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

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

from kvabr.abr.view import Transfer, View
from kvabr.player.priorities import LEAST_URGENT
from kvabr.types.catalog import Track

_ON_ITS_WAY = 2.0
"""A request should have its first byte after this multiple of the usual time to first byte."""
_MARGIN = 1.05
"""The rest must need this multiple of the time left before a transfer is abandoned: estimates fluctuate."""
_ONCE_BEGUN = 0.7
"""The same for further transfers at the same moment: what was expected of the link was wrong, and may be still."""

LEAST_SILENCE_S = 0.2
"""A shorter silence proves nothing, seconds: machines are busy with something else for that long now and then."""
_OVERTAKEN_TTFB = 3.0
_SILENT_TTFB = 4.0
"""A stalled transfer has been silent for at least this multiple of the usual time to first byte."""


def choose(view: View, instead: Callable[[int], Track | None], *, begun: bool = False) -> tuple[Transfer, str] | None:
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


def hopeless(view: View, here: Callable[[int], str | None]) -> tuple[Transfer, str] | None:
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
