"""Common parts of all readers: text of bounded size, its numbers, and conversion of samples to a `Trace`.

Only `Trace` validates samples, and `build` adds file and line to its errors. An ambiguous file raises
`TraceFile.question`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvabr.replay.readers.numerals import Mark, number
from kvabr.replay.trace import SegmentError, Trace
from kvabr.types.errors import TraceError, TraceQuestionError

MAX_FILE_BYTES = 64 << 20
MAX_LINES = 8_000_000

MAX_ROWS = 1_000_000
GAP_STEPS = 10
"""A step longer than this multiple of the median step is a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The user's description of a file; fields that are None are detected."""

    time: str | None = None
    end: str | None = None
    rate: str | None = None
    counter: str | None = None
    """Name of a column with a running total, to convert to a rate."""
    unit: str | None = None
    """Unit of the rate or counter, in any spelling known to `kvabr.replay.readers.names`."""
    time_unit: str | None = None
    """Unit of numeric times, in any spelling known to `kvabr.replay.readers.names`."""
    decimal: Mark | None = None
    step_s: float | None = None
    """Seconds per row, in a file without times."""

    @property
    def of_csv(self) -> bool:
        """True if a field applies only to files with named columns."""
        answers = (self.time, self.end, self.rate, self.counter, self.decimal, self.step_s)
        return any(answer is not None for answer in answers)


class Rows(NamedTuple):
    """Times and rates of rows, by column for efficiency."""

    places: Sequence[int]
    """Line numbers, from 1."""
    starts: Sequence[float]
    ends: Sequence[float] | None
    rates: Sequence[float | None]
    """Rates in bytes per second, or None."""


class Sample(NamedTuple):
    """One segment of a trace as given in a file."""

    place: int
    """Line number, or index of the entry in JSON, from 1."""
    start: float
    end: float
    """End in seconds; each sample but the last ends where the next one starts."""
    rate: float


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, for detecting its format."""

    text: str
    lines: list[str]
    """First lines, stripped, without empty lines."""
    rows: list[str]
    """First lines without comments (``#``)."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The text of one file, and the names of its traces."""

    path: Path
    text: str
    name: str
    family: str
    said: Columns = field(default_factory=Columns)

    def error(self, problem: str, place: int | None = None, unit: str = "line") -> TraceError:
        """Return an error that names the file and, if known, the line (or JSON entry)."""
        where = "" if place is None else f"{unit} {place}: "
        return TraceError(f"{self.path}: {where}{problem}")

    def question(self, problem: str, option: str, value: str) -> TraceQuestionError:
        """Return an error about an ambiguity, with the option that resolves it."""
        how = f"`kvabr traces import {self.path} {option} {value} --out DIR`"
        return TraceQuestionError(f"{self.path}: {problem}; give {option}: {how}", option)

    def lines(self) -> list[tuple[int, str]]:
        """Return the stripped lines that are neither empty nor comments (``#``), with their numbers from 1."""
        lines = self.text.splitlines()
        if len(lines) > MAX_LINES:
            raise self.error(f"{len(lines)} lines, more than the {MAX_LINES} allowed; cut the file in pieces")
        # A leading tab means an empty first cell.
        stripped = [line.strip(" \r\v\f") for line in lines]
        kept = [not line.startswith("#") and not line.isspace() and line != "" for line in stripped]
        return list(compress(zip(count(1), stripped, strict=False), kept))

    def rows(self) -> list[tuple[int, str]]:
        """Return `lines` of a file with one row per line; raise `TraceError` for more than `MAX_ROWS`."""
        lines = self.lines()
        if len(lines) > MAX_ROWS:
            raise self.error(f"{len(lines)} rows, more than the {MAX_ROWS} allowed; cut the file in pieces")
        return lines

    def json(self) -> Any:
        """Return the text as JSON values; raise `TraceError` if it is not JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"not valid JSON ({error}); is the file complete?") from error

    def number(self, value: Any, what: str, place: int, unit: str = "line") -> float:
        """Convert text or a JSON number to a float, which may not be finite; raise `TraceError` for other values."""
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                found = number(value) if isinstance(value, str) else float(value)
            except OverflowError:
                found = None
            if found is not None:
                return found
        shown = str(value)[:40]
        raise self.error(f"{what} is {shown!r}, not a number; correct or remove it", place, unit)

    def numbers(self, values: Sequence[str], what: str, places: Sequence[int]) -> list[float]:
        """Convert texts to floats, like `number`."""
        found = [number(value) for value in values]
        if None in found:
            index = found.index(None)
            self.number(values[index], what, places[index])
        return found  # type: ignore[return-value]  # no value is None


def build(
    source: TraceFile, samples: Sequence[Sample], *, session: str = "", rtt_s: float | None = None, unit: str = "line"
) -> Trace:
    """Build a trace from samples in file order, shifted to start at 0; raise `TraceError` with file and line.

    ``session`` is a suffix that distinguishes the traces of a file; ``unit`` says what `Sample.place` counts: ``line``
    or JSON ``entry``.
    """
    if not samples:
        raise source.error("it has no samples; a trace needs at least one")
    places, starts, ends, rates = zip(*samples, strict=True)
    return _trace(source, places, starts, rates, ends[-1], session=session, rtt_s=rtt_s, unit=unit)


def _trace(
    source: TraceFile,
    places: Sequence[int],
    starts: Sequence[float],
    rates: Sequence[float],
    end: float,
    *,
    session: str = "",
    rtt_s: float | None = None,
    unit: str = "line",
) -> Trace:
    origin = starts[0]
    # Floats of seconds since 1970 have a resolution of a quarter of a microsecond.
    shifted = starts if origin == 0 else [_microseconds(start - origin) for start in starts]
    try:
        return Trace(
            name=source.name + session,
            family=source.family,
            times=tuple(shifted),
            rates=tuple(rates),
            duration_s=end if origin == 0 else _microseconds(end - origin),
            rtt_s=rtt_s,
        )
    except SegmentError as error:
        raise source.error(error.problem, places[error.segment], unit) from error
    except TraceError as error:
        raise TraceError(f"{source.path}: {error}") from error


def hold(rows: Sequence[tuple[int, float, float]], lone_s: float = 1.0) -> list[Sample]:
    """Convert rows (line, time s, bytes per second) to samples; each rate holds until the next row.

    The last rate holds for the median step, and a single row for ``lone_s``, so that every row is used.
    """
    step = median_step([time for _, time, _ in rows], lone_s)
    ends = [time for _, time, _ in rows[1:]] + [rows[-1][1] + step] if rows else []
    return [Sample(line, time, end, rate) for (line, time, rate), end in zip(rows, ends, strict=True)]


def split(source: TraceFile, rows: Rows, *, least_gap_s: float = 0.0) -> list[Trace]:
    """Build one trace from rows, or, if there are gaps, several with names that end in ``-0001`` and so on.

    A row lasts until its end or the next row. A gap longer than both `GAP_STEPS` median steps and ``least_gap_s``
    splits the file; during a shorter gap the last rate holds. A row without a rate also splits the file, since a
    missing sample does not mean zero. Pieces with only zero rates are dropped if other pieces remain.

    Raises:
        TraceError: no row has a rate, a row ends before it starts, or the samples of a piece are not valid.
    """
    pieces = list(_pieces(source, rows, least_gap_s))
    if not pieces:
        raise source.question("no row has a rate", "--rate-column", "NAME")
    carrying = [piece for piece in pieces if any(rows.rates[piece.first : piece.stop])] or pieces
    return [
        _trace(
            source,
            rows.places[piece.first : piece.stop],
            rows.starts[piece.first : piece.stop],
            [rate for rate in rows.rates[piece.first : piece.stop] if rate is not None],
            piece.end,
            session="" if len(carrying) == 1 else f"-{index:04d}",
        )
        for index, piece in enumerate(carrying, 1)
    ]


class _Piece(NamedTuple):
    first: int
    stop: int
    end: float


def _pieces(source: TraceFile, rows: Rows, least_gap_s: float) -> Iterator[_Piece]:
    places, starts, ends, rates = rows
    if ends is None:
        step = median_step(starts)
        held = max(GAP_STEPS * step, least_gap_s)
        # The last rate before a jump holds for the median step.
        lasts = [after if 0 < after - start <= held else start + step for start, after in pairwise(starts)]
        lasts.append(starts[-1] + step)
    else:
        for place, start, end in zip(places, starts, ends, strict=True):
            if end <= start:
                raise source.error("the row ends before it starts; correct or remove it", place)
        steps = [after - start for start, after in pairwise(starts) if after > start]
        step = statistics.median_low(steps or [end - start for start, end in zip(starts, ends, strict=True)])
        held = max(GAP_STEPS * step, least_gap_s)
        # A short gap belongs to the row before it. If rows overlap, a row ends at the next one.
        lasts = [
            after if start < after <= end + held else end
            for start, end, after in zip(starts, ends, starts[1:], strict=False)
        ]
        lasts.append(ends[-1])
    jumps = [index for index, (after, end) in enumerate(zip(starts[1:], lasts, strict=False)) if after > end]
    missing = [index for index, rate in enumerate(rates) if rate is None]
    first = 0
    for last in sorted({*jumps, *missing, len(rates) - 1}):
        stop = last if rates[last] is None else last + 1
        if stop > first:
            yield _Piece(first, stop, lasts[stop - 1])
        first = last + 1


def median_step(times: Sequence[float], lone_s: float = 1.0) -> float:
    """Return the median of the positive steps between ``times``; ``lone_s`` if there are none."""
    steps = [later - time for time, later in pairwise(times) if later > time]
    return statistics.median(steps) if steps else lone_s


def _microseconds(time: float) -> float:
    return round(time, 6) if math.isfinite(time) else time
