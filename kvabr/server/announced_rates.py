"""Rates of recent transfers to a block of client addresses, announced to new clients in the answers with catalogs.

A client's first play then has a prior for its link, as CMSD gives one to video players. A rate is measured only while a
connection has more to send than its transport accepts, so a player's pauses do not count. All rates are in bounded
memory, and expire after a day. A relay measures the paths to its own clients, not the path to its origin.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

from cachetools import LRUCache

from kvabr.server.addresses import block_of, site_of
from kvabr.types.naming import MAX_RATE_KBPS

_MAX_BLOCKS, _MAX_SITES = 4096, 16
"""Maximum blocks, and sites (`kvabr.server.addresses`) per block; the least recently connected are dropped."""
_MAX_AGE_S = 86_400.0
_MIN_BYTES, _MIN_ROUNDS = 64 << 10, 2.0
"""Minimum bytes and round trips of a measurement, since acknowledgements arrive in bursts."""
_GROWN = 2.0
"""A measurement above this multiple of the old rate replaces it, as in slow start; others are averaged with it."""


class SiteRate:
    """The rate of the path to one site."""

    def __init__(self) -> None:
        self.rate, self.at_s = 0.0, -math.inf
        """Rate in bytes per second, 0.0 if unknown; and time of its measurement."""
        self._limited: set[object] = set()
        self._now_s = self._busy_s = 0.0
        self._bytes = 0

    def note(self, connection: object, delivered: int, round_s: float, now_s: float, *, limited: bool) -> None:
        """Record the bytes that a peer has acknowledged since the last call.

        ``limited``: the connection has more to send than its transport accepts.
        """
        if self._limited:
            self._bytes += delivered
            self._busy_s += now_s - self._now_s
        self._now_s = now_s
        (self._limited.add if limited else self._limited.discard)(connection)
        if self._bytes >= _MIN_BYTES and self._busy_s >= _MIN_ROUNDS * round_s and self._busy_s > 0:
            rate = self._bytes / self._busy_s
            self.rate = rate if rate > _GROWN * self.rate else math.sqrt(rate * self.rate)
            self.at_s, self._bytes, self._busy_s = now_s, 0, 0.0


class AnnouncedRates:
    """The rates of all blocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._blocks: LRUCache[str, LRUCache[str, SiteRate]] = LRUCache(_MAX_BLOCKS)

    def site(self, address: str) -> SiteRate:
        """Return the rate of an address's site, for a new connection."""
        block = self._blocks.setdefault(block_of(address), LRUCache(_MAX_SITES))
        return block.setdefault(site_of(address), SiteRate())

    def of(self, address: str) -> int:
        """Return the rate to announce in kbit/s: the median of the block's sites as a power of two; 0 if unknown."""
        since_s = self.clock() - _MAX_AGE_S
        block: Mapping[str, SiteRate] = self._blocks.get(block_of(address), {})
        known = [site.rate for site in block.values() if site.rate > 0 and site.at_s >= since_s]
        if not known:
            return 0
        kbps = statistics.median(known) * 8 / 1000
        return min(MAX_RATE_KBPS, 1 << max(0, round(math.log2(kbps))))
