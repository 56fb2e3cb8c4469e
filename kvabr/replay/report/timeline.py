"""Converts a log of events to spans (requests, recomputations) and time series (rates, estimates)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvabr.replay.report.queries import number
from kvabr.types.catalog import Catalog
from kvabr.types.events import (
    DecisionMade,
    FirstByteReceived,
    GroupDecoded,
    GroupsPublished,
    PlayEvent,
    PlayStarted,
    ProgressMade,
    RecomputeDone,
    RecomputeStarted,
    RequestCancelled,
    RequestDone,
    RequestFailed,
    RequestSent,
    TokensDone,
    TokensFailed,
    TokensStarted,
    TransferEvent,
)

Outcome = Literal["done", "cancelled", "failed", "open"]
_FINAL_KINDS = {"finish", "deliver"}
_REQUEST_KINDS = {"fetch", "upgrade", "recompute"}


@dataclass(slots=True)
class Request:
    """One request. Times are in seconds after the play began."""

    request: int
    group: int
    track: str
    bytes: int
    sent_s: float
    end_s: float
    """Time of the last byte, of the cancellation, or of the failure; the end of the log if the request is still open.
    """
    first_byte_s: float | None = None
    outcome: Outcome = "open"
    received: int = 0
    reason: str = ""
    decoded_s: float | None = None
    """Time when the group was in place on this track."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Groups ``first`` to ``last`` - 1 that the engine recomputed, or single tokens of passages."""

    start_s: float
    end_s: float
    first: int
    last: int
    finished: bool
    tokens: int = 0


def end_of(log: Iterable[PlayEvent]) -> float:
    """Return the time of the last event, seconds."""
    return max((event.t for event in log), default=0.0)


def start_of(log: Iterable[PlayEvent]) -> PlayStarted | None:
    """Return the event that starts a log, or None."""
    return next((event for event in log if isinstance(event, PlayStarted)), None)


def requests(log: Sequence[PlayEvent]) -> list[Request]:
    """Return all requests in order of sending."""
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
            # A group that the decoder rejected keeps its time of arrival.
            if request.outcome == "open":
                request.end_s = event.t
            request.outcome = "cancelled" if isinstance(event, RequestCancelled) else "failed"
            request.received = event.received or request.received
            request.reason = event.reason


def computations(log: Sequence[PlayEvent]) -> list[Computation]:
    """Return all computations of the engine, in order."""
    begun: dict[tuple[int, int], float] = {}
    found = []
    again: TokensStarted | None = None
    for event in log:
        if isinstance(event, RecomputeStarted):
            begun[event.first, event.last] = event.t
        elif isinstance(event, RecomputeDone):
            span = event.first, event.last
            found.append(Computation(begun.pop(span, event.t), event.t, *span, finished=True))
        elif isinstance(event, TokensStarted):
            again = event
        elif isinstance(event, TokensDone | TokensFailed) and again is not None:
            done = isinstance(event, TokensDone)
            found.append(Computation(again.t, event.t, 0, 0, finished=done, tokens=again.tokens))
            again = None
    end = end_of(log)
    found += [Computation(t, end, *span, finished=False) for span, t in begun.items()]
    return sorted(found, key=lambda item: item.start_s)


def losses(log: Sequence[PlayEvent], catalog: Catalog) -> list[tuple[float, float]]:
    """Return (seconds, nats per token): the expected loss of the complete cache over time, in steps of at least 1 %."""
    events = [
        (item.decoded_s, item.group, catalog.by_name[item.track].loss[item.group])
        for item in requests(log)
        if item.decoded_s is not None and item.track in catalog.by_name
    ]
    spans = [span for span in computations(log) if span.finished and not span.tokens]
    events += [(span.end_s, group, 0.0) for span in spans for group in range(span.first, span.last)]
    of: dict[int, float] = {}
    found: list[tuple[float, float]] = []
    total = 0.0
    for t, group, loss in sorted(events):
        if loss >= of.get(group, math.inf):
            continue
        total += loss - of.get(group, 0.0)
        of[group] = loss
        needed = catalog.to_play.groups if not catalog.every_token else catalog.groups
        if len(of) >= needed and (not found or abs(total - found[-1][1]) > 0.01 * found[-1][1]):
            found.append((t, max(0.0, total)))
    return found


def published(log: Sequence[PlayEvent]) -> list[tuple[float, int]]:
    """Return (seconds, groups): the number of groups known to be published during a prefill, over time."""
    return [(event.t, event.edge) for event in log if isinstance(event, GroupsPublished)]


def stopped(log: Sequence[PlayEvent], flights: Sequence[Request]) -> DecisionMade | None:
    """Return the decision of the policy that ended the play, or None.

    This is the last ``deliver``, or the last ``finish``, unless requests of ``flights`` were in flight at the first
    ``finish``.
    """
    found: DecisionMade | None = None
    for event in log:
        if not isinstance(event, DecisionMade):
            continue
        if event.kind in _FINAL_KINDS:
            if found is None or (found.kind, found.reason) != (event.kind, event.reason):
                found = event
        elif event.kind in _REQUEST_KINDS:
            found = None
    if found is None or any(item.sent_s <= found.t < item.end_s for item in flights):
        return None
    return found


def assign_rows(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Assign spans (start, end), sorted by start, to as few rows as possible; return the row of each span."""
    free: list[float] = []
    found = []
    for start, end in spans:
        row = next((index for index, until in enumerate(free) if until <= start), len(free))
        if row == len(free):
            free.append(end)
        else:
            free[row] = end
        found.append(row)
    return found


Points = Sequence[Sequence[float]]

MAX_POINTS = 1000
_BINS = 240
"""Number of bins of achieved throughput; shorter bins would show single packets."""


def significant(value: float | None, digits: int = 5) -> float | int | None:
    """Round to ``digits`` significant digits; return an int if the result is whole, None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    if value == 0:
        return 0
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return int(rounded) if rounded == int(rounded) else rounded


def capacity(link: Points, until_s: float, limit: int = MAX_POINTS) -> dict[str, list[float | int | None]]:
    """Return the link's capacity as a piecewise constant line from 0 to ``until_s`` with at most ``limit`` steps.

    ``link`` is a list of [seconds, bytes per second], by time; each rate holds until the next. Lines with more steps
    are divided into equal bins.

    Returns:
        ``t``: start of every step, seconds; ``mean`` rate, bytes per second; ``low``: minimum rate, if binned.
    """
    points = [(max(0.0, float(t)), number(rate) or 0.0) for t, rate in link if float(t) < until_s]
    if not points or until_s <= 0:
        return {"t": [], "mean": []}
    if len(points) <= limit:
        return {"t": [_time(t) for t, _ in points], "mean": [significant(rate, 4) for _, rate in points]}
    edges = [until_s * index / limit for index in range(limit + 1)]
    starts = [t for t, _ in points]
    carried = _Integral(points, until_s)
    means, lows = [], []
    for left, right in pairwise(edges):
        first = max(0, bisect_right(starts, left) - 1)
        inside = [rate for start, rate in points[first : bisect_right(starts, right)] if start < right]
        means.append((carried.at(right) - carried.at(left)) / (right - left))
        lows.append(min(inside))
    return {
        "t": [_time(t) for t in edges[:-1]],
        "mean": [significant(rate, 4) for rate in means],
        "low": [significant(rate, 4) for rate in lows],
    }


def achieved(log: Sequence[PlayEvent], until_s: float) -> dict[str, list[float | int | None]]:
    """Return the received bytes per second from 0 to ``until_s``: ``t`` (start of a step, seconds) and ``rate``.

    Uses ``progress`` events if there are any, since only these show transfers in flight. Otherwise each request's bytes
    are spread evenly from its first byte to its end.
    """
    if until_s <= 0:
        return {"t": [], "rate": []}
    arrivals: list[tuple[float, float, float]] = []
    counted, since = 0.0, 0.0
    for event in log:
        if isinstance(event, ProgressMade) and event.t > since and event.received >= counted:
            arrivals.append((since, event.t, event.received - counted))
            counted, since = float(event.received), event.t
    flights = requests(log)
    if arrivals:
        # For bytes after the last progress event, only the total is known.
        rest = sum(item.received for item in flights) - counted
        end = max((item.end_s for item in flights), default=since)
        if rest > 0:
            arrivals.append((since, max(since, end), rest))
    else:
        for item in flights:
            begun = item.sent_s if item.first_byte_s is None else item.first_byte_s
            arrivals.append((min(begun, item.end_s), item.end_s, float(item.received)))
    step = until_s / _BINS
    bins = [0.0] * _BINS
    for start, end, nbytes in arrivals:
        _spread(bins, step, start, end, nbytes)
    return {
        "t": [_time(index * step) for index in range(_BINS)],
        "rate": [significant(total / step, 4) for total in bins],
    }


def estimates(log: Sequence[PlayEvent], limit: int = MAX_POINTS) -> dict[str, list[float | int | None]]:
    """Return the player's estimates over time.

    ``t`` and ``slack`` are seconds, ``rate`` and ``lower`` bytes per second; None if unknown. With too many points,
    each bin keeps its last rate and its minimum lower bound and slack.
    """
    rows: list[tuple[float, list[float | None]]] = []
    for event in log:
        if isinstance(event, ProgressMade | DecisionMade):
            beliefs = [number(value) for value in (event.rate, event.lower, event.slack_s)]
            if any(value is not None for value in beliefs):
                rows.append((event.t, beliefs))
    size = max(1, math.ceil(len(rows) / limit))
    kept = [rows[index : index + size] for index in range(0, len(rows), size)]
    return {
        "t": [_time(part[-1][0]) for part in kept],
        "rate": [significant(part[-1][1][0], 4) for part in kept],
        "lower": [significant(_least([beliefs[1] for _, beliefs in part]), 4) for part in kept],
        "slack": [significant(_least([beliefs[2] for _, beliefs in part]), 4) for part in kept],
    }


class _Integral:
    def __init__(self, points: Sequence[tuple[float, float]], until_s: float) -> None:
        self._points = points
        self._starts = [t for t, _ in points]
        self._sums = [0.0]
        ends = [*self._starts[1:], until_s]
        for (start, rate), end in zip(points, ends, strict=True):
            self._sums.append(self._sums[-1] + max(0.0, end - start) * rate)

    def at(self, t: float) -> float:
        index = bisect_right(self._starts, t) - 1
        if index < 0:
            return 0.0
        start, rate = self._points[index]
        return self._sums[index] + (t - start) * rate


def _spread(bins: list[float], step: float, start: float, end: float, nbytes: float) -> None:
    top = len(bins) - 1
    first, last = min(top, int(start / step)), min(top, int(end / step))
    if first == last or end <= start:
        bins[first] += nbytes
        return
    for index in range(first, last + 1):
        covered = min(end, (index + 1) * step) - max(start, index * step)
        bins[index] += nbytes * max(0.0, covered) / (end - start)


def _least(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _time(seconds: float) -> float:
    return round(seconds, 5)
