"""iperf3's report (``iperf3 --json``): what one connection got, interval by interval.

Intervals that iperf3 marks as omitted (``--omit``: the slow start) stay out. The one that straddles the end of the
omitted part is left out too: iperf3 counts its bytes from the reset but divides by the time since the interval began,
and its start and end then disagree with its length. The round trip is the smallest that any kept interval saw, since
under load the others hold the connection's own queue.
Source: https://software.es.net/iperf/, src/iperf_api.c (iperf_print_intermediate).
"""

from __future__ import annotations

from typing import Any

from kvabr.replay.readers.source import BYTES_PER_SECOND, Sample, Source, build
from kvabr.replay.trace import Trace

_UNIT = "interval"


def matches(head: str) -> bool:
    """Whether the beginning of a file looks like this format."""
    return head.startswith("{") and '"intervals"' in head and '"start"' in head


def parse(source: Source) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: it is not a trace of this format, or iperf3 itself failed.
    """
    report = source.json()
    intervals = report.get("intervals") if isinstance(report, dict) else None
    if not isinstance(intervals, list):
        raise source.error("not an iperf3 report: it has no list of intervals")
    if report.get("error"):
        raise source.error(f"iperf3 reported an error ({str(report['error'])[:80]}); measure again")
    samples: list[Sample] = []
    trips: list[float] = []
    for place, interval in enumerate(intervals, 1):
        total = interval.get("sum") if isinstance(interval, dict) else None
        if not isinstance(total, dict) or not {"start", "end", "bits_per_second"} <= total.keys():
            raise source.error("needs sum.start, sum.end and sum.bits_per_second", place, _UNIT)
        if total.get("omitted"):
            continue
        start, end, rate = (source.number(total[key], key, place, _UNIT) for key in ("start", "end", "bits_per_second"))
        length = source.number(total.get("seconds", end - start), "seconds", place, _UNIT)
        if abs(end - start - length) > 0.5 * length:
            continue
        samples.append(Sample(place, start, end, rate * BYTES_PER_SECOND["bit/s"]))
        trips += _round_trips(source, interval, place)
    if not samples:
        raise source.error("every interval is omitted as slow start; measure for longer than --omit")
    return [build(source, samples, rtt_s=min(trips, default=None), unit=_UNIT)]


def _round_trips(source: Source, interval: dict[str, Any], place: int) -> list[float]:
    """Seconds, of each stream that measured it (TCP senders on some systems)."""
    streams = interval.get("streams")
    if not isinstance(streams, list):
        return []
    values = [stream.get("rtt") for stream in streams if isinstance(stream, dict)]
    return [source.number(value, "rtt", place, _UNIT) / 1e6 for value in values if value]
