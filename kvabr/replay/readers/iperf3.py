"""Reports of iperf3 (``--json``, ``--json-stream``), interval by interval.

Omitted intervals (``--omit``: the slow start) are skipped. The interval that contains the end of the omitted part is
skipped, too: iperf3 counts its bytes from there but divides by the full length. The round trip time is the minimum over
the remaining intervals, since under load most intervals include the connection's own queue.

For a bidirectional test (``--bidir``), the download (server to client) is read. For datagrams, the receiver's intervals
are read if the file has them (``--get-server-output``), otherwise the sender's, reduced by the total loss. Source:
https://software.es.net/iperf/, src/iperf_api.c (iperf_print_intermediate, iperf_print_results).
"""

from __future__ import annotations

import json
from typing import Any

from kvabr.replay.readers.names import BYTES_PER_SECOND
from kvabr.replay.readers.source import Head, Sample, TraceFile, build
from kvabr.replay.trace import Trace

_UNIT = "interval"
_REVERSE = "sum_bidir_reverse"


def is_iperf3(head: Head) -> bool:
    """Return True if a file looks like this format."""
    text = head.text
    return text.startswith("{") and (('"intervals"' in text and '"start"' in text) or _is_stream(text))


def _is_stream(text: str) -> bool:
    first = text.partition("\n")[0].replace(" ", "")
    return first.startswith('{"event":')


def parse_iperf3(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` if it is not such a report, or reports an error of iperf3."""
    report = _joined(source) if _is_stream(source.text.lstrip()) else source.json()
    intervals = report.get("intervals") if isinstance(report, dict) else None
    if not isinstance(intervals, list):
        raise source.error("not an iperf3 report: it has no list of intervals")
    if report.get("error"):
        raise source.error(f"iperf3 reported an error ({str(report['error'])[:80]}); measure again")
    which, carried = _direction(source, report, intervals), 1.0
    if _is_udp(report) and _sends(intervals, which):
        other = report.get("server_output_json")
        received = other.get("intervals") if isinstance(other, dict) else None
        if isinstance(received, list) and received:
            intervals = received
            which = next((key for key in ("sum", _REVERSE) if not _sends(intervals, key)), "sum")
        else:
            carried = _carried(source, report)
    return [_trace(source, intervals, which, carried)]


def _joined(source: TraceFile) -> dict[str, Any]:
    report: dict[str, Any] = {"intervals": []}
    for place, line in source.lines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise source.error(f"not valid JSON ({error}); is the file complete?", place) from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise source.error("not an event of iperf3 --json-stream", place)
        if event["event"] == "interval":
            report["intervals"].append(event.get("data"))
        else:
            report[event["event"]] = event.get("data")
    return report


def _direction(source: TraceFile, report: dict[str, Any], intervals: list[Any]) -> str:
    if not any(isinstance(interval, dict) and _REVERSE in interval for interval in intervals):
        return "sum"
    start = report.get("start")
    serves = isinstance(start, dict) and "accepted_connection" in start and "connecting_to" not in start
    keys = [key for key in ("sum", _REVERSE) if _sends(intervals, key) is serves]
    if len(keys) != 1:
        raise source.error("it is a test in both directions, and does not mark the sums of the download")
    return keys[0]


def _sends(intervals: list[Any], key: str) -> bool:
    """Return True if the sums under this key count data sent by this side."""
    for interval in intervals:
        total = interval.get(key) if isinstance(interval, dict) else None
        if isinstance(total, dict):
            # Versions before 3.7 do not have the field; receivers of datagrams report lost datagrams.
            return bool(total.get("sender", "lost_packets" not in total and key == "sum"))
    return False


def _is_udp(report: dict[str, Any]) -> bool:
    start = report.get("start")
    test = start.get("test_start") if isinstance(start, dict) else None
    return isinstance(test, dict) and str(test.get("protocol")).upper() == "UDP"


def _carried(source: TraceFile, report: dict[str, Any]) -> float:
    end = report.get("end")
    totals = [end.get(key) for key in ("sum_received", "sum")] if isinstance(end, dict) else []
    for total in totals:
        if isinstance(total, dict) and "lost_percent" in total and total.get("packets", 1):
            return _share(source, total["lost_percent"])
    raise source.error("it reports the datagrams sent, not those received; use the receiver's report")


def _share(source: TraceFile, lost_percent: Any) -> float:
    lost = source.number(lost_percent, "end.sum.lost_percent", 1, "report")
    if not 0 <= lost <= 100:
        raise source.error(f"end.sum.lost_percent must be from 0 to 100, got {lost:g}")
    return 1 - lost / 100


def _trace(source: TraceFile, intervals: list[Any], which: str, carried: float) -> Trace:
    samples: list[Sample] = []
    trips: list[float] = []
    for place, interval in enumerate(intervals, 1):
        total = interval.get(which) if isinstance(interval, dict) else None
        if not isinstance(total, dict) or not {"start", "end", "bits_per_second"} <= total.keys():
            raise source.error(f"it must have {which}.start, {which}.end and {which}.bits_per_second", place, _UNIT)
        if total.get("omitted"):
            continue
        start, end, rate = (source.number(total[key], key, place, _UNIT) for key in ("start", "end", "bits_per_second"))
        length = source.number(total.get("seconds", end - start), "seconds", place, _UNIT)
        if abs(end - start - length) > 0.5 * length:
            continue
        samples.append(Sample(place, start, end, rate * carried * BYTES_PER_SECOND["bit/s"]))
        trips += _round_trips(source, interval, place)
    if not samples:
        raise source.error("every interval is omitted as slow start; measure for longer than --omit")
    return build(source, samples, rtt_s=min(trips, default=None), unit=_UNIT)


def _round_trips(source: TraceFile, interval: dict[str, Any], place: int) -> list[float]:
    streams = interval.get("streams")
    if not isinstance(streams, list):
        return []
    values = [stream.get("rtt") for stream in streams if isinstance(stream, dict)]
    return [source.number(value, "rtt", place, _UNIT) / 1e6 for value in values if value]
