"""The text reports of iperf3 and iperf 2: the lines of intervals.

    [  5]   1.00-2.00   sec  11.2 MBytes  94.4 Mbits/sec    0    300 KBytes

For parallel streams the sums (``[SUM]``) are read, for a test in both directions the download, and for datagrams the
receiver's lines. If only the sender's lines are present, they are reduced by the loss in the receiver's last line.
Prefixes of bytes are powers of 1,024 (src/units.c). Omitted intervals and the summary are skipped. Source:
https://software.es.net/iperf/, src/iperf_locale.c.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvabr.replay.readers.names import BYTES_PER_SECOND
from kvabr.replay.readers.source import Head, Sample, TraceFile, build
from kvabr.replay.trace import Trace

UNITS = {
    **{f"{prefix.lower()}bits/sec": BYTES_PER_SECOND[f"{prefix}bit/s"] for prefix in ("", "k", "M", "G", "T")},
    **{f"{prefix.lower()}bytes/sec": 1024.0**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
}

_LINE = re.compile(
    r"\[ *(?P<id>\d+|SUM)\](?:\[(?P<role>[RT]X)-(?P<side>[CS])\])? +(?P<start>\d+\.\d+)- *(?P<end>\d+\.\d+) +sec"
    r" +[\d.]+ +[KMGT]?Bytes +(?P<rate>[\d.]+) +(?P<unit>[KMGT]?(?:bits|Bytes)/sec)(?P<rest>.*)",
    re.IGNORECASE,
)
_LOST = re.compile(r"\d+ */ *(?P<all>\d+) +\((?P<share>[\d.e+-]+)%\)")
_UDP = re.compile(r"\bUDP\b|datagrams", re.IGNORECASE)
_MARKS = ("sender", "receiver")


class _Line(NamedTuple):
    place: int
    stream: str
    role: str
    start: float
    end: float
    rate: float
    rest: str


def is_iperf_text(head: Head) -> bool:
    """Return True if a file looks like this format."""
    return not head.text.startswith("{") and any(_LINE.search(line) for line in head.lines)


def parse_iperf_text(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` for other files, several streams without a sum, or only sent datagrams."""
    lines = [_line(source, place, found) for place, text in source.rows() if (found := _LINE.search(text))]
    wanted = "RX" if "C" in {line.role[-1:] for line in lines} else "TX"
    if any(line.role for line in lines):
        lines = [line for line in lines if line.role.startswith(wanted)]
    body = [line for line in lines if not line.rest.rstrip().endswith((*_MARKS, "(omitted)"))]
    if any(line.stream == "SUM" for line in body):
        body = [line for line in body if line.stream == "SUM"]
    if len({line.stream for line in body}) > 1:
        raise source.error("it has several streams and no [SUM]; keep the lines of one stream")
    samples: list[Sample] = []
    for line in body:
        if samples and line.start < samples[-1].end - 1e-6 and line.start <= samples[0].start:
            break
        samples.append(Sample(line.place, line.start, line.end, line.rate))
    if not samples:
        raise source.error("no interval is left; measure with --interval 1, and for longer than --omit")
    carried = _carried(source, text=source.text, body=body, lines=lines)
    return [build(source, [sample._replace(rate=sample.rate * carried) for sample in samples])]


def _line(source: TraceFile, place: int, found: re.Match[str]) -> _Line:
    start, end, rate = (source.number(found[name], f"the {name}", place) for name in ("start", "end", "rate"))
    role = f"{found['role']}-{found['side']}".upper() if found["role"] else ""
    factor = UNITS[found["unit"].lower()]
    return _Line(place, found["id"].upper(), role, start, end, rate * factor, found["rest"])


def _carried(source: TraceFile, *, text: str, body: list[_Line], lines: list[_Line]) -> float:
    """Return the fraction of the counted bytes that arrived: 1, except for a sender of datagrams."""
    if not _UDP.search(text) or any(_LOST.search(line.rest) for line in body[:1]):
        return 1.0
    for line in reversed(lines):
        lost = _LOST.search(line.rest)
        if lost is not None and not line.rest.rstrip().endswith("sender"):
            return max(0.0, 1 - source.number(lost["share"], "the share of lost datagrams", line.place) / 100)
    raise source.error("it reports the datagrams sent, not those received; use the receiver's report")
