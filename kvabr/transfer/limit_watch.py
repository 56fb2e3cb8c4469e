"""Finds the limit of a connection: the network, this processor, or the publisher.

Only samples limited by the network describe the link, so estimators need this:

- Own CPU: the transport's threads were busy nearly all the time while bytes arrived.
- Publisher: a request is open and no bytes arrive, yet the peer answers a PING. The publisher also limits the bytes
  that end its silence.
- Network: everything else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvabr.types.events import Limit

_WINDOW_S = 0.05
"""Seconds over which CPU time is measured."""
_MIN_BUSY_SHARE = 0.9
"""Share of such a window that the thread must be busy for the CPU to be the limit."""
_MIN_SILENCE_S = 0.1


class LimitWatch:
    """Finds the limit of one connection."""

    def __init__(self, probe: Callable[[], None], round_trip: Callable[[], float | None]) -> None:
        self.limit: Limit = "network"
        self._probe, self._round_trip = probe, round_trip
        self._loop = asyncio.get_running_loop()
        self._wall, self._cpu = time.monotonic(), time.thread_time()
        self._timer: asyncio.TimerHandle | None = None
        self._in_flight = 0
        self._bytes = self._bytes_at_probe = 0
        self._probing = False
        self._silent = False
        """Whether no byte has arrived since the publisher was found silent."""
        self._closed = False

    def asked(self, in_flight: int) -> None:
        """Set the number of downloads in flight."""
        self._in_flight = in_flight
        if in_flight and self._timer is None and not self._closed:
            self._arm()
        if not in_flight and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def received(self, count: int) -> None:
        """Count payload bytes that have arrived."""
        self._bytes += count
        now = time.monotonic()
        if self._silent:  # bytes that end a publisher's silence are late because of it, and so are the next ones
            self._silent = False
            self._wall, self._cpu = now, time.thread_time()
        elif now - self._wall >= _WINDOW_S:
            cpu = time.thread_time()
            self.limit = "cpu" if cpu - self._cpu > _MIN_BUSY_SHARE * (now - self._wall) else "network"
            self._wall, self._cpu = now, cpu

    def worked(self, cpu_s: float) -> None:
        """Add processor time of other threads for this connection, seconds: the loop waited for it."""
        self._cpu -= cpu_s

    def alive(self) -> None:
        """Note that the peer has acknowledged a PING."""
        if self._probing and self._bytes == self._bytes_at_probe and self._in_flight:
            self.limit, self._silent = "publisher", True
        self._probing = False

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self.asked(0)

    def _arm(self) -> None:
        silence = max(_MIN_SILENCE_S, 2 * (self._round_trip() or 0.0))
        self._timer = self._loop.call_later(silence, self._look, self._bytes)

    def _look(self, before: int) -> None:
        self._timer = None
        if self._closed or not self._in_flight:
            return
        if self._bytes == before and not self._probing:
            self._probing, self._bytes_at_probe = True, self._bytes
            self._probe()
        self._arm()
