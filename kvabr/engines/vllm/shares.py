"""Which of the requests that wait are played, and which are computed: what link and engine carry in time, together.

A play occupies the link for the bytes of its cheapest track, and then the engine for the tokens that no cache covers; a
request that is computed occupies the engine for all of its tokens. The link serves the earliest deadline first, and so
does the engine, which computes one prompt after the other. If all can be played in time, all are. If not, those are
computed that cost the engine least for what they spare the link; of those that cost alike, the ones whose caches lose
most. If the engine cannot do that either, those wait that spare most: they are late, so that the others are not.

Pure: no vLLM, no clock, no threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

_ENGINE_MARGIN = 1.1
"""What engines are reckoned to take, over what they should: steps are not full, and other work goes on."""


@dataclass(slots=True)
class Demand:
    """What one request would take."""

    request: str
    due_s: float
    bytes: float
    """Bytes that the link has to bring if it is played; fewer as they come."""
    played_s: float
    """Seconds of the engine if it is played."""
    computed_s: float
    """Seconds of the engine if it is computed."""
    loss: float = 0.0
    """Expected loss on its cheapest track, nats per generated token."""
    begun: bool = False
    """Whether its play is under way."""
    here_s: float = 0.0
    """When the link should have brought it."""
    by_s: float = 0.0
    """When it must be there at the latest, for all that follow to be in time."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What becomes of some requests, each in the order of their deadlines."""

    played: Sequence[Demand]
    computed: Sequence[Demand]
    late: Sequence[Demand]


def divide(loads: Iterable[Demand], rate: float, *, now: float, ttfb_s: float, engine_s: float) -> Assignment:
    """Divide requests, and say when what is played should come.

    Args:
        loads: what they would take.
        rate: of the link, bytes per second.
        now: the time.
        ttfb_s: seconds from a request to its first byte.
        engine_s: when the engine is free.
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
    """Return how dear it is to have a request computed; of equals those go first that are due last."""
    more_s = load.computed_s - load.played_s
    return load.begun, more_s / load.bytes if load.bytes > 0 else math.inf, -load.loss, -load.due_s


def _relief(load: Demand, work_s: float) -> tuple[bool, float, float]:
    """Return what the engine gains if a request is late, the most first: what takes longest, and is not under way."""
    return load.begun, -work_s, -load.due_s


def _by_link(order: Sequence[Demand], rate: float, begin_s: float) -> tuple[set[str], set[str]]:
    """Return those that the link brings in time, and those that are computed instead.

    A request that gives way to another is due before it, so those before stay in time.
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
    """Take those out that wait, so that the engine ends the others in time."""
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
    """Return when engine and link have done one job more than before.

    That is: the engine, if it never waits; the engine, if nothing is computed; and the link.
    """
    busy_s, plays_s, here_s = all_s
    if load.request not in played:
        return busy_s + _ENGINE_MARGIN * load.computed_s, plays_s, here_s
    here_s, work_s = here_s + load.bytes / rate, _ENGINE_MARGIN * load.played_s
    return busy_s + work_s, max(plays_s, here_s) + work_s, here_s


def _ends_s(order: Sequence[Demand], played: set[str], rate: float, begin_s: float, engine_s: float) -> float:
    """Return when an engine ends the last of some jobs, which does the earliest deadline first, so that one last."""
    now, here_s = engine_s, begin_s
    now += _ENGINE_MARGIN * sum(load.computed_s for load in order if load.request not in played)
    waits = order[-1].request in played
    for load in order:
        if load.request in played:
            here_s += load.bytes / rate
            if here_s >= now and not waits:
                break  # it has ended by then
            now = max(now, here_s) + _ENGINE_MARGIN * load.played_s
    return now
