"""A network trace: the capacity of a link over time, piecewise constant and periodic."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvabr.types.errors import TraceError

MAX_SEGMENTS = 4_000_000
"""Maximum number of segments: more than an hour of milliseconds."""
MIN_DURATION_S = 1e-3
"""Minimum duration: a simulated play repeats a shorter trace too often."""
BYTES_PER_MBIT = 125_000.0
"""Bytes per Mbit. Rates are bytes per second inside kvabr, and Mbit/s in files and output."""


class SegmentError(TraceError):
    """A segment of a trace is invalid. Readers convert its index to a file and line."""

    def __init__(self, trace: str, segment: int, problem: str) -> None:
        super().__init__(f"trace {trace}: segment {segment}: {problem}")
        self.segment = segment
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Trace:
    """The capacity of a link over time.

    Raises:
        TraceError: the trace is empty, unsorted, negative, not finite, zero throughout, or shorter than a millisecond.
    """

    name: str
    """Family and file name, such as ``hsdpa_3g/norway_bus_1``."""
    family: str
    times: tuple[float, ...]
    """Start of each segment, seconds, ascending from 0."""
    rates: tuple[float, ...]
    """Bytes per second in each segment, 0 or more; at least one is positive."""
    duration_s: float
    """End of the last segment, where the trace wraps."""
    rtt_s: float | None = None
    """Mean round trip time over the trace, seconds; None if the file has none."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def mean_rate(self) -> float:
        """The rate averaged over time, bytes per second."""
        return math.fsum((end - start) * rate for start, end, rate in self.segments()) / self.duration_s

    def segments(self) -> Iterator[tuple[float, float, float]]:
        """Yield each segment as (start s, end s, bytes per second)."""
        return zip(self.times, (*self.times[1:], self.duration_s), self.rates, strict=True)

    def scaled(self, factor: float) -> Trace:
        """Return the trace with every rate multiplied by ``factor``.

        Raise `TraceError` if that is not a positive number, or takes a rate out of range.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise TraceError(f"trace {self.name}: cannot be scaled by {factor}; give a positive number")
        return replace(self, rates=tuple(rate * factor for rate in self.rates))


def _check(trace: Trace) -> None:
    """Raise `TraceError` if a link model cannot play the trace. All validation of traces is here."""
    name, times, rates = trace.name, trace.times, trace.rates
    if not times:
        raise TraceError(f"trace {name}: it has no samples; a trace needs at least one")
    if len(times) != len(rates):
        raise TraceError(f"trace {name}: {len(times)} times but {len(rates)} rates; give one rate for each time")
    if len(times) > MAX_SEGMENTS:
        raise TraceError(f"trace {name}: {len(times)} segments, more than the {MAX_SEGMENTS} allowed; cut it in pieces")
    if times[0] != 0:
        raise SegmentError(name, 0, f"starts at {times[0]} s; shift the trace so that it starts at 0")
    ordered = all(map(operator.lt, times, times[1:])) and math.isfinite(times[-1])
    if ordered and min(rates) >= 0 and all(map(math.isfinite, rates)):
        _check_whole(trace)
        return
    for index, (problem, rate) in enumerate(zip(map(_time_problem, (-math.inf, *times), times), rates, strict=False)):
        found = problem or _rate_problem(rate)
        if found is not None:
            raise SegmentError(name, index, found)


def _check_whole(trace: Trace) -> None:
    name, times, rates = trace.name, trace.times, trace.rates
    if not (math.isfinite(trace.duration_s) and trace.duration_s > times[-1]):
        when = f"starts at {times[-1]:g} s, but the trace ends at {trace.duration_s:g} s"
        raise SegmentError(name, len(times) - 1, f"{when}; the trace must end later")
    if trace.duration_s < MIN_DURATION_S:
        raise TraceError(
            f"trace {name}: it lasts {trace.duration_s:.4g} s, but must last at least {MIN_DURATION_S:g} s; correct "
            "the unit of its times, for CSV with `kvabr traces import --time-unit UNIT`"
        )
    if not any(rates):
        raise TraceError(f"trace {name}: the rate is zero throughout, so nothing would ever arrive; use another trace")
    if trace.rtt_s is not None and not (math.isfinite(trace.rtt_s) and trace.rtt_s >= 0):
        raise TraceError(f"trace {name}: the round trip must be 0 or more seconds, got {trace.rtt_s}")


def _time_problem(before: float, time: float) -> str | None:
    if before < time < math.inf:
        return None
    if not math.isfinite(time):
        return f"the time must be a finite number, got {time}"
    if time == before:
        return f"the time {time:g} s occurs twice; merge or remove one of the two samples"
    return f"the time {time:g} s follows {before:g} s; sort the samples, or split the file"


def _rate_problem(rate: float) -> str | None:
    if 0 <= rate < math.inf:
        return None
    if not math.isfinite(rate):
        return f"the rate must be a finite number, got {rate}; remove a missing sample"
    return f"the rate must be 0 or more bytes/s, got {rate:g}"


def three(value: float) -> str:
    """Format a number with three significant digits and at most two decimal places, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
