"""mahimahi (``mm-link``): one integer a line, the millisecond in which one packet of 1500 bytes may pass.

A repeated line is one more packet in the same millisecond. The trace wraps at its last timestamp, so what may pass
there passes, in every round, together with millisecond 0 of the next. Packets are counted per millisecond, and each
count becomes a rate over that millisecond.
Source: https://github.com/ravinet/mahimahi, src/frontend/link_queue.cc.
"""

from __future__ import annotations

from kvabr.replay.readers.source import Sample, Source, build
from kvabr.replay.trace import Trace

PACKET_BYTES = 1500
_MAX_DIGITS = 12


def matches(lines: list[str]) -> bool:
    """Whether the first lines of a file look like this format."""
    return bool(lines) and all(_is_timestamp(line) for line in lines)


def parse(source: Source) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: it is not a trace of this format.
    """
    counts: list[tuple[int, int, int]] = []  # line, millisecond, packets
    for line, text in source.lines():
        if not _is_timestamp(text):
            raise source.error(f"{text[:40]!r} is not a millisecond (a whole number from 0); is this mahimahi?", line)
        time = int(text)
        if counts and counts[-1][1] == time:
            counts[-1] = (counts[-1][0], time, counts[-1][2] + 1)
        else:
            counts.append((line, time, 1))
    if not counts:
        raise source.error("it has no samples; a trace needs at least one")
    end = counts[-1][1]
    if end == 0:
        raise source.error("it ends at millisecond 0; the last timestamp is the trace's length, so it must be later")
    if len(counts) < 2 or counts[-2][1] < end:
        counts = _wrapped(counts)
    return [build(source, _samples(counts, end))]


def _is_timestamp(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _wrapped(counts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Fold the packets of the last timestamp into millisecond 0."""
    line, _, packets = counts[-1]
    if len(counts) > 1 and counts[0][1] == 0:
        return [(counts[0][0], 0, counts[0][2] + packets), *counts[1:-1]]
    return [(line, 0, packets), *counts[:-1]]


def _samples(counts: list[tuple[int, int, int]], end: int) -> list[Sample]:
    samples: list[Sample] = []

    def add(line: int, first: int, last: int, rate: float) -> None:
        before = samples[-1] if samples else None
        if before is not None and before.rate == rate and before.end == first / 1000:
            samples[-1] = before._replace(end=last / 1000)
        else:
            samples.append(Sample(line, first / 1000, last / 1000, rate))

    nexts = [time for _, time, _ in counts[1:]] + [end]
    for (line, time, packets), after in zip(counts, nexts, strict=True):
        add(line, time, time + 1, packets * PACKET_BYTES * 1000.0)
        if after > time + 1:
            add(line, time + 1, after, 0.0)
    return samples
