"""What a link is like, beside its trace."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvabr.replay.trace import Trace
from kvabr.types.errors import UsageError

PACKET_BYTES = 1228
"""A full packet of QUIC on the wire: 1,200 bytes of UDP payload and the headers of UDP and IPv4."""
_AT_BEST = 0.05
"""Share of its time that a link is at its best."""
LEAST_QUEUE_BYTES = 64 * PACKET_BYTES
"""The queue's default is never shorter: a pacer's bursts of 16 packets must fit beside each other."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Delay, loss and buffer of a link."""

    rtt_s: float = 0.0
    """Round trip of an empty link, seconds: half of it in each direction."""
    loss: float = 0.0
    """Share of the packets towards the player that are lost at random."""
    loss_up: float = 0.0
    """Share of the packets towards the origin that are lost at random."""
    queue_bytes: int | None = None
    """Bytes that may wait for the bottleneck; None: one round trip at the `line_rate`, at least 64 packets."""
    seed: int = 0
    """What the random losses follow from."""

    def __post_init__(self) -> None:
        if not 0 <= self.rtt_s < math.inf:
            raise UsageError(f"the round trip is {self.rtt_s} s; it must be zero or more seconds")
        for loss in (self.loss, self.loss_up):
            if not 0 <= loss < 1:
                raise UsageError(f"the loss is {loss}; it must be a share from 0 to below 1")
        if self.queue_bytes is not None and self.queue_bytes < PACKET_BYTES:
            raise UsageError(f"a queue of {self.queue_bytes} bytes; it must hold a packet of {PACKET_BYTES} at least")

    def limit_bytes(self, rate: float) -> int:
        """Bytes that may wait for a bottleneck whose line carries ``rate`` bytes per second."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        return max(LEAST_QUEUE_BYTES, int(self.rtt_s * rate))


def line_rate(trace: Trace) -> float:
    """What a link carries at its best, bytes per second: the rate that a trace exceeds for one twentieth of its time.

    Buffers are built for the line, not for the mean of what interference leaves of it: with a queue of one round trip
    at the mean rate, a trace that varies by the millisecond would drop packets in every burst.
    """
    left = _AT_BEST * trace.duration_s
    for rate, seconds in sorted(((rate, end - start) for start, end, rate in trace.segments()), reverse=True):
        left -= seconds
        if left < 0:
            return rate
    return min(trace.rates)
