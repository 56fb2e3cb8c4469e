"""The CSV of iperf 2 (``-y C``), one line per interval.

    20230412104020,10.0.0.2,40000,10.0.0.1,5001,3,0.0-1.0,1179648,9437184

The columns are time, addresses and ports, stream, interval, bytes, and bits per second. Receivers of datagrams append
jitter and loss. Stream -1 is the sum of parallel streams. The total at the end is skipped. Source:
https://sourceforge.net/projects/iperf2/, src/Reports.c (reportstyle CSV).
"""

from __future__ import annotations

import re

from kvabr.replay.readers.names import BYTES_PER_SECOND
from kvabr.replay.readers.source import Head, Sample, TraceFile, build
from kvabr.replay.trace import Trace

_ROW = re.compile(
    r"[-+:.\d]{14,40},(?P<from>[^,]*,\d*),(?P<to>[^,]*,\d*),(?P<id>-?\d+),"
    r"(?P<start>\d+\.\d+)-(?P<end>\d+\.\d+),\d+,(?P<rate>-?\d+)(?P<datagrams>(?:,[^,]*)*)"
)
_LOSS_CELL = 4
"""Index, among the appended cells, of the percentage of lost datagrams."""


def is_iperf2_csv(head: Head) -> bool:
    """Return True if a file looks like this format."""
    return bool(head.rows) and all(_ROW.fullmatch(line) for line in head.rows)


def parse_iperf2_csv(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` for invalid lines, or several streams without a sum."""
    rows = []
    for place, text in source.rows():
        found = _ROW.fullmatch(text)
        if found is None:
            raise source.error(f"{text[:40]!r} is not a line of `iperf -y C`", place)
        rows.append((place, found))
    if any(found["id"] == "-1" for _, found in rows):
        rows = [(place, found) for place, found in rows if found["id"] == "-1"]
    carried, samples, streams = 1.0, list[Sample](), set[tuple[str, str]]()
    for place, found in rows:
        start, end, rate = (source.number(found[name], f"the {name}", place) for name in ("start", "end", "rate"))
        cells = found["datagrams"].split(",")
        if samples and start <= samples[0].start:
            if len(cells) > _LOSS_CELL and not rows[0][1]["datagrams"]:
                # The receiver's report, which a sender of datagrams prints at the end.
                carried = 1 - source.number(cells[_LOSS_CELL], "the share of lost datagrams", place) / 100
            elif end <= samples[0].end:
                raise source.error("it has two tests, or both directions of one; keep the lines of one", place)
            continue
        streams.add((found["id"], found["to"]))
        samples.append(Sample(place, start, end, rate * BYTES_PER_SECOND["bit/s"]))
    if len(streams) > 1:
        raise source.error("it has several streams and no sum; keep the lines of one")
    return [build(source, [sample._replace(rate=sample.rate * carried) for sample in samples])]
