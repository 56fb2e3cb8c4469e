"""What a trace looks like in numbers and in one line of text."""

from __future__ import annotations

import math
from typing import Any

from kvabr.replay.trace import BYTES_PER_MBIT, Trace

_BARS = "▁▂▃▄▅▆▇█"


def describe(trace: Trace) -> dict[str, Any]:
    """Plain JSON values: rates in Mbit/s, all statistics weighted by time.

    ``cv`` is the coefficient of variation (standard deviation over mean), ``p5_mbps`` the rate that the link stays
    below for 5 % of the time, ``zero_share`` the part of the time in which it carries nothing.
    """
    parts = [(rate / BYTES_PER_MBIT, end - start) for start, end, rate in trace.segments()]
    mean = trace.mean_rate / BYTES_PER_MBIT
    variance = math.fsum(length * (rate - mean) ** 2 for rate, length in parts) / trace.duration_s
    return {
        "name": trace.name,
        "family": trace.family,
        "duration_s": trace.duration_s,
        "segments": len(parts),
        "mean_mbps": mean,
        "cv": math.sqrt(variance) / mean,
        "min_mbps": min(trace.rates) / BYTES_PER_MBIT,
        "p5_mbps": _quantile(parts, 0.05),
        "max_mbps": max(trace.rates) / BYTES_PER_MBIT,
        "zero_share": math.fsum(length for rate, length in parts if rate == 0) / trace.duration_s,
        "rtt_s": trace.rtt_s,
    }


def sparkline(trace: Trace, cells: int = 24) -> str:
    """The rate over time as a row of bars, each the mean of its share of the time; a blank one carries nothing."""
    step = trace.duration_s / cells
    carried = [0.0] * cells
    for start, end, rate in trace.segments():
        cell = min(int(start / step), cells - 1)
        while start < end:
            edge = end if cell == cells - 1 else min(end, (cell + 1) * step)
            carried[cell] += max(edge - start, 0.0) * rate
            if edge >= end:
                break
            start, cell = edge, cell + 1  # noqa: PLW2901  # walks through the cells that the segment covers
    top = max(carried)
    return "".join(" " if part == 0 else _BARS[min(int(part / top * len(_BARS)), len(_BARS) - 1)] for part in carried)


def _quantile(parts: list[tuple[float, float]], share: float) -> float:
    """The least rate such that ``share`` of the time is at or below it; parts are (rate, length)."""
    rest = share * math.fsum(length for _, length in parts)
    for rate, length in sorted(parts):
        rest -= length
        if rest <= 0:
            return rate
    return max(rate for rate, _ in parts)
