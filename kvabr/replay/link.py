"""The link model: a trace's rate, a round trip, slow start, and capacity shared among the requests in flight.

What is modelled, and what is not:

- Capacity is the trace's rate, wrapped at its end, from the play's start on. In the first round trips it is bounded by
  slow start: the window starts at ten packets (RFC 6928) and doubles every round trip until the link is full; after
  that the window never holds the link back again.
- The first byte of a request comes one round trip after it was sent. The request of lowest priority number takes all
  the capacity; those of equal priority share it evenly.
- A cancelled request goes on to take capacity for one round trip: what is on its way cannot be called back.
- No loss, no queueing delay beyond the sharing, no cross traffic but what the trace already saw.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from kvabr.errors import TraceError
from kvabr.replay.trace import Trace

INITIAL_WINDOW = 14_600
"""Bytes in flight at the start of a connection: ten packets of 1,460 bytes (RFC 6928)."""
_STEPS_PER_RTT = 4
"""Steps in which slow start's exponential is drawn."""


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
        sums: list[float] | None = None,
    ) -> None:
        """Lay a trace under a play.

        Args:
            trace: the rates.
            start_s: where in the trace the play begins; wraps.
            rtt_s: round trip; slow start begins one round trip after the play.
            slow_start: False for a connection that is warm already.
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
            self._draw_ramp(rtt_s)

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

    def _draw_ramp(self, rtt_s: float) -> None:
        """Draw slow start as steps until the window fills the link."""
        step = rtt_s / _STEPS_PER_RTT
        segments = [(0.0, rtt_s, 0.0)]
        t, window, level = rtt_s, float(INITIAL_WINDOW), 0.0
        # The sixty-fourth doubling is beyond any link: the bound only keeps a mad trace from looping.
        for _ in range(64 * _STEPS_PER_RTT):
            allowed = window / rtt_s
            carried = self._carried(self._offset + t + step) - self._carried(self._offset + t)
            if carried < allowed * step and carried > 0:
                break
            segments.append((t, t + step, min(allowed, carried / step)))
            level += min(allowed * step, carried)
            window *= 2.0 ** (1.0 / _STEPS_PER_RTT)
            t += step
        self._ramp, self._ramp_end, self._ramp_bytes = segments, t, level
        self._ramp_base = self._carried(self._offset + t) - self._origin
