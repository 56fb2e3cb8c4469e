"""An oracle: places for a day's requests, found with full knowledge of the link and all requests.

The optimum cannot be computed (at least 3^n assignments), so the oracle improves the best rule's result. For each
request in order, it tries other choices, plays the `HORIZON` following requests, and keeps a change that reduces their
total time. Tests compare it with the optimum on small days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from kvabr_lab.day.requests import DayRequest
from kvabr_lab.day.world import Choice, Day, DayOutcome, World, WorldShape
from kvabr_lab.route import BOTH, FETCH, LOCAL, REMOTE

HORIZON = 48
_EQUAL_REQUESTS = 4
"""Number of consecutive requests with equal results after which a change has no further effect."""
_SAME_S = 1e-6
_FRONTS = (0.25, 0.5)
"""Fractions of a prompt to try as its front; a chosen front is then varied."""
_CHANGES = (0.8, 1.25)
_MIN_GROUPS = 8


def search(
    requests: Sequence[DayRequest],
    start: Sequence[Choice],
    shape: WorldShape,
    *,
    sweeps: int = 2,
    horizon: int = HORIZON,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[DayOutcome]:
    """Return the outcomes of all requests under the best choices found, by number.

    The search begins with the choices ``start`` of a rule, and ends after a sweep over the day without gain.
    """
    choices = list(start)
    best = replay_choices(requests, choices, shape)
    for _ in range(sweeps):
        tried = _sweep(requests, choices, shape, horizon, on_progress)
        made = replay_choices(requests, tried, shape)
        gain = _mean(best) - _mean(made)
        if gain > 0:
            best, choices = made, tried
        if gain < _SAME_S:
            break
    return best


def replay_choices(requests: Sequence[DayRequest], choices: Sequence[Choice], shape: WorldShape) -> list[DayOutcome]:
    """Return the outcomes of all requests under given choices, by number."""
    found: dict[int, DayOutcome] = {}
    day = Day(requests, World(shape))
    while (arriving := day.next()) is not None:
        number = arriving[0].number
        found[number] = day.serve(choices[number])
    return [found[number] for number in range(len(requests))]


def _mean(outcomes: Sequence[DayOutcome]) -> float:
    return fmean(outcome.ttft_s for outcome in outcomes)


def candidates(day: Day, request: DayRequest, now: float, current: Choice) -> Iterator[Choice]:
    """Yield alternative choices for a request."""
    here, there = day.world.view(request, now)
    group = day.world.shape.cache.group_tokens
    for place in (LOCAL, REMOTE):
        if place != current.place:
            yield Choice(place)
    if there.cached_tokens > here.cached_tokens and current.place != FETCH:
        yield Choice(FETCH)
    behind, lacking = here.cached_tokens, request.tokens - here.cached_tokens
    if not day.world.shape.both or lacking < _MIN_GROUPS * group:
        return
    if current.place == BOTH:
        fronts = [behind + share * (current.front_tokens - behind) for share in _CHANGES]
    else:
        fronts = [behind + share * lacking for share in _FRONTS]
    for front in fronts:
        if group <= front - behind < lacking:
            yield Choice(BOTH, int(front) // group * group)


def _sweep(
    requests: Sequence[DayRequest],
    start: Sequence[Choice],
    shape: WorldShape,
    horizon: int,
    on_progress: Callable[[int], None],
) -> list[Choice]:
    choices, day = list(start), Day(requests, World(shape))
    ahead, base = day.copy(), dict[int, float]()
    while (arriving := day.next()) is not None:
        request, now = arriving
        # Extend the play of the unchanged choices as far as needed.
        while len(base) <= horizon and (coming := ahead.next()) is not None:
            number = coming[0].number
            base[number] = ahead.serve(choices[number]).ttft_s
        current = choices[request.number]
        best, gain = current, _SAME_S
        for choice in candidates(day, request, now, current):
            found = _gain(day.copy(), choices, choice, horizon, base)
            if found > gain:
                best, gain = choice, found
        choices[request.number] = best
        day.serve(best)
        if best == current:
            del base[request.number]
        else:
            ahead, base = day.copy(), {}
        on_progress(1)
    return choices


def _gain(day: Day, choices: Sequence[Choice], first: Choice, horizon: int, base: Mapping[int, float]) -> float:
    """Return the total TTFT in seconds that the next requests save, compared to ``base``, with choice ``first``.

    Requests that are not in ``base`` are ignored. Stop when the choice has no further effect.
    """
    gain, alike = 0.0, 0
    for step in range(horizon + 1):
        arriving = day.next()
        if arriving is None:
            break
        number = arriving[0].number
        ttft_s = day.serve(choices[number] if step else first).ttft_s
        if number not in base:
            continue
        gain += base[number] - ttft_s
        alike = alike + 1 if abs(base[number] - ttft_s) < _SAME_S else 0
        if alike >= _EQUAL_REQUESTS:
            break
    return gain
