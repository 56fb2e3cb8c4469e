"""The link model: a trace's rate, a round trip, slow start, and capacity shared among the requests in flight.

What is modelled, and what is not:

- Capacity is the share of the trace's rate that is payload, wrapped at the trace's end, from the play's start on.
- In the first round trips it is bounded by slow start: the window starts at ten packets and what the lookup before the
  play has brought, and nearly doubles every round trip until the link is full; after that the window never holds the
  link back again. (On a link with a drop-tail queue of one round trip a live connection then loses packets and halves
  its window, but goes on to fill the link. A fluid model of that loss recovery predicted live transfers no better.)
- The first byte of a request comes one round trip after it was sent, and what both ends need to handle it. The request
  of lowest priority number takes all the capacity; of those of equal priority it is the one that was asked for first,
  as the origins of kvabr send them.
- A cancelled request goes on to take capacity for one round trip: what is on its way cannot be called back.
- No loss, no queueing delay beyond the sharing, no cross traffic but what the trace already saw.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from kvabr.replay.trace import Trace
from kvabr.types.errors import TraceError

PAYLOAD_SHARE = 0.948
"""Bytes of a cache in each byte on the wire: a datagram has 1,200 bytes of UDP, the rest are headers.

Measured over whole live plays on aioquic; 28 of 1,228 bytes are UDP and IPv4, about 35 QUIC, less than one MoQT."""
INITIAL_WINDOW = 10 * 1164
"""Payload in flight at the start of a connection: ten packets (RFC 9002, section 7.2)."""
HANDSHAKE_BYTES = 2_000
"""What a handshake brings from the origin: its certificate and SETUP. It widens the window like any other byte."""
WINDOW_GROWTH = 1.85
"""How much wider the window is after a round trip of slow start. Without pacing it would be 2; with it the first
acknowledgements come while the rest of the window still waits to be sent, which gives 1.76 at the least."""
FIRST_BYTE_S = 0.004
"""What both ends together need to handle a request, seconds: from its sending to its first byte, less a round trip.

Measured on aioquic, two processes on one shared core each."""
_LONGEST_RAMP = 64
_ROUNDING = 1e-13
LOOKUP_ROUND_TRIPS = 3.0
"""Round trips from dialling to the catalog: QUIC's handshake, SETUP, the request."""


def running_sums(trace: Trace) -> list[float]:
    """Bytes carried from the trace's beginning to the start of each segment, and to its end."""
    return [0.0, *accumulate((end - start) * rate for start, end, rate in trace.segments())]


class Capacity:
    """Bytes that a link can carry, as a function of the time since the play began."""

    def __init__(
        self,
        trace: Trace,
        start_s: float = 0.0,
        rtt_s: float = 0.0,
        *,
        slow_start: bool = True,
        window: float = INITIAL_WINDOW,
        sums: list[float] | None = None,
    ) -> None:
        """Lay a trace under a play.

        Args:
            trace: the rates.
            start_s: where in the trace the play begins; wraps.
            rtt_s: round trip; slow start begins one round trip after the play.
            slow_start: False for a connection that is warm already.
            window: bytes that may be in flight at the start.
            sums: `running_sums` of the trace, for many plays over one trace.
        """
        self._starts = trace.times
        self._rates = trace.rates
        self._period = trace.duration_s
        self._sums = running_sums(trace) if sums is None else sums
        self._total = self._sums[-1]
        if self._total <= 0:
            raise TraceError(f"{trace.name}: carries nothing at all; a play over it could never end")
        self._offset = start_s % self._period
        self._origin = self._carried(self._offset)
        self._ramp: list[tuple[float, float, float]] = []
        self._ramp_end = self._ramp_bytes = self._ramp_base = 0.0
        if slow_start and rtt_s > 0:
            self._draw_ramp(rtt_s, window)

    def rate(self, t: float) -> float:
        """Bytes per second at ``t``."""
        if t < self._ramp_end:
            return next(rate for _, end, rate in self._ramp if t < end)
        return self._trace_rate(t)

    def between(self, t0: float, t1: float) -> float:
        """Bytes that the link can carry from ``t0`` to ``t1``."""
        return self._cumulative(t1) - self._cumulative(t0)

    def when(self, t0: float, nbytes: float) -> float:
        """When the link, starting at ``t0``, will have carried ``nbytes``."""
        target = self._cumulative(t0) + nbytes
        if self._ramp and target < self._ramp_bytes:
            level = 0.0
            for start, end, rate in self._ramp:
                more = (end - start) * rate
                if level + more >= target and rate > 0:
                    return max(t0, start + (target - level) / rate)
                level += more
        wanted = self._origin + target - self._ramp_bytes + self._ramp_base
        # What rounding has added is no byte: it must not wait for the end of an outage.
        wanted -= _ROUNDING * wanted
        turns = int(wanted // self._total)
        rest = wanted - turns * self._total
        if rest <= 0 and turns:
            turns, rest = turns - 1, self._total
        # The first segment at whose end the sum is reached: where the rate is zero the sum was reached before.
        index = max(bisect_left(self._sums, rest) - 1, 0)
        rate = self._rates[index]
        within = self._starts[index] + ((rest - self._sums[index]) / rate if rate > 0 else 0.0)
        return max(t0, turns * self._period + within - self._offset)

    def series(self, until_s: float) -> list[tuple[float, float]]:
        """Piecewise constant (time, bytes per second) from 0 to ``until_s``, for drawing."""
        points = [(start, rate) for start, _, rate in self._ramp if start < until_s]
        t = self._ramp_end
        points.append((t, self._trace_rate(t)))
        turn, position = divmod(self._offset + t, self._period)
        index = bisect_right(self._starts, position)
        while True:
            if index >= len(self._starts):
                turn, index = turn + 1, 0
            t = turn * self._period + self._starts[index] - self._offset
            if t >= until_s:
                return points
            points.append((t, self._rates[index]))
            index += 1

    def wraps_within(self, seconds: float) -> bool:
        """Whether a play of so many seconds runs over the trace's end."""
        return self._offset + seconds > self._period

    def _trace_rate(self, t: float) -> float:
        return self._rates[bisect_right(self._starts, (self._offset + t) % self._period) - 1]

    def _carried(self, position: float) -> float:
        """Bytes from the trace's beginning to ``position`` on the endless, wrapped trace."""
        turns = int(position // self._period)
        rest = position - turns * self._period
        index = bisect_right(self._starts, rest) - 1
        return turns * self._total + self._sums[index] + (rest - self._starts[index]) * self._rates[index]

    def _cumulative(self, t: float) -> float:
        if t >= self._ramp_end:
            return self._carried(self._offset + t) - self._origin - self._ramp_base + self._ramp_bytes
        level = 0.0
        for start, end, rate in self._ramp:
            if t <= end:
                return level + max(0.0, t - start) * rate
            level += (end - start) * rate
        return level

    def _draw_ramp(self, rtt_s: float, window: float) -> None:
        """Draw slow start, one step a round trip, until the window fills the link."""
        segments = [(0.0, rtt_s, 0.0)]
        t, level = rtt_s, 0.0
        # So many round trips are beyond any link: the bound only keeps a mad trace from looping.
        for _ in range(_LONGEST_RAMP):
            carried = self._carried(self._offset + t + rtt_s) - self._carried(self._offset + t)
            if 0 < carried < window:
                break
            more = min(window, carried)
            segments.append((t, t + rtt_s, more / rtt_s))
            level += more
            # Only what arrives is acknowledged, and only that opens the window.
            window += (WINDOW_GROWTH - 1.0) * more
            t += rtt_s
        self._ramp, self._ramp_end, self._ramp_bytes = segments, t, level
        self._ramp_base = self._carried(self._offset + t) - self._origin
