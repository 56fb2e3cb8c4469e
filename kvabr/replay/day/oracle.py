"""An oracle: places for a day's requests, searched for in full knowledge of the link and of everything to come.

The best of all assignments is out of reach (there are 3^n), so the oracle starts from the best that any rule has found
and improves it: request by request, in the order of arrival, it tries the other places, plays the `HORIZON` requests
that follow, and keeps a change if those are served sooner in all. On days small enough to enumerate, the tests compare
it with the best of all assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from kvabr.replay.day.requests import DayRequest
from kvabr.replay.day.rules import CHOICES
from kvabr.replay.day.world import Day, DayOutcome, World, WorldShape
from kvabr.route import FETCH, Place

HORIZON = 24
"""Requests that are played after a change, at most."""
_ALIKE = 4
"""A change has worn off when this many requests in a row were served as without it."""
_SAME_S = 1e-6


def search(
    requests: Sequence[DayRequest],
    start: Sequence[Place],
    shape: WorldShape,
    *,
    sweeps: int = 2,
    horizon: int = HORIZON,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[DayOutcome]:
    """Return what becomes of every request under the best places that were found, by their numbers.

    Args:
        requests: The day.
        start: Where a rule sent them.
        shape: Sites and link.
        sweeps: How often to go through the day, at most; the search ends when a sweep gains nothing.
        horizon: Requests that are played after a change, at most.
        on_progress: Called with the number of requests that were looked at.
    """
    places = list(start)
    best = replay_places(requests, places, shape)
    for _ in range(sweeps):
        tried = _sweep(requests, places, shape, horizon, on_progress)
        made = replay_places(requests, tried, shape)
        gain = _mean(best) - _mean(made)
        if gain > 0:
            best, places = made, tried
        if gain < _SAME_S:
            break
    return best


def replay_places(requests: Sequence[DayRequest], places: Sequence[Place], shape: WorldShape) -> list[DayOutcome]:
    """Return what becomes of every request if each goes where it is told, by their numbers."""
    found: dict[int, DayOutcome] = {}
    day = Day(requests, World(shape))
    while (arriving := day.next()) is not None:
        number = arriving[0].number
        found[number] = day.serve(places[number])
    return [found[number] for number in range(len(requests))]


def _mean(outcomes: Sequence[DayOutcome]) -> float:
    return fmean(outcome.ttft_s for outcome in outcomes)


def _sweep(
    requests: Sequence[DayRequest],
    start: Sequence[Place],
    shape: WorldShape,
    horizon: int,
    on_progress: Callable[[int], None],
) -> list[Place]:
    places, day = list(start), Day(requests, World(shape))
    while (arriving := day.next()) is not None:
        request, now = arriving
        here, there = day.world.view(request, now)
        base: dict[int, float] = {}
        _ahead(day.copy(), places, places[request.number], horizon, base, {})
        best, gain = places[request.number], _SAME_S
        for place in CHOICES:
            if place == places[request.number] or (place == FETCH and there.cached_tokens <= here.cached_tokens):
                continue
            found = _ahead(day.copy(), places, place, horizon, {}, base)
            if found > gain:
                best, gain = place, found
        places[request.number] = best
        day.serve(best)
        on_progress(1)
    return places


def _ahead(
    day: Day, places: Sequence[Place], first: Place, horizon: int, times: dict[int, float], base: dict[int, float]
) -> float:
    """Play the next requests, the first of them at another place; note their times, and return what they gain.

    Only requests that are also in ``base`` count. A change that has worn off ends it.
    """
    gain, alike = 0.0, 0
    for step in range(horizon + 1):
        arriving = day.next()
        if arriving is None:
            break
        number = arriving[0].number
        ttft_s = times[number] = day.serve(places[number] if step else first).ttft_s
        if number not in base:
            continue
        gain += base[number] - ttft_s
        alike = alike + 1 if abs(base[number] - ttft_s) < _SAME_S else 0
        if alike >= _ALIKE:
            break
    return gain
