"""How much of what moq-rs was given it has not sent yet: it does not say, but its counters tell something."""

from __future__ import annotations

import time
from typing import Any

_PAYLOAD = 0.96
"""Share of payload in what a connection sends, at least."""
_COUNTED_S = 0.1
"""So often moq-rs brings its counters up to date (measured with 0.5.1)."""
_STALL_S = 5 * _COUNTED_S
_AHEAD_S = 4 * _COUNTED_S
"""Seconds of what a connection sends that it is given ahead."""
_QUIET_BYTES = 1 << 16
"""Next to nothing."""
_LEAST_AHEAD = 4 << 20
"""What it is given ahead before it is known how fast it is."""
_BELIEVED_BYTES = 1 << 20
"""What seems to be left of a connection that stands still, and is less, is taken to be a slip of counting."""


class Unsent:
    """How many bytes of payload a connection was given and has not sent yet, as near as can be known.

    moq-rs brings its counters up to date ten times a second. So nothing is made of a shorter silence, and what may be
    handed over ahead is what the connection has lately sent in a few such turns.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._written = 0
        self._base = self._sent = self._looked = 0
        self._moved_s = time.monotonic()
        self._stalls = 0
        self._round_trip_s = 0.0
        self._rate = 0.0

    def add(self, count: int) -> None:
        """It was given more."""
        if self._written == 0:
            self._base = self._sent = self._now_sent()
            self._moved_s = time.monotonic()
        self._written += count

    def bytes(self) -> int:
        """How many are left now."""
        if self._written == 0:
            return 0
        sent, now = self._now_sent(), time.monotonic()
        if sent != self._sent:
            rate = (sent - self._sent) / max(_COUNTED_S / 2, now - self._moved_s)
            self._rate = max(rate, 0.7 * self._rate)
            self._sent, self._moved_s, self._stalls = sent, now, 0
        elif now - self._moved_s > max(_STALL_S, 3 * self._round_trip_s) * 2**self._stalls:
            # Nothing moves: what seems to be left was cancelled, or never counted right. Or the path is dead, or this
            # machine was busy; so half of it is believed to be there still, and the next wait is longer.
            self._stalls = min(self._stalls + 1, 16)
            self._moved_s = now
            left = self._written - int(_PAYLOAD * (sent - self._base))
            self._written -= left if left < _BELIEVED_BYTES else left // 2
        left = self._written - int(_PAYLOAD * (sent - self._base))
        if left <= 0:
            self._written = 0
        return max(0, left)

    def ahead(self, most: int) -> int:
        """How many bytes it may be given ahead of what it has sent, ``most`` at the most."""
        return min(most, max(_LEAST_AHEAD, int(_AHEAD_S * self._rate)))

    @property
    def rate(self) -> float:
        """Bytes per second that the connection has lately sent; 0.0 while that is not known."""
        return self._rate

    def quiet(self) -> bool:
        """Whether next to nothing was sent since this was asked before."""
        before, self._looked = self._looked, self._now_sent()
        return self._looked - before < _QUIET_BYTES

    def _now_sent(self) -> int:
        stats = self._session.stats()
        self._round_trip_s = (stats.rtt_us or 0) / 1e6
        return (stats.bytes_sent or 0) - (stats.bytes_lost or 0)
