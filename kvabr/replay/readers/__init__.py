"""Read network traces from files.

`find` walks folders for files that look like traces, `read` reads one. Files are untrusted: their size is bounded,
every number is checked, nothing is executed, and every error names the file, the line and the fix. To add a format,
write its two functions and one entry of ``_FORMATS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kvabr.replay.readers import csv_format, json_formats, line_formats, native
from kvabr.replay.readers.csv_format import TIME_UNITS, Columns
from kvabr.replay.readers.source import BYTES_PER_SECOND, MAX_FILE_BYTES, Head, TraceFile
from kvabr.replay.trace import Trace
from kvabr.store.files import read_text
from kvabr.types.errors import MissingTraceError, TraceError

__all__ = ["BYTES_PER_SECOND", "FORMATS", "TIME_UNITS", "Columns", "find", "read", "sniff"]


class TraceFormat(NamedTuple):
    """A format of trace files."""

    matches: Callable[[Head], bool]
    """Returns whether a file that begins like this has the format."""
    parse: Callable[[TraceFile], list[Trace]]


_FORMATS: dict[str, TraceFormat] = {
    "kvabr": TraceFormat(native.is_native, native.parse),
    "sabre": TraceFormat(json_formats.is_sabre, json_formats.parse_sabre),
    "iperf3": TraceFormat(json_formats.is_iperf3, json_formats.parse_iperf3),
    "mahimahi": TraceFormat(line_formats.is_mahimahi, line_formats.parse_mahimahi),
    "pensieve": TraceFormat(line_formats.is_pensieve, line_formats.parse_pensieve),
    "values": TraceFormat(line_formats.is_values, line_formats.parse_values),
    "csv": TraceFormat(csv_format.is_csv, csv_format.parse_csv),
}
"""Formats by name. A file has the first one that matches."""
FORMATS = tuple(_FORMATS)
"""Names of the formats that can be read."""

_HEAD_BYTES = 65536
_HEAD_LINES = 20
_PROSE = ("readme", "source", "license", "licence", "copying", "notice", "changelog", "authors", "citation")
_OTHER = (".md", ".rst", ".py", ".sh", ".html", ".htm", ".pdf", ".png", ".svg", ".gz", ".xz", ".zip", ".tar")
_DATA = (".csv", ".tsv", ".json", ".txt", ".log", ".trace")
"""Suffixes that are removed from a trace's name; others (``.down``, ``.up``) tell traces apart."""


def find(paths: Iterable[Path]) -> list[Path]:
    """Return the files among ``paths`` and in the folders among them, each once, in a fixed order.

    Files that are named are always taken. In folders and their subfolders, hidden files, prose (README, SOURCE.txt,
    ...) and files of unknown formats are skipped, and links to folders are not followed.

    Raises:
        MissingTraceError: a path does not exist, or a folder holds no trace.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = [file for file in _walk(path) if sniff(file) is not None]
            if not inside:
                raise MissingTraceError(f"{path}: no traces in this folder (formats: {', '.join(FORMATS)})")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise MissingTraceError(f"{path}: no such file or folder")
    return list(found)


def sniff(path: Path) -> str | None:
    """Return the format of a file by its beginning, a name in `FORMATS`; None if it looks like no trace.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    if b"\0" in head:
        return None
    return _sniff_text(head.decode("utf-8-sig", errors="ignore"), cut=len(head) == _HEAD_BYTES)


def read(path: Path, *, format_name: str | None = None, columns: Columns | None = None) -> list[Trace]:
    """Return the traces in one file: one, or several sessions named ``-0001`` and so on.

    A trace's family is the data set's folder: the nearest of up to three above the file that holds a ``SOURCE.txt``, or
    the file's own. Its name is the path from that folder on. kvabr's own files may name both themselves.

    Args:
        path: the file.
        format_name: a name in `FORMATS`, if the file's content does not show it.
        columns: columns that the file's header does not show; implies CSV.

    Raises:
        MissingTraceError: it is empty, or looks like no trace.
        TraceError: too large; or its samples are empty, unsorted, negative, not finite, or all zero.
    """
    if columns is not None and format_name is None:
        format_name = "csv"
    if format_name is not None and format_name not in FORMATS:
        raise TraceError(f"unknown trace format {format_name!r}; known are {', '.join(FORMATS)}")
    family, name = _names(path)
    text = read_text(path, MAX_FILE_BYTES, unreadable=TraceError, unfit=TraceError)
    source = TraceFile(path, text, name, family)
    chosen = format_name or _sniff_text(source.text[:_HEAD_BYTES], cut=len(source.text) > _HEAD_BYTES)
    if chosen is None:
        what = "looks like no trace format that is known" if source.text.strip() else "it is empty"
        raise MissingTraceError(
            f"{path}: {what}; `kvabr traces import {path} --format F --out FOLDER` converts it: F is one of "
            f"{', '.join(FORMATS)}, and for CSV its options name the columns"
        )
    if chosen == "csv":
        return csv_format.parse_csv(source, columns)
    return _FORMATS[chosen].parse(source)


def _sniff_text(text: str, *, cut: bool) -> str | None:
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    if cut:
        lines = lines[:-1]
    rows = [line for line in lines if not line.startswith("#")][:_HEAD_LINES]
    head = Head(text.lstrip(), lines, rows)
    return next((name for name, known in _FORMATS.items() if known.matches(head)), None)


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
    """Return the family and the name of a file's trace."""
    where = Path(os.path.normpath(path.absolute()))
    above = list(where.parents)[:3]
    home = next((folder for folder in above if (folder / "SOURCE.txt").is_file()), where.parent)
    inside = where.relative_to(home).as_posix()
    stem = next((inside.removesuffix(end) for end in _DATA if inside.lower().endswith(end)), inside)
    family = home.name or "traces"
    return family, f"{family}/{stem}"
