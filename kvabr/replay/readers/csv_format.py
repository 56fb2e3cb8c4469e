"""CSV with named columns: a time (or none), a rate, and perhaps an end.

Column names in common use are recognised with their unit (``download_mbps``, ``time_ms``, ``bits_per_second``);
`Columns` names any others. Times are numbers or calendar timestamps. A row lasts until its end column says or, without
one, until the next row's time. A jump forward splits the file into sessions, and so does a row without a rate: a
missing sample is not a zero. Sessions in which nothing arrived are left out if others remain.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from kvabr.replay.readers.source import BYTES_PER_SECOND, Head, Sample, TraceFile, build, median_step
from kvabr.replay.trace import Trace

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Units of time, in seconds."""

_UNIT = r"(?:_(?P<unit>s|secs?|seconds?|ms|us|ns))?"
_TIMES = (
    re.compile(r"(?:(?:time|timestamp)_(?:start|begin)|(?:start|begin)(?:_(?:time|timestamp))?)" + _UNIT),
    re.compile(r"(?:t|time|timestamps?|time_stamp|epoch|datetime|date_time|seconds?|secs?|elapsed|unix_?time)" + _UNIT),
)
_END_NAME = re.compile(r"(?:(?:time|timestamp)_(?:end|stop)|(?:end|stop)(?:_(?:time|timestamp))?)" + _UNIT)

_RATE = re.compile(r"(?:bit_?)?rate|bandwidth|throughput|capacity|goodput|speed|download|downlink|down|dl|rx|received")
_DOWN = re.compile(r"down|dl|rx|rec(?:ei|ie)?v")
_UP = re.compile(r"up|ul|tx|sent|send")
_DERIVED = re.compile(r"avg|average|mean|min|max|std|target|median")
_RATE_UNIT = re.compile(
    r"(?:^|_)(?P<prefix>[kmg]?)"
    r"(?:(?:bp_?s|b_s|bits?_?(?:p|per)?_?s(?:ec|econd)?)|(?P<byte>bytes?_?(?:p|per)?_?s(?:ec|econd)?))$"
)
_CAPITAL_B = re.compile(r"[kKMG]?B(?:ps|/s)\W*$")

GAP_STEPS = 10
"""Without an end column, a step longer than this many median steps is a jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What the user says about a CSV file; None: recognise it."""

    time: str | None = None
    """Name of the column with the time at which a row begins."""
    end: str | None = None
    """Name of the column with the time at which a row ends."""
    rate: str | None = None
    """Name of the column with the rate."""
    unit: str | None = None
    """Unit of the rate, a key of `BYTES_PER_SECOND`."""
    time_unit: str | None = None
    """Unit of numeric times, a key of `TIME_UNITS`."""
    step_s: float | None = None
    """Seconds that each row lasts, in a file without times."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a row holds its sample."""

    delimiter: str
    header: tuple[str, ...]
    rate: int
    rate_factor: float
    """Bytes per second in one unit of the rate."""
    time: int | None
    """None: each row lasts `step_s`."""
    time_factor: float
    """Seconds in one unit of time."""
    end: int | None
    step_s: float

    @property
    def width(self) -> int:
        """Least number of cells in a row."""
        return 1 + max(index for index in (self.rate, self.time, self.end) if index is not None)


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    start: float
    end: float | None
    rate: float | None


def is_csv(head: Head) -> bool:
    """Return whether a file looks like this format."""
    return not head.text.startswith(("[", "{")) and bool(head.rows) and _looks_like_header(head.rows[0])


def parse_csv(source: TraceFile, columns: Columns | None = None) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: a column is missing or ambiguous, or a row is not a sample.
    """
    rows = list(_rows(source, columns or Columns()))
    if not rows:
        raise source.error("it has a header and no samples; a trace needs at least one")
    sessions = _sessions(source, rows)
    if not sessions:
        raise source.error("no row has a rate; name the column with --rate-column")
    carrying = [session for session in sessions if any(sample.rate for sample in session)] or sessions
    if len(carrying) == 1:
        return [build(source, carrying[0])]
    return [build(source, session, session=f"-{number:04d}") for number, session in enumerate(carrying, 1)]


def _rows(source: TraceFile, columns: Columns) -> Iterator[_Row]:
    lines = source.lines()
    if not lines:
        raise source.error("it is empty; a trace needs at least one sample")
    where = _layout(source, lines[0][1], columns)
    cells = csv.reader([text for _, text in lines[1:]], delimiter=where.delimiter)
    try:
        for index, row in enumerate(cells):
            # The reader counts the lines of the list, which lacks comments and empty lines.
            yield _row(source, where, index, lines[cells.line_num][0], row)
    except csv.Error as error:
        raise source.error(f"not CSV ({error})") from error


def _row(source: TraceFile, where: Layout, index: int, line: int, cells: list[str]) -> _Row:
    if len(cells) < where.width:
        raise source.error(f"{len(cells)} cells, but the sample needs {where.width}; complete or remove the line", line)
    text = cells[where.rate].strip()
    rate = source.number(text, where.header[where.rate], line) * where.rate_factor if text else None
    if where.time is None:
        return _Row(line, index * where.step_s, (index + 1) * where.step_s, rate)
    start, end = (
        None if column is None else _time(source, cells[column], where.header[column], where.time_factor, line)
        for column in (where.time, where.end)
    )
    return _Row(line, start or 0.0, end, rate)


def _time(source: TraceFile, text: str, column: str, factor: float, line: int) -> float:
    """Return the seconds of a number or a calendar timestamp (UTC unless it has a time zone)."""
    try:
        return float(text) * factor
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        what = f"{column} is {text[:40]!r}, neither a number nor a timestamp (2026-01-31 12:00:00)"
        raise source.error(f"{what}; correct or remove the line", line) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _sessions(source: TraceFile, rows: Sequence[_Row]) -> list[list[Sample]]:
    lengths = [row.end - row.start for row in rows if row.end is not None]
    step = median(lengths) if lengths else median_step([row.start for row in rows])
    sessions: list[list[Sample]] = [[]]
    for index, row in enumerate(rows):
        if row.end is not None and row.end <= row.start:
            raise source.error("the row ends before it starts; correct or remove it", row.line)
        following = rows[index + 1].start if index + 1 < len(rows) else None
        end = _end(row, following, step)
        if row.rate is not None:
            sessions[-1].append(Sample(row.line, row.start, end, row.rate))
        if row.rate is None or (following is not None and following - end > step / 2):
            sessions.append([])
    return [session for session in sessions if session]


def _end(row: _Row, following: float | None, step: float) -> float:
    """Return when a row ends; at the latest when the next one starts."""
    if row.end is not None:
        return following if following is not None and row.start < following < row.end else row.end
    if following is not None and 0 < following - row.start <= GAP_STEPS * step:
        return following
    return row.start + step


def _looks_like_header(line: str) -> bool:
    """Return whether a line names a time and a rate."""
    header = _cells(line)
    return _find_time(header) is not None and bool(_likely_rates(header))


def _layout(source: TraceFile, line: str, columns: Columns) -> Layout:
    """Find the sample's columns from the header ``line`` and the user's ``columns``.

    Raises:
        TraceError: a column is missing or ambiguous, or its unit is unknown.
    """
    header = _cells(line)
    rate, rate_factor = _rate(source, header, columns)
    step = columns.step_s
    if step is not None and not (math.isfinite(step) and step > 0):
        raise source.error(f"a step of {step} s; give a positive number")
    time = end = None
    if step is None:
        time = _find_time(header) if columns.time is None else _named(source, header, columns.time)
        if time is None:
            raise source.error(f"no column is a time; name it with --time-column, or give --step ({_list(header)})")
        end = _find_end(header) if columns.end is None else _named(source, header, columns.end)
    unit = columns.time_unit or (_time_unit(header[time]) if time is not None else "s")
    if unit not in TIME_UNITS:
        raise source.error(f"unknown unit of time {unit!r}; known are {', '.join(TIME_UNITS)}")
    return Layout(_delimiter(line), tuple(header), rate, rate_factor, time, TIME_UNITS[unit], end, step or 1.0)


def _cells(line: str) -> list[str]:
    """Return the cells of a header; none if its quotes or its length are not those of a header."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=_delimiter(line)), [])]
    except csv.Error:
        return []


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _list(header: Sequence[str]) -> str:
    return f"columns: {', '.join(header)[:200]}"


def _plain(name: str) -> str:
    """Return a normalised name: ``Throughput (Mbit/s)`` -> ``throughput_mbit_s``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _named(source: TraceFile, header: Sequence[str], name: str) -> int:
    for index, cell in enumerate(header):
        if cell.lower() == name.strip().lower():
            return index
    raise source.error(f"no column {name!r} ({_list(header)})")


def _find(header: Sequence[str], pattern: re.Pattern[str]) -> int | None:
    return next((index for index, name in enumerate(header) if pattern.fullmatch(_plain(name))), None)


def _find_time(header: Sequence[str]) -> int | None:
    return next((index for pattern in _TIMES if (index := _find(header, pattern)) is not None), None)


def _find_end(header: Sequence[str]) -> int | None:
    return _find(header, _END_NAME)


def _time_unit(name: str) -> str:
    """Return the unit at the end of a time column's name; seconds if there is none."""
    unit = _plain(name).rpartition("_")[2]
    return unit if unit in TIME_UNITS else "s"


def _rate(source: TraceFile, header: Sequence[str], columns: Columns) -> tuple[int, float]:
    if columns.rate is not None:
        index = _named(source, header, columns.rate)
    else:
        likely = _likely_rates(header)
        if len(likely) != 1:
            which = "more than one column may be the rate" if likely else "no column is a rate"
            raise source.error(f"{which}; name it with --rate-column ({_list(header)})")
        index = likely[0]
    unit = columns.unit or _rate_unit(header[index])
    if unit is None:
        raise source.error(f"the unit of column {header[index]!r} is not in its name; say it with --unit")
    if unit not in BYTES_PER_SECOND:
        raise source.error(f"unknown unit {unit!r}; known are {', '.join(BYTES_PER_SECOND)}")
    return index, BYTES_PER_SECOND[unit]


def _likely_rates(header: Sequence[str]) -> list[int]:
    """Return the columns that are most likely the rate; several if they are equally likely."""
    scores = [_score(name) for name in header]
    best = max(scores, default=0)
    return [index for index, score in enumerate(scores) if score == best and score > 0]


def _score(name: str) -> int:
    """Score how likely a column is the rate: names with a unit first, downlink before uplink."""
    plain = _plain(name)
    with_unit = _rate_unit(name) is not None
    if not with_unit and not _RATE.fullmatch(plain):
        return 0
    worse = 4 * bool(_UP.search(plain)) + 2 * bool(_DERIVED.search(plain))
    return 8 * with_unit + 2 * bool(_DOWN.search(plain)) + 7 - worse


def _rate_unit(name: str) -> str | None:
    """Return the unit at the end of a rate column's name, a key of `BYTES_PER_SECOND`; None if there is none."""
    found = _RATE_UNIT.search(_plain(name))
    if found is None:
        return None
    prefix = found["prefix"].upper().replace("K", "k")
    is_bytes = found["byte"] is not None or _CAPITAL_B.search(name) is not None
    return f"{prefix}{'byte' if is_bytes else 'bit'}/s"
