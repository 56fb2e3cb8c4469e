"""Transfers that stand still while the link does not: they are asked for again, where the simulator never needs to.

A publisher serves the more urgent request first, or the earlier one, or all alike. So a transfer that is overtaken by
one that is less urgent and was asked for later, and stays silent, has been forgotten. If nothing at all moves there is
no telling whether the link or the publisher stands still; asking again then costs little, but proves nothing, unless
what was asked for again begins to come and then stands still as well: the link was there.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvabr.abr.view import Transfer

LEAST_SILENCE_S = 0.2
"""Machines are busy with something else for that long now and then; it proves nothing."""
_OVERTAKEN_TTFB = 3.0
_SILENT_TTFB = 4.0
"""Times the usual wait for a first byte that a transfer must have been silent, beside its share of the deadline."""


class StallWatch:
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
