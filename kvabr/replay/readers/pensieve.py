"""Pensieve's cooked traces, and the many data sets in the same form: ``time_s<space or tab>Mbit/s`` a line.

A row's rate holds until the time of the next row; the last row lasts as long as the median step. (Pensieve's own
simulator takes a row as the rate *up to* its time and drops the first. Data sets differ in what they mean, and none
says it; reading forward uses every row, and differs by a shift of one row.) The first time need not be 0: the trace
is shifted.
Source: https://github.com/hongzimao/pensieve, sim/load_trace.py and sim/env.py.
"""

from __future__ import annotations

from kvabr.replay.readers.source import BYTES_PER_SECOND, Source, build, hold
from kvabr.replay.trace import Trace


def matches(lines: list[str]) -> bool:
    """Whether the first lines of a file look like this format."""
    return bool(lines) and all(_is_row(line) for line in lines)


def parse(source: Source) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: it is not a trace of this format.
    """
    rows = []
    for line, text in source.lines():
        fields = text.split()
        if len(fields) != 2:
            raise source.error(f"{text[:40]!r} is not `time rate` (seconds, Mbit/s)", line)
        time = source.number(fields[0], "the time", line)
        rows.append((line, time, source.number(fields[1], "the rate", line) * BYTES_PER_SECOND["Mbit/s"]))
    return [build(source, hold(rows))]


def _is_row(line: str) -> bool:
    fields = line.split()
    try:
        return len(fields) == 2 and all(isinstance(float(field), float) for field in fields)
    except ValueError:
        return False
