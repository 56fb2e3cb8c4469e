"""Abandoning a transfer that will not make it when a cheaper one still can (as dash.js and hls.js do, on a deadline).

The whole play is weighed, not one transfer: if what is in flight plus every missing group at its cheapest cannot arrive
in time at the expected rate, the transfer goes whose replacement by the cheapest track frees most bytes, provided that
the play can then still make it, or that it is late already and comes in sooner.

An upgrade is asked for at a lower priority than all that is needed, so it is in nobody's way: unless its first byte
came although something that is needed should have been on its way by then. Not every peer keeps to priorities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvabr.abr.view import Transfer, View
from kvabr.types.catalog import Track

_ON_ITS_WAY = 2.0
"""Times the usual time to a first byte after which a request should be on its way."""
_MARGIN = 1.05
"""How much of the time left the rest must exceed before a transfer is given up: estimates waver."""

LEAST_SILENCE_S = 0.2
"""Machines are busy with something else for that long now and then; it proves nothing."""
_OVERTAKEN_TTFB = 3.0
_SILENT_TTFB = 4.0
"""Times the usual wait for a first byte that a transfer must have been silent, beside its share of the deadline."""


def choose(view: View, instead: Callable[[int], Track | None]) -> tuple[Transfer, str] | None:
    """The transfer to give up now and the reason, or None.

    Args:
        view: the play.
        instead: the cheapest track on which a group can still be had; None if there is none.
    """
    if view.rate <= 0 or not view.in_flight:
        return None
    cheapest = view.ladder.tracks[0]
    needed = [transfer for transfer in view.in_flight.values() if not transfer.upgrade]
    if not view.missing and not needed:
        return None  # only upgrades fly: they cost nothing but bytes, and the deadline cuts them off
    begun_s = min((transfer.requested_s for transfer in needed), default=view.now) + _ON_ITS_WAY * view.ttfb_s
    weighed = [one for one in view.in_flight.values() if not one.upgrade or _overtook(one, begun_s)]
    need_s = (sum(one.remaining for one in weighed) + view.floor_bytes()) / view.rate + cheapest.decode_s
    if need_s <= _MARGIN * view.time_left:
        return None
    best: Transfer | None = None
    best_freed = 0.0
    other = cheapest
    for transfer in weighed:
        found = instead(transfer.group)
        if found is None and not transfer.upgrade:
            continue
        replacement = 0 if transfer.upgrade or found is None else found.bytes[transfer.group]
        freed = transfer.remaining - replacement - view.ttfb_s * view.rate
        if freed > best_freed:
            best, best_freed, other = transfer, freed, found or cheapest
    if best is None:
        return None
    after_s = need_s - best_freed / view.rate
    if after_s > view.time_left and view.time_left > 0 and after_s > 0.9 * need_s:
        return None  # it would neither make the deadline nor come much sooner
    what = "an upgrade in the way" if best.upgrade else f"{other.name} instead"
    return best, f"the rest takes {need_s:.2f} s of {view.time_left:.2f} s left; {what} frees {best_freed / 1e3:.0f} kB"


def _overtook(upgrade: Transfer, begun_s: float) -> bool:
    return upgrade.first_byte_s is not None and upgrade.first_byte_s >= begun_s


class StallDetector:
    """Watches the transfers of one play."""

    def __init__(self, patience_s: float) -> None:
        """Start watching.

        Args:
            patience_s: seconds that a transfer may stand still; half of it, if another overtakes it.
        """
        self._patience_s = patience_s
        self._heard: dict[int, float] = {}
        self._overtaken: dict[int, float] = {}
        """Since when each was: what it was silent before, it may have waited for its turn."""
        self._stood: set[tuple[int, str]] = set()
        """Groups and tracks that have stood still before."""
        self._any_s: float | None = None
        """When bytes came last; None: never yet, and then nobody knows how long a first byte takes here."""

    def heard(self, transfer: Transfer, others: Iterable[Transfer], now: float) -> None:
        """Bytes of a transfer came, while ``others`` were under way as well."""
        self._any_s = self._heard[transfer.request] = now
        self._overtaken.pop(transfer.request, None)
        for other in others:
            if other.request < transfer.request and other.priority < transfer.priority:
                self._overtaken.setdefault(other.request, now)

    def waited(self, transfers: Iterable[Transfer], now: float) -> None:
        """Until now, other plays had the link: none of these stands still."""
        if self._any_s is not None:
            self._any_s = now
        for transfer in transfers:
            if transfer.request in self._heard:
                self._heard[transfer.request] = now
            self._overtaken.pop(transfer.request, None)

    def stalled(self, transfers: Iterable[Transfer], ttfb_s: float, now: float) -> list[tuple[Transfer, bool]]:
        """Those that stand still, and of each whether that is its publisher's fault for sure."""
        found: list[tuple[Transfer, bool]] = []
        if self._any_s is None:
            return found
        nothing_s = now - self._any_s
        for transfer in transfers:
            quiet_s = now - self._heard.get(transfer.request, transfer.requested_s)
            if (since := self._overtaken.get(transfer.request)) is not None:
                if min(quiet_s, now - since) >= max(self._patience_s / 2, _OVERTAKEN_TTFB * ttfb_s, LEAST_SILENCE_S):
                    found.append((transfer, True))
            elif min(quiet_s, nothing_s) >= max(self._patience_s, _SILENT_TTFB * ttfb_s, LEAST_SILENCE_S):
                again = (transfer.group, transfer.track) in self._stood
                found.append((transfer, again and transfer.request in self._heard))
        self._stood.update((transfer.group, transfer.track) for transfer, _ in found)
        return found
