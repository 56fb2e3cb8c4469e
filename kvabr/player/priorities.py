"""The priorities of a play's requests, 0 (most urgent) to 255.

What is required comes first, in the order in which the policy requested the groups: those on the cheapest track, then
those on others, unless the first groups are needed first. Upgrades follow, most loss saved per byte first. Their
priorities are on one scale for all plays, so that plays that share a connection can be served in this order, too: the
same bytes then save the most in all of them together. An upgrade does not go before an older one of its play that is
under way, as of two halves neither is worth anything, unless it saves many times as much per byte.
"""

from __future__ import annotations

import math
from collections.abc import Container

DEARER = 64
"""Priorities from here on are those of missing groups on other tracks than the cheapest."""
LEAST_URGENT = 128
"""Priorities from here on are those of upgrades, which are served after everything that is required."""
_OCTAVE = 3.0
"""Priorities per factor of two in loss saved per byte."""
_OVERTAKES = 24
"""Priorities between two upgrades from which on the later one overtakes the older one."""
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
        self._last = (-1, LEAST_URGENT)
        """The upgrade that was requested last, and its priority."""

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
        before, least = self._last
        priority = upgrade_priority(saved, nbytes)
        if before in in_flight and priority > least - _OVERTAKES:
            priority = max(priority, least)
        self._last = (request, priority)
        return priority
