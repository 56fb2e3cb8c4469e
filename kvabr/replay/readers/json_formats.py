"""JSON formats: sabre, and the report of iperf3.

sabre, and the Ghent 4G logs that come with it: a list of entries with ``duration_ms``, ``bandwidth_kbps`` and, in most
files, ``latency_ms``, which sabre adds once to every request: a round trip. Where it varies, the trace keeps its mean
over time. Source: https://github.com/UMass-LIDS/sabre, README and src/sabre.py.

iperf3 (``iperf3 --json``): what one connection got, interval by interval. Intervals that iperf3 marks as omitted
(``--omit``: the slow start) are left out, and so is the one that straddles the end of the omitted part: iperf3 counts
its bytes from the reset but divides by the time since the interval began, so its start and end disagree with its
length. The round trip is the smallest of the intervals kept, since under load the others include the connection's own
queue. Source: https://software.es.net/iperf/, src/iperf_api.c (iperf_print_intermediate).
"""

from __future__ import annotations

from typing import Any

from kvabr.replay.readers.source import BYTES_PER_SECOND, Head, Sample, TraceFile, build
from kvabr.replay.trace import Trace

_UNIT = "interval"


def is_sabre(head: Head) -> bool:
    """Return whether a file looks like this format."""
    return head.text.startswith("[") and '"bandwidth_kbps"' in head.text and '"duration_ms"' in head.text


def parse_sabre(source: TraceFile) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: the file is not a trace of this format.
    """
    entries = source.json()
    if not isinstance(entries, list):
        raise source.error("not a JSON list of stretches; is this sabre?")
    samples: list[Sample] = []
    waited, known = 0.0, True  # sum of latency x duration, in ms x ms
    now = 0.0
    for place, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or "duration_ms" not in entry or "bandwidth_kbps" not in entry:
            raise source.error("needs duration_ms and bandwidth_kbps", place, "entry")
        duration = source.number(entry["duration_ms"], "duration_ms", place, "entry")
        if not duration > 0:
            raise source.error(f"duration_ms is {duration:g}; it must be positive (remove the entry)", place, "entry")
        rate = source.number(entry["bandwidth_kbps"], "bandwidth_kbps", place, "entry") * BYTES_PER_SECOND["kbit/s"]
        samples.append(Sample(place, now / 1000, (now + duration) / 1000, rate))
        now += duration
        if "latency_ms" in entry:
            waited += source.number(entry["latency_ms"], "latency_ms", place, "entry") * duration
        else:
            known = False
    return [build(source, samples, rtt_s=waited / now / 1000 if known and now else None, unit="entry")]


def is_iperf3(head: Head) -> bool:
    """Return whether a file looks like this format."""
    return head.text.startswith("{") and '"intervals"' in head.text and '"start"' in head.text


def parse_iperf3(source: TraceFile) -> list[Trace]:
    """Read a file.

    Raises:
        TraceError: the file is not a trace of this format, or iperf3 itself failed.
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


def _round_trips(source: TraceFile, interval: dict[str, Any], place: int) -> list[float]:
    """Return the round trips, seconds, of the streams that measured one (TCP senders on some systems)."""
    streams = interval.get("streams")
    if not isinstance(streams, list):
        return []
    values = [stream.get("rtt") for stream in streams if isinstance(stream, dict)]
    return [source.number(value, "rtt", place, _UNIT) / 1e6 for value in values if value]
