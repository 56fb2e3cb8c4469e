"""Timelines for other tools: the log as JSON lines, and a trace for ui.perfetto.dev.

A trace uses the JSON form of Chrome's trace events. Each play is a process, with tracks for the play (deadline and
delivery), decisions, prefill, network, decoder and engine, and counters (link capacity, estimate, lower bound, bytes
received, slack). Times are microseconds since the play began. Format: Trace Event Format, phases M (metadata), X
(complete), i (instant) and C (counter).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvabr.replay.report.queries import Result, Run, Timeline, number
from kvabr.replay.report.timeline import (
    Request,
    assign_rows,
    capacity,
    computations,
    end_of,
    published,
    requests,
    start_of,
)
from kvabr.store.files import write_text
from kvabr.types.events import (
    DecisionMade,
    FirstByteReceived,
    PlayEvent,
    PlayStarted,
    ProgressMade,
    RecomputeEvent,
    SampleLimited,
    TransferEvent,
)


def write_log(path: Path, result: Result, timelines: list[Timeline]) -> None:
    """Write one event per line, and add ``run`` (index into the result's runs), ``trace`` and ``policy``.

    The same input gives the same bytes. Numbers that JSON does not have (NaN, infinity) become null. ``result`` is that
    of `kvabr replay --json`; ``timelines`` are ``{"run": index, "log": [event, ...], "link": [[seconds, bytes per
    second], ...]}``. Raise `AssetError` if the file cannot be written.
    """
    write_text(path, "".join(_lines(result, timelines)))


def _lines(result: Result, timelines: list[Timeline]) -> Iterator[str]:
    for timeline in timelines:
        run = result["runs"][timeline["run"]]
        head = {"run": timeline["run"], "trace": run["trace"], "policy": run["policy"]}
        for event in timeline["log"]:
            line = {**head, **finite(event.to_json())}
            yield json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinity replaced by None, for JSON."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


_PLAY, _DECISIONS, _PREFILL, _ENGINE, _DECODER, _NETWORK = 1, 2, 3, 4, 1000, 2000
"""Thread numbers; decoder and network have one number per row, starting here."""
_MBIT = 8e-6
_SHOWN_AS_SPANS = (PlayStarted, FirstByteReceived, TransferEvent, RecomputeEvent, SampleLimited)

Slice = dict[str, Any]


def write_perfetto(path: Path, result: Result, timelines: list[Timeline]) -> None:
    """Write the timelines as one trace for ui.perfetto.dev; arguments and errors as for `write_log`."""
    write_text(path, "".join(_text(result, timelines)))


def _text(result: Result, timelines: list[Timeline]) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for pid, timeline in enumerate(timelines, start=1):
        run = result["runs"][timeline["run"]]
        for event in _play(run, timeline, pid):
            yield separator + json.dumps({**finite(event), "pid": pid}, allow_nan=False, separators=(",", ":"))
            separator = ",\n"
    yield "\n]}\n"


def _play(run: Run, timeline: Timeline, pid: int) -> Iterator[Slice]:
    log: list[PlayEvent] = timeline["log"]
    start = start_of(log)
    deadline = number(run.get("deadline_s")) if start is None else start.deadline_s
    name = f"{run['policy']} on {run['trace']} from {number(run.get('start_s')) or 0.0:.3f} s"
    yield {"ph": "M", "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "tid": 0, "ts": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield _thread(_PLAY, "play")
    yield _thread(_DECISIONS, "decisions")
    about = {key: value for key, value in run.items() if key != "groups"}
    yield _span(_PLAY, str(run["policy"]), 0.0, end_of(log), about)
    if deadline is not None:
        args = {"seconds": deadline}
        yield {"ph": "i", "s": "p", "tid": _PLAY, "ts": _us(deadline), "name": "deadline", "args": args}
    for event in log:
        yield from _instant(event)
    yield from _prefill(log)
    flights = requests(log)
    yield from _network(flights)
    yield from _decoder(flights)
    engine = computations(log)
    if engine:
        yield _thread(_ENGINE, "recompute")
    for item in engine:
        title = f"groups {item.first} to {item.last - 1}" if item.last - item.first > 1 else f"group {item.first}"
        args = {"first": item.first, "last": item.last - 1, "finished": item.finished}
        if item.tokens:
            title, args = f"{item.tokens} tokens again", {"tokens": item.tokens, "finished": item.finished}
        yield _span(_ENGINE, title, item.start_s, item.end_s, args)
    link = capacity(timeline.get("link") or (), max(end_of(log), deadline or 0.0))
    for t, rate in zip(link["t"], link["mean"], strict=True):
        yield _counter("link capacity (Mbit/s)", t or 0.0, (rate or 0.0) * _MBIT)


def _instant(event: PlayEvent) -> Iterator[Slice]:
    if isinstance(event, _SHOWN_AS_SPANS):
        return
    args = {key: value for key, value in event.to_json().items() if key not in {"t", "event"}}
    if isinstance(event, DecisionMade):
        title = " ".join(str(part) for part in (event.kind, event.group, event.track) if part is not None)
        given = {key: value for key, value in args.items() if value is not None}
        yield {"ph": "i", "s": "t", "tid": _DECISIONS, "ts": _us(event.t), "name": title, "args": given}
    elif not isinstance(event, ProgressMade):
        yield {"ph": "i", "s": "p", "tid": _PLAY, "ts": _us(event.t), "name": event.name, "args": args}
    if isinstance(event, DecisionMade | ProgressMade):
        yield _counter("estimate (Mbit/s)", event.t, event.rate * _MBIT)
        yield _counter("lower bound (Mbit/s)", event.t, event.lower * _MBIT)
        if event.slack_s is not None:
            yield _counter("slack (s)", event.t, event.slack_s)
    if isinstance(event, ProgressMade):
        yield _counter("received (MB)", event.t, event.received / 1e6)


def _prefill(log: list[PlayEvent]) -> Iterator[Slice]:
    before_s, before = 0.0, 0
    for t, edge in published(log):
        if not before:
            yield _thread(_PREFILL, "prefill")
        title = f"groups {before} to {edge - 1}" if edge - before > 1 else f"group {before}"
        yield _span(_PREFILL, title, before_s, t, {"edge": edge})
        before_s, before = t, edge


def _network(flights: list[Request]) -> Iterator[Slice]:
    chosen = assign_rows((item.sent_s, item.end_s) for item in flights)
    for row in sorted(set(chosen)):
        yield _thread(_NETWORK + row, f"network {row + 1}")
    for item, row in zip(flights, chosen, strict=True):
        title = f"{item.track} {item.group}" + ("" if item.outcome == "done" else f" ({item.outcome})")
        args: dict[str, Any] = {
            "request": item.request,
            "group": item.group,
            "track": item.track,
            "bytes": item.bytes,
            "received": item.received,
            "outcome": item.outcome,
        }
        if item.reason:
            args["reason"] = item.reason
        yield _span(_NETWORK + row, title, item.sent_s, item.end_s, args)
        if item.first_byte_s is not None and item.first_byte_s <= item.end_s:
            yield _span(_NETWORK + row, "to first byte", item.sent_s, item.first_byte_s, {"request": item.request})


def _decoder(flights: list[Request]) -> Iterator[Slice]:
    spans = sorted(
        ((item.end_s, item.decoded_s, item) for item in flights if item.decoded_s is not None),
        key=lambda span: span[:2],
    )
    chosen = assign_rows((arrived, placed) for arrived, placed, _ in spans)
    for row in sorted(set(chosen)):
        yield _thread(_DECODER + row, "decode" if row == 0 else f"decode {row + 1}")
    for (arrived, placed, item), row in zip(spans, chosen, strict=True):
        args = {"request": item.request, "group": item.group, "track": item.track}
        yield _span(_DECODER + row, f"{item.track} {item.group}", arrived, placed, args)


def _thread(tid: int, name: str) -> Slice:
    return {"ph": "M", "tid": tid, "ts": 0, "name": "thread_name", "args": {"name": name}}


def _span(tid: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> Slice:
    start, end = _us(start_s), _us(end_s)
    return {"ph": "X", "tid": tid, "ts": start, "dur": round(max(0.0, end - start), 3), "name": name, "args": args}


def _counter(name: str, t: float, value: float) -> Slice:
    return {"ph": "C", "tid": 0, "ts": _us(t), "name": name, "args": {"value": value}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
