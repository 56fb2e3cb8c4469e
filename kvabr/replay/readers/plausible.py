"""Questions about missing or doubtful units."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kvabr.replay.readers.names import TIME_UNITS
from kvabr.replay.readers.source import TraceFile, median_step
from kvabr.replay.readers.times import COARSE_S, FINE_S, unit_of_dates
from kvabr.replay.trace import Trace

FASTEST, SLOWEST = 1e12 / 8, 1e3 / 8
"""Maximum and minimum mean rate of a file, bytes per second."""
MAX_STEP_S = 600.0
MAX_S = 366 * 86400.0
_SINCE_BOOT_S = 1e9


def seconds(
    source: TraceFile, times: list[float], unit: str | None, ends: Sequence[float] | None = None
) -> list[float]:
    """Convert numeric times to seconds; raise `TraceQuestionError` if the unit is ambiguous, or if none fits.

    ``unit`` is a key of `TIME_UNITS`. Without it, the unit of times since 1970 follows from their size, and other
    numbers are seconds if their steps are like those of a log in seconds. ``ends`` are the ends of the samples (None:
    the next time).
    """
    if source.said.time_unit is not None:
        return _scaled(times, unit)
    if unit is None and all(map(math.isfinite, times)):
        unit = unit_of_dates(times)
        steps = [] if ends is None else [abs(end - time) for time, end in zip(times, ends, strict=True)]
        step = statistics.median(steps) if steps else median_step(times)
        if unit is None and (max(map(abs, times), default=0.0) >= _SINCE_BOOT_S or not FINE_S <= step < COARSE_S):
            raise source.question(
                f"times from {times[0]:.15g} in steps of {step:.9g}, without a unit", "--time-unit", "UNIT"
            )
    return _scaled(times, unit)


def _scaled(times: list[float], unit: str | None) -> list[float]:
    factor = TIME_UNITS[unit or "s"]
    return times if factor == 1 else [time * factor for time in times]


def check(source: TraceFile, traces: Sequence[Trace], *, rate_option: str, time_option: str, value: str = "") -> None:
    """Raise `TraceQuestionError` for implausible rates and steps unless the user confirmed the unit.

    Traces of one file are checked together because a piece may have a low rate. ``rate_option`` and ``time_option`` are
    the options that confirm a unit (empty: it is confirmed), ``value`` the value for them (empty: a unit).
    """
    total = sum(trace.duration_s for trace in traces)
    mean = sum(trace.mean_rate * trace.duration_s for trace in traces) / total
    if rate_option and not SLOWEST <= mean <= FASTEST:
        raise source.question(f"a mean rate of {mean * 8:.4g} bit/s is unlikely", rate_option, value or "UNIT")
    if not time_option:
        return
    step = statistics.median(end - start for trace in traces for start, end, _ in trace.segments())
    if step > MAX_STEP_S:
        raise source.question(f"samples of {step:.4g} s are unlikely", time_option, value or "UNIT")
    if total > MAX_S:
        raise source.question(f"a length of {total / 86400:.4g} days is unlikely", time_option, value or "UNIT")
