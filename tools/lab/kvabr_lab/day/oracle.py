"""An oracle: choices for a day's requests, searched for in full knowledge of the link and of everything to come.

The best of all assignments is out of reach (there are at least 3^n), so the oracle starts from the best that any rule
has found and improves it: request by request, in the order of arrival, it tries other choices, plays the `HORIZON`
requests that follow, and keeps a change if those are served sooner in all. On days small enough to enumerate, the tests
compare it with the best of all assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from kvabr_lab.day.requests import DayRequest
from kvabr_lab.day.world import Choice, Day, DayOutcome, World, WorldShape
from kvabr_lab.route import BOTH, FETCH, LOCAL, REMOTE

HORIZON = 48
"""Requests that are played after a change, at most."""
_ALIKE = 4
"""A change has worn off when this many requests in a row were served as without it."""
_SAME_S = 1e-6
_FRONTS = (0.25, 0.5)
"""Shares of a prompt that are tried as its front; a front that is chosen is then made shorter and longer."""
_CHANGES = (0.8, 1.25)
_LEAST_GROUPS = 8
"""A prompt of fewer groups is not split."""


def search(
    requests: Sequence[DayRequest],
    start: Sequence[Choice],
    shape: WorldShape,
    *,
    sweeps: int = 2,
    horizon: int = HORIZON,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[DayOutcome]:
    """Return what becomes of every request under the best choices that were found, by their numbers.

    Args:
        requests: The day.
        start: What a rule chose.
        shape: Sites and link.
        sweeps: How often to go through the day, at most; the search ends when a sweep gains nothing.
        horizon: Requests that are played after a change, at most.
        on_progress: Called with the number of requests that were looked at.
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
    """Return what becomes of every request if each goes where it is told, by their numbers."""
    found: dict[int, DayOutcome] = {}
    day = Day(requests, World(shape))
    while (arriving := day.next()) is not None:
        number = arriving[0].number
        found[number] = day.serve(choices[number])
    return [found[number] for number in range(len(requests))]


def _mean(outcomes: Sequence[DayOutcome]) -> float:
    return fmean(outcome.ttft_s for outcome in outcomes)


def candidates(day: Day, request: DayRequest, now: float, current: Choice) -> Iterator[Choice]:
    """Yield what else could become of a request that arrives."""
    here, there = day.world.view(request, now)
    group = day.world.shape.cache.group_tokens
    for place in (LOCAL, REMOTE):
        if place != current.place:
            yield Choice(place)
    if there.cached_tokens > here.cached_tokens and current.place != FETCH:
        yield Choice(FETCH)
    behind, lacking = here.cached_tokens, request.tokens - here.cached_tokens
    if not day.world.shape.both or lacking < _LEAST_GROUPS * group:
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
        # What becomes of the next requests without a change is played on from where it ended, until there is one.
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
    """Play the next requests, the first of them as told, and return what they gain over ``base``.

    Only requests that are also in ``base`` count. A change that has worn off ends it.
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
        if alike >= _ALIKE:
            break
    return gain
