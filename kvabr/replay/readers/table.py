"""CSV with named columns: a time (or none), a rate, and perhaps an end.

Column names in common use are recognised, with their unit (``download_mbps``, ``time_ms``, ``bits_per_second``);
`Columns` names any other. Times are numbers or calendar timestamps. A row lasts until its end column says, or, without
one, until the next row's time. A jump forward splits the file into sessions, and so does a row without a rate: a
missing sample is no zero. Sessions in which nothing arrived at all are left out, if others remain.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from kvabr.replay.readers.columns import Columns, Layout, layout, looks_like_header
from kvabr.replay.readers.source import Sample, Source, build, median_step
from kvabr.replay.trace import Trace

GAP_STEPS = 10
"""Without an end column, a step of more than so many median steps is a jump."""


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    start: float
    end: float | None
    rate: float | None


def matches(lines: list[str]) -> bool:
    """Whether the first lines of a file look like this format."""
    return bool(lines) and looks_like_header(lines[0])


def parse(source: Source, columns: Columns) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: there is no such column, more than one would do, or a row is no sample.
    """
    rows = list(_rows(source, columns))
    if not rows:
        raise source.error("it has a header and no samples; a trace needs at least one")
    sessions = _sessions(source, rows)
    if not sessions:
        raise source.error("no row has a rate; name the column with --rate-column")
    carrying = [session for session in sessions if any(sample.rate for sample in session)] or sessions
    if len(carrying) == 1:
        return [build(source, carrying[0])]
    return [build(source, session, session=f"-{number:04d}") for number, session in enumerate(carrying, 1)]


def _rows(source: Source, columns: Columns) -> Iterator[_Row]:
    lines = source.lines()
    if not lines:
        raise source.error("it is empty; a trace needs at least one sample")
    where = layout(source, lines[0][1], columns)
    cells = csv.reader([text for _, text in lines[1:]], delimiter=where.delimiter)
    try:
        for index, row in enumerate(cells):
            # Comments and empty lines are gone, so the reader counts lines of the list, not of the file.
            yield _row(source, where, index, lines[cells.line_num][0], row)
    except csv.Error as error:
        raise source.error(f"not CSV ({error})") from error


def _row(source: Source, where: Layout, index: int, line: int, cells: list[str]) -> _Row:
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


def _time(source: Source, text: str, column: str, factor: float, line: int) -> float:
    """Seconds, of a number or a calendar timestamp (without a zone: UTC)."""
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


def _sessions(source: Source, rows: Sequence[_Row]) -> list[list[Sample]]:
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
    """When a row ends. One that claims to last beyond the start of the next one ends there."""
    if row.end is not None:
        return following if following is not None and row.start < following < row.end else row.end
    if following is not None and 0 < following - row.start <= GAP_STEPS * step:
        return following
    return row.start + step
