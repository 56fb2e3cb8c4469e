"""Divides waiting requests into played and computed ones, within the capacity of link and engine.

A play occupies the link for its smallest track, then the engine for uncached tokens; both serve the earliest deadline
first. If not all requests can be played in time, those with the least additional engine time per saved link byte are
computed; of equal ones, the one with the highest loss. If the engine then exceeds deadlines, the requests with the most
engine time are given up as late.

Pure: no vLLM, no clock, no threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

_ENGINE_MARGIN = 1.1
"""Safety factor of engine times: steps are not full, and the engine also does other work."""


@dataclass(slots=True)
class Demand:
    """Costs of one request."""

    request: str
    due_s: float
    bytes: float
    """Remaining bytes to transfer if played."""
    played_s: float
    computed_s: float
    loss: float = 0.0
    """Expected loss on the smallest track, nats per generated token."""
    begun: bool = False
    here_s: float = 0.0
    """Expected end of the play's transfer, in seconds."""
    by_s: float = 0.0
    """Latest end of the play's transfer for all following requests to be in time."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Divided requests, each list in order of deadlines."""

    played: Sequence[Demand]
    computed: Sequence[Demand]
    late: Sequence[Demand]


def divide(loads: Iterable[Demand], rate: float, *, now: float, ttfb_s: float, engine_s: float) -> Assignment:
    """Divide requests, and set the times of played requests.

    ``rate`` is in bytes per second, ``ttfb_s`` the time to first byte; the engine is free at ``engine_s``.
    """
    order = sorted(loads, key=lambda load: load.due_s)
    played, computed = _by_link(order, rate, now + ttfb_s)
    _by_engine(order, played, computed, rate, now + ttfb_s, max(now, engine_s))
    plays = [load for load in order if load.request in played]
    here_s, end_s = now + ttfb_s, math.inf
    for load in plays:
        here_s = load.here_s = here_s + load.bytes / rate
    for load in reversed(plays):
        end_s = load.by_s = min(load.due_s, end_s) - _ENGINE_MARGIN * load.played_s
    rest = [load for load in order if load.request not in played]
    return Assignment(
        plays,
        [load for load in rest if load.request in computed],
        [load for load in rest if load.request not in computed],
    )


def _price(load: Demand) -> tuple[bool, float, float, float]:
    """Return a sort key by the cost to compute a request; if equal, the latest deadline first."""
    more_s = load.computed_s - load.played_s
    return load.begun, more_s / load.bytes if load.bytes > 0 else math.inf, -load.loss, -load.due_s


def _relief(load: Demand, work_s: float) -> tuple[bool, float, float]:
    """Return a sort key for choosing late requests: longest first, running ones last."""
    return load.begun, -work_s, -load.due_s


def _by_link(order: Sequence[Demand], rate: float, begin_s: float) -> tuple[set[str], set[str]]:
    """Return the requests that the link can carry in time, and the requests to compute.

    A request is only replaced by later ones, so earlier requests stay in time.
    """
    played, computed = {load.request for load in order}, set[str]()
    cheapest = list[tuple[tuple[bool, float, float, float], int]]()
    nbytes = 0.0
    for at, load in enumerate(order):
        nbytes += load.bytes
        heappush(cheapest, (_price(load), at))
        while load.request in played and begin_s + nbytes / rate + load.played_s > load.due_s:
            moved = order[heappop(cheapest)[1]]
            nbytes -= moved.bytes
            played.discard(moved.request)
            computed.add(moved.request)
    return played, computed


def _by_engine(
    order: Sequence[Demand], played: set[str], computed: set[str], rate: float, begin_s: float, engine_s: float
) -> None:
    longest = list[tuple[tuple[bool, float, float], int]]()
    before, all_s = list[Demand](), (engine_s, engine_s, begin_s)
    for at, load in enumerate(order):
        work_s = load.played_s if load.request in played else load.computed_s
        heappush(longest, (_relief(load, work_s), at))
        before.append(load)
        all_s = _with(load, played, rate, all_s)
        if max(all_s[:2]) <= load.due_s:
            continue
        while before and before[-1] is load and _ends_s(before, played, rate, begin_s, engine_s) > load.due_s:
            moved = order[heappop(longest)[1]]
            before = [each for each in before if each is not moved]
            played.discard(moved.request)
            computed.discard(moved.request)
        all_s = engine_s, engine_s, begin_s
        for each in before:
            all_s = _with(each, played, rate, all_s)


def _with(load: Demand, played: set[str], rate: float, all_s: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return the end times after one more job: the engine's without waiting for plays, the engine's, and the link's."""
    busy_s, plays_s, here_s = all_s
    if load.request not in played:
        return busy_s + _ENGINE_MARGIN * load.computed_s, plays_s, here_s
    here_s, work_s = here_s + load.bytes / rate, _ENGINE_MARGIN * load.played_s
    return busy_s + work_s, max(plays_s, here_s) + work_s, here_s


def _ends_s(order: Sequence[Demand], played: set[str], rate: float, begin_s: float, engine_s: float) -> float:
    """Return when the engine ends the last job, which has the latest deadline."""
    now, here_s = engine_s, begin_s
    now += _ENGINE_MARGIN * sum(load.computed_s for load in order if load.request not in played)
    waits = order[-1].request in played
    for load in order:
        if load.request in played:
            here_s += load.bytes / rate
            if here_s >= now and not waits:
                break  # ended by then
            now = max(now, here_s) + _ENGINE_MARGIN * load.played_s
    return now
