"""A log of single events, read back as what lasted: requests, recomputations, waits for the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvabr.types.events import (
    FirstByteReceived,
    GroupDecoded,
    PlayEvent,
    PlayStarted,
    RecomputeDone,
    RecomputeStarted,
    RequestCancelled,
    RequestDone,
    RequestFailed,
    RequestSent,
    TransferEvent,
)

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


def end_of(log: Iterable[PlayEvent]) -> float:
    """Return the time of the last event, seconds."""
    return max((event.t for event in log), default=0.0)


def start_of(log: Iterable[PlayEvent]) -> PlayStarted | None:
    """Return the event that opens a log, if it is there."""
    return next((event for event in log if isinstance(event, PlayStarted)), None)


def requests(log: Sequence[PlayEvent]) -> list[Request]:
    """Return all requests in the order in which they were sent."""
    found: dict[int, Request] = {}
    end = end_of(log)
    for event in log:
        if isinstance(event, RequestSent):
            found[event.request] = Request(event.request, event.group, event.track, event.bytes, event.t, end)
        elif isinstance(event, FirstByteReceived | TransferEvent) and event.request in found:
            _follow(found[event.request], event)
    return list(found.values())


def _follow(request: Request, event: FirstByteReceived | TransferEvent) -> None:
    match event:
        case FirstByteReceived():
            request.first_byte_s = event.t
        case RequestDone():
            request.outcome, request.end_s, request.received = "done", event.t, request.bytes
        case GroupDecoded():
            request.decoded_s = event.t
        case RequestCancelled() | RequestFailed():
            # A group that arrived and was then refused by the decoder keeps the time at which it arrived.
            if request.outcome == "open":
                request.end_s = event.t
            request.outcome = "cancelled" if isinstance(event, RequestCancelled) else "failed"
            request.received = event.received or request.received
            request.reason = event.reason


def computations(log: Sequence[PlayEvent]) -> list[Computation]:
    """Return all runs of the engine, in order."""
    begun: dict[tuple[int, int], float] = {}
    found = []
    for event in log:
        if isinstance(event, RecomputeStarted):
            begun[event.first, event.last] = event.t
        elif isinstance(event, RecomputeDone):
            span = event.first, event.last
            found.append(Computation(begun.pop(span, event.t), event.t, *span, finished=True))
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
