"""Formats with one sample per line: mahimahi, Pensieve, and ``value,unit``.

mahimahi (``mm-link``): one integer per line, the millisecond at which a packet of 1,500 bytes may pass. The trace wraps
at its last timestamp, so packets of that millisecond pass together with those of millisecond 0. The packets of each
millisecond are converted to a rate. Source: https://github.com/ravinet/mahimahi, src/frontend/link_queue.cc.

Pensieve's cooked traces and many data sets: ``time_s<space or tab>Mbit/s``. A rate holds until the next line; the last
rate, and a rate before a jump in time (`split`), holds for the median step. (Pensieve's own simulator treats a line as
the rate *up to* its time and drops the first line. Data sets do not specify this. Reading forward uses every line;
results differ by a shift of one line.) The trace is shifted to start at 0. Source:
https://github.com/hongzimao/pensieve, sim/load_trace.py and sim/env.py.

``value,unit`` without a header, one line per second; the unit may change between lines, as in the bandwidth columns of
iperf's text reports (``6.21,Mbits/sec``) in NYU-METS. A KByte is 1,024 bytes. Source: Mei et al., PAM 2019;
https://github.com/NYU-METS/Main.
"""

from __future__ import annotations

import re

from kvabr.replay.readers.iperf_text import UNITS
from kvabr.replay.readers.names import BYTES_PER_SECOND, TIME_UNITS, rate_unit, time_unit
from kvabr.replay.readers.numerals import decimal_mark, number, with_point
from kvabr.replay.readers.plausible import seconds
from kvabr.replay.readers.source import Head, Rows, Sample, TraceFile, build, split
from kvabr.replay.trace import Trace

PACKET_BYTES = 1500
_MAX_DIGITS = 12
STEP_S = 1.0
MIN_GAP_S = 60.0
"""Minimum gap in Pensieve's format, seconds, for splitting a trace; loggers pause without coverage."""

_VALUE = re.compile(r"[-+.\w]{1,40}\s*,\s*([KMGT]?(?:bit|byte)s/sec)", re.IGNORECASE)


def is_mahimahi(head: Head) -> bool:
    """Return True if a file looks like this format."""
    return bool(head.rows) and all(_is_timestamp(line) for line in head.rows)


def parse_mahimahi(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` if it is not of this format."""
    counts: list[tuple[int, int, int]] = []
    for line, text in source.lines():
        if not _is_timestamp(text):
            raise source.error(f"{text[:40]!r} is not a millisecond (a whole number from 0); is this mahimahi?", line)
        time = int(text)
        if counts and counts[-1][1] == time:
            counts[-1] = (counts[-1][0], time, counts[-1][2] + 1)
        else:
            counts.append((line, time, 1))
    if not counts:
        raise source.error("it has no samples; a trace needs at least one")
    end = counts[-1][1]
    if end == 0:
        raise source.error("it ends at millisecond 0; the last timestamp is the trace's length, so it must be later")
    if len(counts) < 2 or counts[-2][1] < end:
        counts = _wrapped(counts)
    return [build(source, _samples(counts, end))]


def _is_timestamp(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _wrapped(counts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    line, _, packets = counts[-1]
    if len(counts) > 1 and counts[0][1] == 0:
        return [(counts[0][0], 0, counts[0][2] + packets), *counts[1:-1]]
    return [(line, 0, packets), *counts[:-1]]


def _samples(counts: list[tuple[int, int, int]], end: int) -> list[Sample]:
    samples: list[Sample] = []

    def add(line: int, first: int, last: int, rate: float) -> None:
        before = samples[-1] if samples else None
        if before is not None and before.rate == rate and before.end == first / 1000:
            samples[-1] = before._replace(end=last / 1000)
        else:
            samples.append(Sample(line, first / 1000, last / 1000, rate))

    nexts = [time for _, time, _ in counts[1:]] + [end]
    for (line, time, packets), after in zip(counts, nexts, strict=True):
        add(line, time, time + 1, packets * PACKET_BYTES * 1000.0)
        if after > time + 1:
            add(line, time + 1, after, 0.0)
    return samples


def is_pensieve(head: Head) -> bool:
    """Return True if a file looks like this format."""
    return bool(head.rows) and all(_is_row(line) for line in head.rows)


def parse_pensieve(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` if it is not of this format."""
    places, times, rates = [], [], []
    for line, text in source.rows():
        fields = text.split()
        if len(fields) != 2:
            raise source.error(f"{text[:40]!r} is not `time rate` (seconds, Mbit/s)", line)
        places.append(line)
        times.append(fields[0])
        rates.append(fields[1])
    if not places:
        raise source.error("it has no samples; a trace needs at least one")
    unit, of_time = rate_unit(source.said.unit or "Mbit/s"), time_unit(source.said.time_unit or "s")
    if not unit:
        raise source.question(
            f"unknown unit {source.said.unit!r}; choose from {', '.join(BYTES_PER_SECOND)}", "--unit", "UNIT"
        )
    if of_time is None:
        known = ", ".join(TIME_UNITS)
        raise source.question(
            f"unknown unit of time {source.said.time_unit!r}; choose from {known}", "--time-unit", "UNIT"
        )
    if "," in source.text:
        mark, _ = decimal_mark((times, rates), " ")
        if mark is None:
            raise source.error(
                "a mark in its numbers may separate decimals or thousands; write them with a decimal point"
            )
        times, rates = with_point(times, mark), with_point(rates, mark)
    factor = BYTES_PER_SECOND[unit]
    starts = source.numbers(times, "the time", places)
    found = [rate * factor for rate in source.numbers(rates, "the rate", places)]
    starts = seconds(source, starts, None if source.said.time_unit is None else of_time)
    return split(source, Rows(places, starts, None, found), least_gap_s=MIN_GAP_S)


def _is_row(line: str) -> bool:
    fields = line.split()
    return len(fields) == 2 and all(number(field.replace(",", ".", 1)) is not None for field in fields)


def is_values(head: Head) -> bool:
    """Return True if a file looks like this format."""
    return bool(head.rows) and all(_VALUE.fullmatch(line) for line in head.rows)


def parse_values(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` if it is not of this format."""
    samples = []
    for index, (line, text) in enumerate(source.rows()):
        value, _, unit = (part.strip() for part in text.partition(","))
        factor = UNITS.get(unit.lower())
        if factor is None:
            raise source.error(f"{text[:40]!r} is not `value,unit` with a unit such as Mbits/sec", line)
        rate = source.number(value, "the value", line) * factor
        samples.append(Sample(line, index * STEP_S, (index + 1) * STEP_S, rate))
    return [build(source, samples)]
