"""A log of single events, read back as what lasted: requests, recomputations, waits for the decoder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kvabr.replay.report.plays import Event, number

Outcome = Literal["done", "cancelled", "failed", "open"]


@dataclass(slots=True)
class Request:
    """One request from its sending to its end; times in seconds since the play began."""

    request: int
    group: int
    track: str
    bytes: int
    """Size that was asked for."""
    sent_s: float
    end_s: float
    """When its last byte came, or it was cancelled or failed; the log's end if it is still open there."""
    first_byte_s: float | None = None
    outcome: Outcome = "open"
    received: int = 0
    reason: str = ""
    """Why it was cancelled or failed."""
    decoded_s: float | None = None
    """When its group was in place at this track."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Groups ``first`` to ``last`` - 1, recomputed by the engine."""

    start_s: float
    end_s: float
    first: int
    last: int
    finished: bool


def end_of(log: Iterable[Event]) -> float:
    """Time of the last event, seconds."""
    return max((float(event["t"]) for event in log), default=0.0)


def start_of(log: Iterable[Event]) -> Event:
    """The ``start`` event; empty if there is none."""
    return next((event for event in log if event.get("event") == "start"), {})


def requests(log: list[Event]) -> list[Request]:
    """All requests in the order in which they were sent."""
    found: dict[Any, Request] = {}
    end = end_of(log)
    for event in log:
        kind, t = event.get("event"), float(event["t"])
        if kind == "request":
            group, size = int(event["group"]), int(event["bytes"])
            found[event["request"]] = Request(int(event["request"]), group, str(event["track"]), size, t, end)
        request = found.get(event.get("request"))
        if request is None:
            continue
        if kind == "first_byte":
            request.first_byte_s = t
        elif kind == "done":
            request.outcome, request.end_s, request.received = "done", t, request.bytes
        elif kind == "decoded":
            request.decoded_s = t
        elif kind in {"cancel", "failed"}:
            # A group that arrived and was then refused by the decoder keeps the time at which it arrived.
            if request.outcome == "open":
                request.end_s = t
            request.outcome = "cancelled" if kind == "cancel" else "failed"
            request.received = int(number(event.get("received")) or request.received)
            request.reason = str(event.get("reason") or "")
    return list(found.values())


def computations(log: list[Event]) -> list[Computation]:
    """All runs of the engine, in order."""
    begun: dict[tuple[int, int], float] = {}
    found = []
    for event in log:
        kind, t = event.get("event"), float(event["t"])
        if kind == "recompute_start":
            begun[int(event["first"]), int(event["last"])] = t
        elif kind == "recompute_done":
            span = int(event["first"]), int(event["last"])
            found.append(Computation(begun.pop(span, t), t, *span, finished=True))
    end = end_of(log)
    found += [Computation(t, end, *span, finished=False) for span, t in begun.items()]
    return sorted(found, key=lambda item: item.start_s)


def lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Number of a lane for every span (start, end) such that no two in one lane overlap, as few lanes as it takes.

    Spans must come by start.
    """
    free: list[float] = []
    found = []
    for start, end in spans:
        lane = next((index for index, until in enumerate(free) if until <= start), len(free))
        if lane == len(free):
            free.append(end)
        else:
            free[lane] = end
        found.append(lane)
    return found
