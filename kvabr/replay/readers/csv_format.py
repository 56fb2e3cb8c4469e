"""CSV with named columns: a time (or none), a rate or a counter, and optionally an end.

`kvabr.replay.readers.names` recognises columns and units; `Columns` overrides it. Times are numbers, calendar
timestamps, or times of day with or without a column of dates. Cells are separated by commas, semicolons or tabs;
numbers have a decimal point or comma. The first line may be ``sep=;``. `split` divides rows into traces.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvabr.replay.readers.counters import growth, is_total
from kvabr.replay.readers.names import (
    BYTES_PER_SECOND,
    DATE,
    DIRECTIONS,
    TIME_UNITS,
    UP,
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
from kvabr.replay.readers.times import DAY_S, FORMS, calendar, clock, days, unit_of_dates
from kvabr.replay.trace import Trace

_SEPARATOR = re.compile(r'"?sep=(.?)"?', re.IGNORECASE)
_THOUSANDS = re.compile(r"[.,](?=\d{3}(?!\d))")
_NUMERIC = re.compile(r"[-+]?[\d.,]+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class _Table:
    source: TraceFile
    delimiter: str
    header: list[str]
    places: list[int]
    rows: list[list[str]]

    def cells(self, column: int) -> list[str]:
        return [row[column].strip() for row in self.rows]


def is_csv(head: Head) -> bool:
    """Return True if a file's header names a time and a rate, or a quantity related to a rate."""
    rows = head.rows
    if head.text.startswith(("[", "{")) or not rows:
        return False
    delimiter, first = _delimiter(rows)
    header = _cells(rows[first], delimiter) if len(rows) > first else []
    return find_time(header) is not None and bool(find_related(header))


def parse_csv(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` if a column or unit is missing or ambiguous, or a row is not a sample."""
    table = _read(source)
    counter = source.said.counter is not None
    rate, factor = _find_counter(table) if counter else _find_rate(table)
    time, end = _find_times(table)
    mark = _mark(table, [column for column in (rate, time, end) if column is not None], factor)
    rates = [None if value is None else value * factor for value in _numbers(table, rate, mark)]
    places = table.places
    if time is None:
        step = source.said.step_s or 1.0
        edges = [index * step for index in range(len(rates) + 1)]
        if counter:
            return split(source, growth(source, places, edges[:-1], rates))
        return split(source, Rows(places, edges[:-1], edges[1:], rates))
    starts = _times(table, time, mark, end)
    ends = None if end is None else _ends(table, end, time, mark, starts)
    if counter:
        return split(source, growth(source, places, ends or starts, rates))
    if ends is not None:
        return split(source, Rows(places, starts, ends, rates))
    # Loggers of cell information repeat a row for each neighbouring cell.
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
            # The CSV reader counts lines of this list, which has no comments and empty lines.
            places.append(lines[reader.line_num][0])
            rows.append(row)
    except csv.Error as error:
        raise source.error(f"not CSV ({error})") from error
    width = len(header)
    for place, row in zip(places, rows, strict=True):
        if len(row) != width and (len(row) < width or any(row[width:])):
            raise source.error(
                f"the line has {len(row)} cells, but the header has {width}; complete, quote or remove the line", place
            )
    return _Table(source, delimiter, header, places, rows)


def _delimiter(lines: Sequence[str]) -> tuple[str, int]:
    """Return the delimiter, and the index of the header line.

    The first line may name the delimiter (``sep=;``). Otherwise it must split header and first row into equally many
    cells.
    """
    named = _SEPARATOR.fullmatch(lines[0]) if lines else None
    if named is not None:
        return named[1] or "\t", 1
    widths = {mark: [len(_cells(line, mark)) for line in lines[:2]] for mark in ",;\t"}
    alike = [mark for mark in ",;\t" if min(widths[mark], default=0) > 1 and len(set(widths[mark])) == 1]
    return max(alike or ",;\t", key=lambda mark: widths[mark]), 0


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _find_rate(table: _Table) -> tuple[int, float]:
    source, header, said = table.source, table.header, table.source.said
    if said.rate is not None:
        index = _named(table, said.rate)
    else:
        likely = find_rates(header)
        for each in likely:
            _check_single(table, each)
        related = find_related(header)
        if not likely:
            for each in sorted(related, key=lambda index: ColumnName.of(header[index]).has(UP)):
                _refuse_total(table, each)
        if len(likely) != 1:
            which = "more than one column may be the rate" if likely else "no column is a rate"
            hint = ", ".join(header[index] for index in likely or related)
            raise source.question(f"{which} ({hint[:120] or _list(header)})", "--rate-column", "NAME")
        index = likely[0]
    _refuse_total(table, index)
    name = ColumnName.of(header[index])
    unit = name.rate if said.unit is None else _given_unit(table)
    foreign = name.strange or name.time
    if unit is None and foreign:
        problem = (
            f"column {header[index]!r} is in {foreign!r}, which is not a unit of rate; name another column, or add "
            "--unit"
        )
        raise source.question(problem, "--rate-column", "NAME")
    return index, _bytes_per_second(table, index, unit)


def _find_counter(table: _Table) -> tuple[int, float]:
    said = table.source.said
    if said.rate is not None:
        raise table.source.error("--counter and --rate-column both name the rate; give only one of them")
    index = _named(table, said.counter or "")
    unit = ColumnName.of(table.header[index]).counted if said.unit is None else _given_unit(table)
    return index, _bytes_per_second(table, index, unit)


def _given_unit(table: _Table) -> str:
    given = table.source.said.unit or ""
    unit = rate_unit(given)
    if not unit:
        known = ", ".join(BYTES_PER_SECOND)
        raise table.source.question(f"unknown unit {given[:40]!r}; choose from {known}", "--unit", "UNIT")
    return unit


def _bytes_per_second(table: _Table, index: int, unit: str | None) -> float:
    if not unit:
        problem = "could mean bits or bytes" if unit == "" else "is not in its name"
        raise table.source.question(f"the unit of column {table.header[index]!r} {problem}", "--unit", "UNIT")
    return BYTES_PER_SECOND[unit]


def _refuse_total(table: _Table, column: int) -> None:
    header = table.header[column]
    name = ColumnName.of(header)
    chosen = table.source.said.rate is not None
    open_name = not chosen and name.rate is None and name.words in DIRECTIONS
    values = [number(_THOUSANDS.sub("", cell)) for cell in table.cells(column)]
    if (name.counts or open_name) and is_total(values):
        problem = f"column {header!r} is a running total and not a rate: its values keep rising"
        raise table.source.question(problem, "--counter", shlex.quote(header))


def _find_times(table: _Table) -> tuple[int | None, int | None]:
    source, header, said = table.source, table.header, table.source.said
    if said.step_s is not None:
        if not (math.isfinite(said.step_s) and said.step_s > 0):
            raise source.error(f"--step must be a positive number of seconds, got {said.step_s}")
        return None, None
    time = find_time(header) if said.time is None else _named(table, said.time)
    if time is None:
        raise source.question(
            f"no column is a time, and --step is not given ({_list(header)})", "--time-column", "NAME"
        )
    end = find_end(header) if said.end is None else _named(table, said.end)
    for column in (time, end):
        if column is not None:
            _check_single(table, column)
    return time, end


def _named(table: _Table, name: str) -> int:
    for index, cell in enumerate(table.header):
        if cell.lower() == name.strip().lower():
            _check_single(table, index)
            return index
    raise table.source.error(f"no column {name!r} ({_list(table.header)})")


def _check_single(table: _Table, column: int) -> None:
    name = table.header[column]
    count = sum(cell.lower() == name.lower() for cell in table.header)
    if count > 1:
        raise table.source.error(f"{count} columns are called {name!r}; rename all but one in the header")


def _list(header: Sequence[str]) -> str:
    return f"columns: {', '.join(header)[:200]}"


def _mark(table: _Table, columns: Sequence[int], factor: float) -> Mark:
    """Return the decimal mark of the numbers in these columns.

    In units with a small ``factor``, rates are whole numbers, so a mark before three digits may separate thousands.
    """
    source = table.source
    if source.said.decimal is not None:
        return source.said.decimal
    mark, proven = decimal_mark(list(_numeric(table, columns)), table.delimiter)
    if mark is None or (not proven and factor < BYTES_PER_SECOND["Mbit/s"]):
        raise source.question("a mark in its numbers may separate decimals or thousands", "--decimal", "MARK")
    return mark


def _numeric(table: _Table, columns: Sequence[int]) -> Iterator[list[str]]:
    for column in columns:
        cells = table.cells(column)
        if any(_NUMERIC.fullmatch(cell) for cell in cells[:20]):
            yield cells


def _numbers(table: _Table, column: int, mark: Mark) -> list[float | None]:
    cells = _pointed(table.cells(column), mark)
    values = [number(text) for text in cells]
    for index, value in enumerate(values):
        if value is None and cells[index].lower() not in MISSING:
            table.source.number(cells[index], table.header[column], table.places[index])
        elif value is not None and math.isnan(value):
            values[index] = None
    if values.count(None) == len(values):
        raise table.source.error(f"column {table.header[column]!r} has no number in any row; record the trace again")
    return values


def _pointed(cells: list[str], mark: Mark) -> list[str]:
    return with_point(cells, mark) if mark == "comma" or "," in "".join(cells) else cells


def _times(table: _Table, column: int, mark: Mark, other: int | None) -> list[float]:
    """Return a column's times in seconds: numbers, calendar timestamps (UTC without a zone) or times of day.

    ``other`` is the column with the other end of the rows, if any.
    """
    source, name, cells = table.source, table.header[column], table.cells(column)
    numeric = _pointed(cells, mark)
    if number(numeric[0]) is not None:
        unit = _unit(table, ColumnName.of(name), source.said)
        if unit is None and other is not None:
            unit = ColumnName.of(table.header[other]).time
        times = source.numbers(numeric, name, table.places)
        if unit is None and _date_of(table, column) is not None and unit_of_dates(times) is None:
            problem = f"column {name!r} has {cells[0][:40]!r} next to a date; write times of day as 23:59:30"
            raise source.question(problem, "--time-unit", "UNIT")
        others = (
            None
            if other is None
            else source.numbers(_pointed(table.cells(other), mark), table.header[other], table.places)
        )
        return seconds(source, times, unit, others)
    if clock(cells[0]) is None:
        return _parsed(table, name, cells, calendar)
    date = _date_of(table, column)
    if date is None:
        return days(_parsed(table, name, cells, clock))
    dated = [f"{day} {time}" for day, time in zip(table.cells(date), cells, strict=True)]
    return _parsed(table, f"{table.header[date]} {name}", dated, calendar)


def _ends(table: _Table, column: int, start: int, mark: Mark, starts: Sequence[float]) -> list[float]:
    ends = _times(table, column, mark, start)
    if clock(table.cells(column)[0]) is None:
        return ends
    return [end + DAY_S if end < begin - DAY_S / 2 else end for begin, end in zip(starts, ends, strict=True)]


def _date_of(table: _Table, column: int) -> int | None:
    names = [ColumnName.of(name).words for name in table.header]
    return next((index for index, name in enumerate(names) if name == DATE and index != column), None)


def _parsed(table: _Table, name: str, cells: Sequence[str], parse: Callable[[str], float | None]) -> list[float]:
    found: list[float] = []
    for place, text in zip(table.places, cells, strict=True):
        time = parse(text)
        if time is None:
            what = f"{name} is {text[:40]!r}, neither a number nor a time in a known form ({FORMS})"
            raise table.source.error(f"{what}; write it in one of these forms, or remove the line", place)
        found.append(time)
    return found


def _unit(table: _Table, name: ColumnName, said: Columns) -> str | None:
    given = (said.time_unit or name.strange)[:40]
    if given.lower() == "min":
        if said.time_unit is not None:
            return "minutes"
        raise table.source.question(f"a time in {given!r} may be in minutes", "--time-unit", "minutes")
    unit = name.time if said.time_unit is None else time_unit(said.time_unit)
    if unit is None and given:
        known = ", ".join(TIME_UNITS)
        raise table.source.question(f"unknown unit of time {given!r}; choose from {known}", "--time-unit", "UNIT")
    return unit
