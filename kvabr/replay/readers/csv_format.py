"""CSV with named columns: a time (or none), a rate, and perhaps an end.

`kvabr.replay.readers.names` recognises the columns and their units; `Columns` names others. Times are numbers or
calendar timestamps. Cells may be separated by commas, semicolons or tabs, with a decimal point or comma, after a line
``sep=;`` or without one. `split` says how rows become traces.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvabr.replay.readers.names import (
    BYTES_PER_SECOND,
    TIME_UNITS,
    ColumnName,
    find_end,
    find_rates,
    find_related,
    find_time,
    rate_unit,
    time_unit,
)
from kvabr.replay.readers.numerals import MISSING, Mark, decimal_mark, number, with_point
from kvabr.replay.readers.plausible import seconds
from kvabr.replay.readers.source import Columns, Head, Rows, TraceFile, split
from kvabr.replay.readers.times import FORMS, calendar
from kvabr.replay.trace import Trace

_SEPARATOR = re.compile(r'"?sep=(.?)"?', re.IGNORECASE)
_NUMERIC = re.compile(r"[-+]?[\d.,]+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class _Table:
    """The cells of a file."""

    source: TraceFile
    delimiter: str
    header: list[str]
    places: list[int]
    """Line of each row."""
    rows: list[list[str]]

    def cells(self, column: int) -> list[str]:
        return [row[column].strip() for row in self.rows]


def is_csv(head: Head) -> bool:
    """Return whether a file looks like this format: its header names a time and something about a rate."""
    rows = head.rows
    if head.text.startswith(("[", "{")) or not rows:
        return False
    delimiter, first = _delimiter(rows)
    header = _cells(rows[first], delimiter) if len(rows) > first else []
    return find_time(header) is not None and bool(find_related(header))


def parse_csv(source: TraceFile) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: a column or a unit is missing or ambiguous, or a row is not a sample.
    """
    table = _read(source)
    rate, factor = _find_rate(table)
    time, end = _find_times(table)
    mark = _mark(table, [column for column in (rate, time, end) if column is not None], factor)
    rates = [None if value is None else value * factor for value in _numbers(table, rate, mark)]
    places = table.places
    if time is None:
        step = source.said.step_s or 1.0
        edges = [index * step for index in range(len(rates) + 1)]
        return split(source, Rows(places, edges[:-1], edges[1:], rates))
    starts = _times(table, time, mark, end)
    if end is not None:
        return split(source, Rows(places, starts, _times(table, end, mark, time), rates))
    # Loggers of cells repeat a row for each neighbour.
    pairs = list(zip(starts, rates, strict=True))
    if any(pair == before for before, pair in pairwise(pairs)):
        kept = [index for index, pair in enumerate(pairs) if index == 0 or pair != pairs[index - 1]]
        places, starts = [places[index] for index in kept], [starts[index] for index in kept]
        rates = [rates[index] for index in kept]
    return split(source, Rows(places, starts, None, rates))


def _read(source: TraceFile) -> _Table:
    lines = source.rows()
    delimiter, first = _delimiter([text for _, text in lines[:3]])
    lines = lines[first:]
    if not lines:
        raise source.error("it is empty; a trace needs at least one sample")
    header = _cells(lines[0][1], delimiter)
    if len(lines) < 2:
        raise source.error("it has a header and no samples; a trace needs at least one")
    reader = csv.reader((text for _, text in lines[1:]), delimiter=delimiter)
    places: list[int] = []
    rows: list[list[str]] = []
    try:
        for row in reader:
            # The reader counts the lines of the list, which lacks comments and empty lines.
            places.append(lines[reader.line_num][0])
            rows.append(row)
    except csv.Error as error:
        raise source.error(f"not CSV ({error})") from error
    width = len(header)
    for place, row in zip(places, rows, strict=True):
        if len(row) != width and (len(row) < width or any(row[width:])):
            raise source.error(f"{len(row)} cells under {width} names; complete, quote or remove the line", place)
    return _Table(source, delimiter, header, places, rows)


def _delimiter(lines: Sequence[str]) -> tuple[str, int]:
    """Return the mark between cells, and the index of the header.

    That is the mark that the first line names (``sep=;``), or the one that cuts header and first row alike.
    """
    named = _SEPARATOR.fullmatch(lines[0]) if lines else None
    if named is not None:
        return named[1] or "\t", 1
    widths = {mark: [len(_cells(line, mark)) for line in lines[:2]] for mark in ",;\t"}
    alike = [mark for mark in ",;\t" if min(widths[mark], default=0) > 1 and len(set(widths[mark])) == 1]
    return max(alike or ",;\t", key=lambda mark: widths[mark]), 0


def _cells(line: str, delimiter: str) -> list[str]:
    """Return the cells of a header; none if its quotes or its length are not those of a header."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _find_rate(table: _Table) -> tuple[int, float]:
    """Return the column of the rate, and the bytes per second in one of its units."""
    source, header, said = table.source, table.header, table.source.said
    if said.rate is not None:
        index = _named(table, said.rate)
    else:
        likely = find_rates(header)
        if len(likely) != 1:
            which = "more than one column may be the rate" if likely else "no column is a rate"
            hint = ", ".join(header[index] for index in likely or find_related(header))
            raise source.question(f"{which} ({hint[:120] or _list(header)})", "--rate-column", "NAME")
        index = likely[0]
    unit = ColumnName.of(header[index]).rate if said.unit is None else rate_unit(said.unit)
    if said.unit is not None and not unit:
        known = ", ".join(BYTES_PER_SECOND)
        raise source.question(f"unknown unit {said.unit[:40]!r}; known are {known}", "--unit", "UNIT")
    if not unit:
        problem = "could be of bits or of bytes" if unit == "" else "is not in its name"
        raise source.question(f"the unit of column {header[index]!r} {problem}", "--unit", "UNIT")
    return index, BYTES_PER_SECOND[unit]


def _find_times(table: _Table) -> tuple[int | None, int | None]:
    """Return the columns with the start and the end of a row; None if there is none."""
    source, header, said = table.source, table.header, table.source.said
    if said.step_s is not None:
        if not (math.isfinite(said.step_s) and said.step_s > 0):
            raise source.error(f"a step of {said.step_s} s; give a positive number")
        return None, None
    time = find_time(header) if said.time is None else _named(table, said.time)
    if time is None:
        raise source.question(f"no column is a time, and no --step is given ({_list(header)})", "--time-column", "NAME")
    return time, find_end(header) if said.end is None else _named(table, said.end)


def _named(table: _Table, name: str) -> int:
    for index, cell in enumerate(table.header):
        if cell.lower() == name.strip().lower():
            return index
    raise table.source.error(f"no column {name!r} ({_list(table.header)})")


def _list(header: Sequence[str]) -> str:
    return f"columns: {', '.join(header)[:200]}"


def _mark(table: _Table, columns: Sequence[int], factor: float) -> Mark:
    """Return the decimal mark of the numbers in these columns.

    ``factor`` is of the rate. In a small unit rates are whole numbers: three digits after a mark may be thousands.
    """
    source = table.source
    if source.said.decimal is not None:
        return source.said.decimal
    mark, proven = decimal_mark(list(_numeric(table, columns)), table.delimiter)
    if mark is None or (not proven and factor < BYTES_PER_SECOND["Mbit/s"]):
        raise source.question("a mark in its numbers may be decimal or of thousands", "--decimal", "MARK")
    return mark


def _numeric(table: _Table, columns: Sequence[int]) -> Iterator[list[str]]:
    """Yield the cells of each of the columns that begins with a number, not with a date."""
    for column in columns:
        cells = table.cells(column)
        if any(_NUMERIC.fullmatch(cell) for cell in cells[:20]):
            yield cells


def _numbers(table: _Table, column: int, mark: Mark) -> list[float | None]:
    """Return the numbers of a column; None where one is missing."""
    cells = _pointed(table.cells(column), mark)
    values = [number(text) for text in cells]
    for index, value in enumerate(values):
        if value is None and cells[index].lower() not in MISSING:
            table.source.number(cells[index], table.header[column], table.places[index])
        elif value is not None and math.isnan(value):
            values[index] = None
    return values


def _pointed(cells: list[str], mark: Mark) -> list[str]:
    return with_point(cells, mark) if mark == "comma" or "," in "".join(cells) else cells


def _times(table: _Table, column: int, mark: Mark, other: int | None) -> list[float]:
    """Return the seconds of a column with numbers or with calendar timestamps (UTC unless they have a time zone).

    ``other`` is the column with the other end of the rows, if there is one.
    """
    source, name, cells = table.source, table.header[column], table.cells(column)
    numeric = _pointed(cells, mark)
    if number(numeric[0]) is not None:
        unit = _unit(table, ColumnName.of(name), source.said)
        if unit is None and other is not None:
            unit = ColumnName.of(table.header[other]).time
        times = source.numbers(numeric, name, table.places)
        others = (
            None
            if other is None
            else source.numbers(_pointed(table.cells(other), mark), table.header[other], table.places)
        )
        return seconds(source, times, unit, others)
    found: list[float] = []
    for place, text in zip(table.places, cells, strict=True):
        time = calendar(text)
        if time is None:
            what = f"{name} is {text[:40]!r}, neither a number nor a time as in the first row ({FORMS})"
            raise source.error(f"{what}; correct or remove the line", place)
        found.append(time)
    return found


def _unit(table: _Table, name: ColumnName, said: Columns) -> str | None:
    """Return the unit of a column of numeric times, a key of `TIME_UNITS`; None if it is not given."""
    unit = name.time if said.time_unit is None else time_unit(said.time_unit)
    if unit is None and (said.time_unit is not None or name.strange):
        given, known = (said.time_unit or name.strange)[:40], ", ".join(TIME_UNITS)
        raise table.source.question(f"unknown unit of time {given!r}; known are {known}", "--time-unit", "UNIT")
    return unit
