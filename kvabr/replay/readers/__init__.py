"""Read network traces from files.

`find` searches folders for trace files; `read` reads a file. Files are untrusted: their size is bounded, every number
is checked, and every error names the file, the line and the fix. Ambiguous files raise `TraceQuestionError`, which
names the ``kvabr traces`` option that resolves the ambiguity. To add a format, write its two functions and add an entry
to ``_FORMATS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kvabr.replay.readers import (
    csv_format,
    iperf2_csv,
    iperf3,
    iperf_text,
    line_formats,
    native,
    plausible,
    sabre,
)
from kvabr.replay.readers.names import BYTES_PER_SECOND, TIME_UNITS
from kvabr.replay.readers.source import MAX_FILE_BYTES, Columns, Head, TraceFile
from kvabr.replay.trace import Trace
from kvabr.store.files import open_regular
from kvabr.types.errors import MissingTraceError, TraceError

__all__ = ["BYTES_PER_SECOND", "FORMATS", "TIME_UNITS", "Columns", "find", "read", "sniff"]


class TraceFormat(NamedTuple):
    matches: Callable[[Head], bool]
    parse: Callable[[TraceFile], list[Trace]]


_FORMATS: dict[str, TraceFormat] = {
    "kvabr": TraceFormat(native.is_native, native.parse),
    "sabre": TraceFormat(sabre.is_sabre, sabre.parse_sabre),
    "iperf3": TraceFormat(iperf3.is_iperf3, iperf3.parse_iperf3),
    "iperf-text": TraceFormat(iperf_text.is_iperf_text, iperf_text.parse_iperf_text),
    "iperf2-csv": TraceFormat(iperf2_csv.is_iperf2_csv, iperf2_csv.parse_iperf2_csv),
    "mahimahi": TraceFormat(line_formats.is_mahimahi, line_formats.parse_mahimahi),
    "pensieve": TraceFormat(line_formats.is_pensieve, line_formats.parse_pensieve),
    "values": TraceFormat(line_formats.is_values, line_formats.parse_values),
    "csv": TraceFormat(csv_format.is_csv, csv_format.parse_csv),
}
FORMATS = tuple(_FORMATS)

_WITH_UNITS = ("csv", "pensieve")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_HEAD_BYTES = 65536
_HEAD_LINES = 20
_PROSE = ("readme", "source", "license", "licence", "copying", "notice", "changelog", "authors", "citation")
_OTHER = (".md", ".rst", ".py", ".sh", ".html", ".htm", ".pdf", ".png", ".svg", ".gz", ".xz", ".zip", ".tar")
_DATA = (".csv", ".tsv", ".json", ".txt", ".log", ".trace")
"""Suffixes to remove from a trace's name; other suffixes (``.down``, ``.up``) distinguish traces."""


def find(paths: Iterable[Path]) -> list[Path]:
    """Return the trace files in ``paths``, which are files or folders; each file once, in a fixed order.

    Folders are searched with subfolders, but without hidden files, prose (README, SOURCE.txt, ...), files of unknown
    formats, and links to folders. Raise `MissingTraceError` if a path does not exist, or a folder has no trace.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = [file for file in _walk(path) if _may_be_trace(file)]
            if not inside:
                raise MissingTraceError(f"{path}: no traces in this folder (formats: {', '.join(FORMATS)})")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise MissingTraceError(f"{path}: no such file or folder")
    return list(found)


def sniff(path: Path) -> str | None:
    """Return a file's format from its beginning, a name in `FORMATS`; None if it is not a trace.

    Raise `TraceError` if it cannot be read.
    """
    head, cut = _head(_bytes(path, _HEAD_BYTES + 1))
    return None if head is None else _sniff_text(head, cut=cut)


def read(path: Path, *, format_name: str | None = None, columns: Columns | None = None) -> list[Trace]:
    """Return the traces in one file: one trace, or several sessions with names that end in ``-0001`` and so on.

    A trace's family is the data set's folder: the nearest of up to three parent folders with a ``SOURCE.txt``, or the
    file's own folder. Its name is the path from there. Files in kvabr's own format may contain both. ``format_name`` is
    one of `FORMATS`; ``columns`` resolve ambiguities, and imply CSV.

    Raises:
        MissingTraceError: the file is empty, or in no known format.
        TraceQuestionError: the file is ambiguous, or its numbers are implausible.
        TraceError: the file is not an ordinary file or is too large; or its samples are empty, unsorted, negative, not
            finite, or all zero.
    """
    said = columns or Columns()
    if said.of_csv and format_name is None:
        format_name = "csv"
    if format_name is not None and format_name not in FORMATS:
        raise TraceError(f"unknown trace format {format_name!r}; choose from {', '.join(FORMATS)}")
    family, name = _names(path)
    source = TraceFile(path, _text(path), name, family, said)
    chosen = format_name or _sniff_text(source.text[:_HEAD_BYTES], cut=len(source.text) > _HEAD_BYTES)
    if chosen is None and not source.lines():
        raise MissingTraceError(
            f"{path}: is empty; a trace needs at least one sample, so record it again or leave it out"
        )
    if chosen is None:
        raise MissingTraceError(
            f"{path}: unknown trace format; convert it with `kvabr traces import {path} --format F --out FOLDER`, "
            f"where F is one of {', '.join(FORMATS)}; for CSV, its options name the columns"
        )
    traces = _FORMATS[chosen].parse(source)
    if chosen in _WITH_UNITS:
        times_said = said.time_unit is not None or said.step_s is not None
        plausible.check(
            source,
            traces,
            rate_option="" if said.unit is not None else "--unit",
            time_option="" if times_said else "--time-unit",
        )
    elif chosen != "kvabr" and format_name is None:
        plausible.check(source, traces, rate_option="--format", time_option="--format", value=chosen)
    return traces


def _bytes(path: Path, limit: int) -> bytes:
    try:
        with open_regular(path, follow_links=True) as file:
            return file.read(limit)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); a trace must be a regular file") from error


def _text(path: Path) -> str:
    data = _bytes(path, MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise TraceError(f"{path}: more than the {MAX_FILE_BYTES} bytes allowed; is it the right file?")
    try:
        return data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); convert or unpack it first"
        ) from error


def _head(data: bytes) -> tuple[str | None, bool]:
    cut, data = len(data) > _HEAD_BYTES, data[:_HEAD_BYTES]
    if data.startswith(_UTF_16):
        return data.decode("utf-16", errors="ignore"), cut
    return None if b"\0" in data else data.decode("utf-8-sig", errors="ignore"), cut


def _sniff_text(text: str, *, cut: bool) -> str | None:
    lines = [line.strip(" \r\v\f") for line in text.splitlines() if line.strip()]
    if cut:
        lines = lines[:-1]
    rows = [line for line in lines if not line.startswith("#")][:_HEAD_LINES]
    head = Head(text.lstrip(), lines, rows)
    return next((name for name, known in _FORMATS.items() if known.matches(head)), None)


def _may_be_trace(path: Path) -> bool:
    try:
        return sniff(path) is not None
    except TraceError:
        return True


def _walk(folder: Path) -> Iterable[Path]:
    def fail(error: OSError) -> None:
        raise TraceError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for root, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            prose = name.lower().startswith(_PROSE) or name.lower().endswith(_OTHER)
            if not name.startswith(".") and not prose and path.is_file():
                yield path


def _names(path: Path) -> tuple[str, str]:
    where = Path(os.path.normpath(path.absolute()))
    above = list(where.parents)[:3]
    home = next((folder for folder in above if (folder / "SOURCE.txt").is_file()), where.parent)
    inside = where.relative_to(home).as_posix()
    stem = next((inside.removesuffix(end) for end in _DATA if inside.lower().endswith(end)), inside)
    family = home.name or "traces"
    return family, f"{family}/{stem}"
