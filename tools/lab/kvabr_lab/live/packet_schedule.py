"""One direction of an emulated link: a drop-tail queue before a bottleneck, then a fixed delay. No sockets or clock.

A packet's size on the wire is its UDP payload plus `HEADER_BYTES`, as in recorded traces of link capacity. A randomly
lost packet still uses capacity of the trace, as on a radio link.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

from kvabr.replay.link import Capacity
from kvabr.replay.trace import Trace
from kvabr.types.errors import UsageError

HEADER_BYTES = 28
"""Bytes of UDP and IPv4 headers."""
_MAX_DETOUR_S = 0.02


class PacketSchedule:
    """Determines when the packets of one direction arrive, and which are dropped."""

    def __init__(self, dice: random.Random) -> None:
        """Create a direction without delay, loss or limits; ``dice`` determines losses."""
        self._dice = dice
        self._delay_s = self._loss = self._reorder = self._duplicate = 0.0
        self._limit: float = float("inf")
        self._capacity: Capacity | None = None
        self._began_s = self._free_s = self._last_s = 0.0
        self._queue: deque[tuple[float, int]] = deque()
        self.queued = 0
        self.max_queued = 0
        self.carried = 0
        """Number of packets that passed; `carried_bytes` are their bytes on the wire."""
        self.carried_bytes = 0
        self.overflowed = 0
        self.lost = 0

    def shape(self, *, delay_s: float, loss: float, limit_bytes: float) -> None:
        """Set delay (s), random loss (0 to 1) and the queue's limit (bytes) from the next packet on."""
        self._delay_s, self._loss, self._limit = delay_s, loss, limit_bytes

    def scramble(self, *, reorder: float, duplicate: float) -> None:
        """Set the fractions (0 to 1) of reordered and duplicated packets from the next packet on."""
        self._reorder, self._duplicate = reorder, duplicate

    def strays(self, due: float) -> tuple[float | None, float | None]:
        """Return when a packet scheduled for ``due`` arrives instead if reordered, and when a duplicate arrives."""
        overtaken = second = None
        if self._reorder and self._dice.random() < self._reorder:
            overtaken = due + self._dice.uniform(0.0, _MAX_DETOUR_S)
        if self._duplicate and self._dice.random() < self._duplicate:
            second = due + self._dice.uniform(0.0, _MAX_DETOUR_S)
        return overtaken, second

    def begin(self, capacity: Capacity | None, at_s: float) -> None:
        """Start a bottleneck, or none, with time 0 at ``at_s``; clear the previous play's queue."""
        self._capacity, self._began_s, self._free_s, self._last_s = capacity, at_s, at_s, 0.0
        self._queue.clear()
        self.queued = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        self.max_queued = self.queued
        self.carried = self.carried_bytes = self.overflowed = self.lost = 0

    def admit(self, now: float, payload: int, headers: int = HEADER_BYTES) -> float | None:
        """Return when a packet of ``payload`` bytes arrives, not before earlier packets; None if it is dropped."""
        size = payload + headers
        departs = now
        if self._capacity is not None:
            queue = self._queue
            while queue and queue[0][0] <= now:
                self.queued -= queue.popleft()[1]
            if queue and self.queued + size > self._limit:
                self.overflowed += 1
                return None
            begins = max(now, self._free_s) - self._began_s
            self._free_s = departs = self._began_s + self._capacity.when(begins, size)
            queue.append((departs, size))
            self.queued += size
            self.max_queued = max(self.max_queued, self.queued)
        if self._loss and self._dice.random() < self._loss:
            self.lost += 1
            return None
        self.carried += 1
        self.carried_bytes += size
        self._last_s = max(self._last_s, departs + self._delay_s)
        return self._last_s


PACKET_BYTES = 1228
"""A full packet of QUIC on the wire: 1,200 bytes of UDP payload and the headers of UDP and IPv4."""
_LINE_RATE_SHARE = 0.05
"""Fraction of time in which a link exceeds its line rate; see `line_rate`."""
MIN_QUEUE_BYTES = 64 * PACKET_BYTES
"""Minimum default queue in bytes: it must hold several bursts of a pacer, 16 packets each."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Delay, loss and buffer of a link."""

    rtt_s: float = 0.0
    """Round trip time of an empty link in seconds; half of it in each direction."""
    loss: float = 0.0
    """Fraction of packets to the player that are lost at random."""
    loss_up: float = 0.0
    """Fraction of packets to the origin that are lost at random."""
    queue_bytes: int | None = None
    """Queue limit at the bottleneck in bytes; None: one round trip at the `line_rate`, at least 64 packets."""
    seed: int = 0
    reorder: float = 0.0
    """Fraction of packets in each direction that later packets overtake."""
    duplicate: float = 0.0
    """Fraction of packets in each direction that arrive twice."""

    def __post_init__(self) -> None:
        if not 0 <= self.rtt_s < math.inf:
            raise UsageError(f"the round trip must be 0 or more seconds, got {self.rtt_s}")
        for name in ("loss", "loss_up", "reorder", "duplicate"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise UsageError(f"{name} must be at least 0 and less than 1, got {share}")
        if self.queue_bytes is not None and self.queue_bytes < PACKET_BYTES:
            raise UsageError(f"the queue must hold at least one packet of {PACKET_BYTES} bytes, got {self.queue_bytes}")

    def limit_bytes(self, rate: float) -> int:
        """Return the queue limit of a bottleneck with a line rate of ``rate`` bytes/s."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        return max(MIN_QUEUE_BYTES, int(self.rtt_s * rate))


def line_rate(trace: Trace) -> float:
    """Return the rate that a trace exceeds for one twentieth of the time, bytes/s.

    Real buffers are sized for the line rate, not for the mean under interference: with a queue of one round trip at the
    mean rate, a trace with variation by the millisecond would drop packets in every burst.
    """
    left = _LINE_RATE_SHARE * trace.duration_s
    for rate, seconds in sorted(((rate, end - start) for start, end, rate in trace.segments()), reverse=True):
        left -= seconds
        if left < 0:
            return rate
    return min(trace.rates)
