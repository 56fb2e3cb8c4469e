"""A meter for bytes that come in lumps: what a real transport hands over at once came over some time before.

The first lump of a sample took an unknown time, so it does not count; those after it took the time since it (as in
packet dispersion). Where nothing follows the first, all that is known is that the link brought it while it was waited
for: that is a bound from below, which may raise the estimate, never lower it.
"""

from __future__ import annotations

from typing import Any

from kvabr.player.throughput_sampler import Meter
from kvabr.types.events import Limit

_PACKET = 1200
"""Fewer bytes than a packet say nothing of a rate."""


class LumpMeter(Meter):
    """Watches the link of a play over a real transport."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._arrived_s = 0.0
        self._first_lump = 0
        self._waited_s = 0.0
        """Seconds that the first lump was waited for; 0.0 once a sample has followed it."""

    def first_byte(self, waited_s: float, now: float) -> None:
        """A request got its first byte after so many seconds."""
        if self._since is None:
            self._arrived_s, self._first_lump, self._waited_s = now, 0, waited_s
        super().first_byte(waited_s, now)

    def received(self, nbytes: int, now: float, limit: Limit = "network") -> None:
        """A lump arrived; ``limit`` says who held it up."""
        if self._since is not None and now <= self._since:
            self._first_lump += nbytes
            self._quiet_since = now
        else:
            super().received(nbytes, now, limit)
        self._arrived_s = now

    def settle(self, now: float, *, idle: bool) -> None:
        """A transfer ended, or time passes."""
        if self._since is None:
            return
        seconds = self._arrived_s - self._since
        if self._bytes and seconds >= self._least_s():
            self._conclude(seconds, now)
            self._since, self._waited_s = self._arrived_s, 0.0
        elif idle:
            self._at_least(self._first_lump + self._bytes, self._waited_s + seconds, now)
        elif not self._bytes and now - self._since > max(self._silence_s, 3 * self._estimator.ttfb()):
            self._sample(0, now - self._since, now)
            self._since = now
        if idle:
            self._since = None

    def _at_least(self, nbytes: int, seconds: float, now: float) -> None:
        if self._waited_s > 0 and nbytes >= _PACKET and nbytes / seconds > self.estimates()[0]:
            self._sample(nbytes, seconds, now)
