"""NYU-METS: ``value,unit`` a line and no header, one line a second; the unit may change from line to line.

These are the bandwidth columns of iperf's text reports (``6.21,Mbits/sec``).
Source: Mei et al., PAM 2019; https://github.com/NYU-METS/Main.
"""

from __future__ import annotations

import re

from kvabr.replay.readers.source import BYTES_PER_SECOND, Sample, Source, build
from kvabr.replay.trace import Trace

STEP_S = 1.0
"""Seconds that a line lasts."""

_UNITS = {
    f"{prefix.lower()}{word}s/sec": BYTES_PER_SECOND[f"{prefix}{word}/s"]
    for prefix in ("", "k", "M", "G")
    for word in ("bit", "byte")
}
_ROW = re.compile(r"[-+.\w]{1,40}\s*,\s*([KMG]?(?:bit|byte)s/sec)", re.IGNORECASE)


def matches(lines: list[str]) -> bool:
    """Whether the first lines of a file look like this format."""
    return bool(lines) and all(_ROW.fullmatch(line) for line in lines)


def parse(source: Source) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: it is not a trace of this format.
    """
    samples = []
    for index, (line, text) in enumerate(source.lines()):
        value, _, unit = (part.strip() for part in text.partition(","))
        factor = _UNITS.get(unit.lower())
        if factor is None:
            raise source.error(f"{text[:40]!r} is not `value,unit` with a unit such as Mbits/sec", line)
        rate = source.number(value, "the value", line) * factor
        samples.append(Sample(line, index * STEP_S, (index + 1) * STEP_S, rate))
    return [build(source, samples)]
