"""The link model: a trace's rate, a round trip, slow start, and sharing among requests in flight.

- Capacity is the trace's rate times the payload's share; the trace wraps at its end.
- Slow start limits the first round trips. The window starts at ten packets plus the bytes of the lookup and nearly
  doubles every round trip until the link is full. (With a drop-tail queue of one round trip, a live connection then
  loses packets and halves its window, but keeps the link full. A fluid model of that loss recovery did not predict live
  transfers better.)
- The first byte of a request arrives one round trip plus processing time after the request was sent. As with kvabr's
  origins, the request with the lowest priority number gets all capacity; of equal ones, the earliest.
- A cancelled request uses capacity for one more round trip, for the bytes in flight.
- There is no packet loss, no queueing delay except through sharing, and no cross traffic except that recorded in the
  trace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvabr.replay.trace import Trace
from kvabr.types.errors import TraceError

Array = npt.NDArray[np.float64]

PAYLOAD_SHARE = 0.948
"""Cache bytes per byte on the wire.

Measured over real plays on aioquic: of 1,228 bytes, 28 are UDP and IPv4, about 35 QUIC, less than one MoQT.
"""
INITIAL_WINDOW = 10 * 1164
"""Payload bytes in flight at the start of a connection: ten packets (RFC 9002, section 7.2)."""
HANDSHAKE_BYTES = 2_000
"""Bytes of certificate and SETUP from the origin, which also open the window."""
WINDOW_GROWTH = 1.85
"""Growth per round trip of slow start. Without pacing it is 2; with pacing, the first acknowledgements arrive while the
rest of the window waits to be sent, so it is at least 1.76.
"""
FIRST_BYTE_S = 0.004
"""Processing time of a request at both ends, in seconds, measured on aioquic with two processes on one shared core
each.
"""
_MAX_RAMP_STEPS = 64
_ROUNDING = 1e-13
_MAX_ROUNDING_BYTES = 0.1
"""Limit of corrections for rounding, less than the simulator's quarter of a byte.

On long, fast traces sums reach 10 TB, and their rounding error is a byte, so that a transfer would never end.
"""
_MIN_STEP_S = 1e-6
LOOKUP_ROUND_TRIPS = 3.0
"""Round trips from connecting to the first byte of the catalog: QUIC handshake, SETUP, request."""


def running_sums(trace: Trace) -> list[float]:
    """Return the cumulative bytes at the start of each segment and at the trace's end."""
    return [0.0, *accumulate((end - start) * rate for start, end, rate in trace.segments())]


class Capacity:
    """Bytes that a link can carry as a function of the time since the play began."""

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
        """Create the link of one play.

        The play starts at ``start_s`` in the trace, modulo its length. Slow start begins ``rtt_s`` after the play's
        start with ``window`` bytes in flight; pass ``slow_start=False`` for a warm connection. ``sums`` are the trace's
        `running_sums`, which plays can share.
        """
        self._starts = trace.times
        self._rates = trace.rates
        self._period = trace.duration_s
        self._sums = running_sums(trace) if sums is None else sums
        self._total = self._sums[-1]
        if self._total <= 0:
            raise TraceError(f"{trace.name}: the rate is zero throughout; a play over it would never end")
        self._offset = start_s % self._period
        self._origin = self._carried(self._offset)
        self._ramp: list[tuple[float, float, float]] = []
        self._ramp_end = self._ramp_bytes = self._ramp_base = 0.0
        if slow_start and rtt_s > 0:
            self._draw_ramp(rtt_s, window)

    @property
    def links(self) -> Sequence[Capacity]:
        """Links of a play's sources: this link alone, unless it combines several."""
        return (self,)

    def rate(self, t: float) -> float:
        """Return the rate at time ``t``, bytes per second."""
        if t < self._ramp_end:
            return next(rate for _, end, rate in self._ramp if t < end)
        return self._trace_rate(t)

    def between(self, t0: float, t1: float) -> float:
        """Return the bytes that the link can carry from ``t0`` to ``t1``."""
        return self._cumulative(t1) - self._cumulative(t0)

    def when(self, t0: float, nbytes: float) -> float:
        """Return the time at which the link, starting at ``t0``, has carried ``nbytes``."""
        target = self._cumulative(t0) + nbytes
        if self._ramp and target < self._ramp_bytes:
            level = 0.0
            for start, end, rate in self._ramp:
                more = (end - start) * rate
                if level + more >= target and rate > 0:
                    return max(t0, start + (target - level) / rate)
                level += more
        wanted = self._origin + target - self._ramp_bytes + self._ramp_base
        # A rounding error must not make a transfer wait for the end of an outage.
        wanted -= min(_ROUNDING * wanted, _MAX_ROUNDING_BYTES)
        turns = int(wanted // self._total)
        rest = wanted - turns * self._total
        if rest <= 0 and turns:
            turns, rest = turns - 1, self._total
        # Find the first segment that reaches the sum. Segments of rate zero reach it earlier.
        index = max(bisect_left(self._sums, rest) - 1, 0)
        rate = self._rates[index]
        within = self._starts[index] + ((rest - self._sums[index]) / rate if rate > 0 else 0.0)
        return max(t0, turns * self._period + within - self._offset)

    def series(self, until_s: float) -> list[tuple[float, float]]:
        """Return (time, bytes per second) steps from 0 to ``until_s``, for drawing."""
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

    def points(self, until_s: float) -> tuple[Array, Array]:
        """Return times from 0 to ``until_s``, and cumulative bytes, which are linear between these times."""
        steps = [step for step in self.series(until_s) if step[0] < until_s]
        times = np.array([*(t for t, _ in steps), until_s])
        return times, np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array([rate for _, rate in steps]))])

    def wraps_within(self, seconds: float) -> bool:
        """Return True if a play of ``seconds`` runs past the trace's end."""
        return self._offset + seconds > self._period

    def _trace_rate(self, t: float) -> float:
        return self._rates[bisect_right(self._starts, (self._offset + t) % self._period) - 1]

    def _carried(self, position: float) -> float:
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
        segments = [(0.0, rtt_s, 0.0)]
        t, level = rtt_s, 0.0
        for _ in range(_MAX_RAMP_STEPS):
            carried = self._carried(self._offset + t + rtt_s) - self._carried(self._offset + t)
            if 0 < carried < window:
                break
            more = min(window, carried)
            segments.append((t, t + rtt_s, more / rtt_s))
            level += more
            # The window grows by received bytes only.
            window += (WINDOW_GROWTH - 1.0) * more
            t += rtt_s
        self._ramp, self._ramp_end, self._ramp_bytes = segments, t, level
        self._ramp_base = self._carried(self._offset + t) - self._origin


class JointCapacity(Capacity):
    """Independent links, one for each source of a play; their capacities are summed."""

    def __init__(self, links: Sequence[Capacity]) -> None:
        self._links = tuple(links)

    @property
    def links(self) -> Sequence[Capacity]:
        return self._links

    def rate(self, t: float) -> float:
        return sum(link.rate(t) for link in self._links)

    def between(self, t0: float, t1: float) -> float:
        return sum(link.between(t0, t1) for link in self._links)

    def when(self, t0: float, nbytes: float) -> float:
        times, carried = self.points(min(link.when(t0, nbytes) for link in self._links) + _MIN_STEP_S)
        target = float(np.interp(t0, times, carried)) + nbytes
        index = min(int(np.searchsorted(carried, target - _MAX_ROUNDING_BYTES)), len(times) - 1)
        if index == 0 or carried[index] <= carried[index - 1]:
            return max(t0, float(times[index]))
        part = (target - carried[index - 1]) / (carried[index] - carried[index - 1])
        return max(t0, float(times[index - 1] + min(max(part, 0.0), 1.0) * (times[index] - times[index - 1])))

    def series(self, until_s: float) -> list[tuple[float, float]]:
        times, carried = self.points(until_s)
        return list(zip(times[:-1].tolist(), (np.diff(carried) / np.diff(times)).tolist(), strict=True))

    def points(self, until_s: float) -> tuple[Array, Array]:
        # Rates are not summed: rounding must not move a time across a step.
        each = [link.points(until_s) for link in self._links]
        times = np.unique(np.concatenate([times for times, _ in each]))
        return times, np.sum([np.interp(times, *points) for points in each], axis=0)

    def wraps_within(self, seconds: float) -> bool:
        return any(link.wraps_within(seconds) for link in self._links)
