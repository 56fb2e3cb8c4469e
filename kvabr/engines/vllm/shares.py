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
from functools import partial
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
    played, computed = {load.request for load in order}, set[str]()
    while (first := _first_late(order, played, computed, rate, now + ttfb_s, max(now, engine_s))) is not None:
        at, link = first
        before = order[: at + 1]
        if link:
            moved = min((load for load in before if load.request in played), key=_price)
            computed.add(moved.request)
        else:
            moved = max((load for load in before if load.request in played | computed), key=partial(_relief, played))
            computed.discard(moved.request)
        played.discard(moved.request)
    plays = [load for load in order if load.request in played]
    end_s = math.inf
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


def _relief(played: set[str], load: Demand) -> tuple[bool, float, float]:
    """Return what it spares the engine if a request is late."""
    return not load.begun, load.played_s if load.request in played else load.computed_s, load.due_s


def _first_late(
    order: Sequence[Demand], played: set[str], computed: set[str], rate: float, begin_s: float, engine_s: float
) -> tuple[int, bool] | None:
    """Return the first request that is late, and whether the link is why; None if none is."""
    here_s, jobs = begin_s, []
    for at, load in enumerate(order):
        if load.request in played:
            here_s += load.bytes / rate
            load.here_s = here_s
            if here_s + load.played_s > load.due_s:
                return at, True
            jobs.append((here_s, at, _ENGINE_MARGIN * load.played_s))
        elif load.request in computed:
            jobs.append((engine_s, at, _ENGINE_MARGIN * load.computed_s))
    late = _engine_late([load.due_s for load in order], sorted(jobs), engine_s)
    return None if late is None else (late, False)


def _engine_late(due_s: Sequence[float], jobs: Sequence[tuple[float, int, float]], now: float) -> int | None:
    """Return the first job that an engine ends late, which does the earliest deadline first; None if it ends none late.

    Args:
        due_s: when each of them is due, ascending.
        jobs: when each is ready, which it is, and the seconds that it takes, in the order in which they are ready.
        now: when the engine begins.
    """
    ready: list[tuple[int, float]] = []
    number, late = 0, len(due_s)
    while number < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[number][0])
        while number < len(jobs) and jobs[number][0] <= now:
            heappush(ready, jobs[number][1:])
            number += 1
        at, left_s = heappop(ready)
        next_s = jobs[number][0] if number < len(jobs) else math.inf
        if now + left_s > next_s:
            heappush(ready, (at, left_s - (next_s - now)))
            now = next_s
            continue
        now += left_s
        if now > due_s[at]:
            late = min(late, at)
    return late if late < len(due_s) else None
