"""kvabr's own format: CSV that spreadsheets can read, lossless; truncation can be detected.

    # kvabr.trace/1
    # name: lte/walk
    # family: lte
    # rtt_s: 0.05
    # note: how it was made
    time_s,bits_per_second
    0,12000000
    0.5,9100000
    300,end

Each rate holds until the next row. The last row has the trace's end and the word ``end``; a truncated file does not
have this row. Numbers are the shortest that read back as the same float, and multiplying a float by eight is exact, so
`parse` inverts `kvabr_lab.cli.traces.dumps`. ``rtt_s`` and ``note`` are optional.
"""

from __future__ import annotations

import re

from kvabr.replay.readers.names import BYTES_PER_SECOND
from kvabr.replay.readers.source import Head, TraceFile, build, hold
from kvabr.replay.trace import Trace

MAGIC = "# kvabr.trace/1"
COLUMNS = "time_s,bits_per_second"
_NAME = re.compile(r"[^\x00-\x1f\x7f\\]{1,1000}")


def is_native(head: Head) -> bool:
    """Return True if a file looks like any version of this format."""
    return bool(head.lines) and head.lines[0].startswith(MAGIC.rpartition("/")[0] + "/")


def parse(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` if it has a newer version, is truncated, or is not of this format."""
    first = source.text.lstrip().partition("\n")[0].strip()
    if first != MAGIC:
        raise source.error(
            f"begins with {first[:40]!r}, this version reads {MAGIC!r}; is it the right file, or do you need a newer "
            "kvabr?"
        )
    fields = _fields(source)
    lines = source.lines()
    if not lines or lines[0][1] != COLUMNS:
        raise source.error(f"the columns must be {COLUMNS}")
    rows = []
    end: float | None = None
    for line, text in lines[1:]:
        time, comma, rate = text.partition(",")
        if end is not None or not comma:
            raise source.error(f"{text[:40]!r} is not `time,rate`, with `time,end` as the last row", line)
        now = source.number(time, "the time", line)
        if rate == "end":
            end = now
        else:
            rows.append((line, now, source.number(rate, "the rate", line) * BYTES_PER_SECOND["bit/s"]))
    if end is None:
        raise source.error("it is cut short: the last row must be `time,end`")
    samples = hold(rows)
    if samples:
        samples[-1] = samples[-1]._replace(end=end)
    named = TraceFile(source.path, source.text, fields.get("name", source.name), fields.get("family", source.family))
    rtt = fields.get("rtt_s")
    return [build(named, samples, rtt_s=None if rtt is None else source.number(rtt, "rtt_s", 1))]


def _fields(source: TraceFile) -> dict[str, str]:
    """Return the ``# key: value`` lines. Names become file names on import, so they must not leave the folder."""
    fields: dict[str, str] = {}
    for text in source.text.splitlines()[:20]:
        key, colon, value = text.removeprefix("#").partition(":")
        if text.startswith("#") and colon:
            fields.setdefault(key.strip(), value.strip())
    for key in ("name", "family"):
        if key in fields and not is_plain(fields[key]):
            raise source.error(f"the {key} {fields[key][:40]!r} must be a plain name, such as lte/walk")
    return fields


def is_plain(name: str) -> bool:
    """Return True if a trace or family may have this name, which becomes a file name on import."""
    parts = name.split("/")
    return _NAME.fullmatch(name) is not None and name == name.strip() and not {"", ".", ".."} & set(parts)
