"""Shared by all readers: a bounded text, numbers from it, and the way from samples to a `Trace`.

A reader turns text into `Sample`s. `Trace` alone validates them, and `build` adds file and line to its errors.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvabr.replay.trace import BYTES_PER_MBIT, SegmentError, Trace
from kvabr.types.errors import TraceError

MAX_FILE_BYTES = 64 << 20
"""Largest trace file that is read, bytes."""
MAX_LINES = 8_000_000
"""Most lines of a trace file."""

BYTES_PER_SECOND = {
    "bit/s": 1 / 8,
    "kbit/s": BYTES_PER_MBIT / 1000,
    "Mbit/s": BYTES_PER_MBIT,
    "Gbit/s": BYTES_PER_MBIT * 1000,
    "byte/s": 1.0,
    "kbyte/s": 1e3,
    "Mbyte/s": 1e6,
    "Gbyte/s": 1e9,
}
"""Units of rate, as bytes per second."""


class Sample(NamedTuple):
    """One segment of a trace as a file gives it."""

    place: int
    """Line of the file, or index of the entry in JSON, from 1."""
    start: float
    """Seconds, from any origin."""
    end: float
    """Seconds; only the last sample's counts, since each sample reaches to the start of the next."""
    rate: float
    """Bytes per second."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, by which its format is recognised."""

    text: str
    """The text, without leading white space."""
    lines: list[str]
    """Its lines, stripped, without empty ones."""
    rows: list[str]
    """The first of these lines that are not comments (``#``)."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The text of one file, and the names of its traces."""

    path: Path
    text: str
    name: str
    family: str

    def error(self, problem: str, place: int | None = None, unit: str = "line") -> TraceError:
        """Return an error that names the file and, if known, the line (or JSON entry)."""
        where = "" if place is None else f"{unit} {place}: "
        return TraceError(f"{self.path}: {where}{problem}")

    def lines(self) -> list[tuple[int, str]]:
        """Return the lines that are neither empty nor comments (``#``), stripped, with their numbers from 1."""
        lines = self.text.splitlines()
        if len(lines) > MAX_LINES:
            raise self.error(f"{len(lines)} lines, more than the {MAX_LINES} allowed; cut the file in pieces")
        return [
            (number, stripped)
            for number, line in enumerate(lines, 1)
            if (stripped := line.strip()) and not stripped.startswith("#")
        ]

    def json(self) -> Any:
        """Return the text as JSON values.

        Raises:
            TraceError: the text is not JSON.
        """
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"not valid JSON ({error}); is the file complete?") from error

    def number(self, value: Any, what: str, place: int, unit: str = "line") -> float:
        """Return ``value``, text or a JSON number, as a float; `Trace` refuses it later if it is not finite.

        Raises:
            TraceError: ``value`` is not a number.
        """
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
        shown = str(value)[:40]
        raise self.error(f"{what} is {shown!r}, not a number; correct or remove it", place, unit)


def build(
    source: TraceFile, samples: Sequence[Sample], *, session: str = "", rtt_s: float | None = None, unit: str = "line"
) -> Trace:
    """Make a trace of samples, shifted so that the first one starts at 0.

    Args:
        source: the file that the samples came from.
        samples: in the order of the file.
        session: suffix that tells this trace from the others of the file.
        rtt_s: round-trip time, seconds.
        unit: what `Sample.place` counts: lines, or entries of a JSON list.

    Raises:
        TraceError: the samples do not make a valid `Trace`; the message names the file and the line.
    """
    if not samples:
        raise source.error("it has no samples; a trace needs at least one")
    origin = samples[0].start
    # Seconds since 1970 as a float are good to a quarter of a microsecond; finer digits are noise of the subtraction.
    shift = (lambda time: time) if origin == 0 else (lambda time: _microseconds(time - origin))
    try:
        return Trace(
            name=source.name + session,
            family=source.family,
            times=tuple(shift(sample.start) for sample in samples),
            rates=tuple(sample.rate for sample in samples),
            duration_s=shift(samples[-1].end),
            rtt_s=rtt_s,
        )
    except SegmentError as error:
        raise source.error(error.problem, samples[error.segment].place, unit) from error
    except TraceError as error:
        raise TraceError(f"{source.path}: {error}") from error


def hold(rows: Sequence[tuple[int, float, float]], lone_s: float = 1.0) -> list[Sample]:
    """Return samples from rows that only say when they begin: each rate holds until the next row's time.

    How long the last rate held is unknown; it gets the median step, so that no row is lost.

    Args:
        rows: (line, time s, bytes per second).
        lone_s: length of a single row, seconds.
    """
    step = median_step([time for _, time, _ in rows], lone_s)
    ends = [time for _, time, _ in rows[1:]] + [rows[-1][1] + step] if rows else []
    return [Sample(line, time, end, rate) for (line, time, rate), end in zip(rows, ends, strict=True)]


def median_step(times: Sequence[float], lone_s: float = 1.0) -> float:
    """Return the median of the positive steps between ``times``; ``lone_s`` if there are none."""
    steps = [later - time for time, later in pairwise(times) if later > time]
    return statistics.median(steps) if steps else lone_s


def _microseconds(time: float) -> float:
    return round(time, 6) if math.isfinite(time) else time
