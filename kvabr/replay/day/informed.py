"""A rule that knows as much as a router can at best: everything but what has not happened yet.

`oracle` knows the future, which no router can. What remains of its advantage for a router shows `Informed`: it has the
simulator itself, the generator of requests, and the whole history of the link, and all the time that it wants for a
decision. For every place that a request may go, it plays several futures: requests as other seeds bring them at this
time of the day, the link as it went on from other moments that looked like this one, and prefills that take longer or
shorter at random. In each, those requests go where they have their first token soonest. It leaves what kvabr's rule
would choose only for a place that is better by more than the standard error of the difference.

It needs about a second for a decision, and is there to be compared with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from kvabr.replay.day.requests import DayRequest, DayShape, day_of_requests, shared_parts
from kvabr.replay.day.rules import Kvabr, choice_of, play_day
from kvabr.replay.day.world import Choice, Day, DayOutcome, World, WorldShape
from kvabr.route import Forecast, PrefillSite, RouteLink, forecasts

_OTHERS = 1 << 40
"""Added to the seed for other days, and to the numbers of what only they have."""
_MOMENTS, _LOOK_S = 24, (2.0, 30.0)
"""Moments of the link's history that are looked at for a future, and how far back they must look like this one."""

Arrival = tuple[float, DayRequest]


def other_days(day: DayShape, shape: WorldShape, seed: int, count: int) -> list[list[Arrival]]:
    """Return when other requests came on other days that have the same statistics.

    Args:
        day: What the days have in common.
        shape: Sites and link.
        seed: The day that these are not.
        count: Number of days.
    """
    found = []
    for number in range(count):
        requests = day_of_requests(day, seed + _OTHERS + number)
        shared = shared_parts(requests)
        known, offset = {part for part, _ in shared}, _OTHERS * (number + 1)
        place = replace(shape, warm=shared)
        coming, rule = Day(requests, World(place)), Kvabr(place, considerate=False)
        arrivals = []
        while (arriving := coming.next()) is not None:
            request, now = arriving
            coming.serve(rule.place(request, coming.world, now))
            parts = tuple(part if part[0] in known else (part[0] + offset, part[1]) for part in request.parts)
            answer = (request.answer[0] + offset, request.answer[1])
            arrivals.append((now, replace(request, parts=parts, answer=answer, following=None)))
        found.append(arrivals)
    return found


class Informed(Kvabr):
    """kvabr's rule, corrected by what follows in futures that are as likely as the true one."""

    def __init__(self, shape: WorldShape, others: Sequence[Sequence[Arrival]], *, ahead: int = 16) -> None:
        """Know other days, one for each future; ``ahead``: requests that are played in each."""
        super().__init__(shape)
        self._others, self._ahead = others, ahead
        self._dice = random.Random(0)  # noqa: S311  # a simulation

    def _known(self, options: Sequence[Forecast], request: DayRequest, world: World, now: float) -> Sequence[Forecast]:
        if len(options) < 2:
            return options
        sums = [self._future(arrivals, options, request, world, now) for arrivals in self._others]
        usual = min(range(len(options)), key=lambda each: options[each].price_s)
        prices = [0.0] * len(options)
        for index in range(len(options)):
            gains = [one[usual] - one[index] for one in sums]
            error = stdev(gains) / math.sqrt(len(gains)) if index != usual else 0.0
            gain = fmean(gains)
            prices[index] = -gain if gain > error else 0.0 if index == usual else math.inf
        return [replace(one, ttft_s=price, others_s=0.0) for one, price in zip(options, prices, strict=True)]

    def _future(
        self, arrivals: Sequence[Arrival], options: Sequence[Forecast], request: DayRequest, world: World, now: float
    ) -> list[float]:
        """Return how long a request and those after it take in one future, by where the request goes."""
        dice = self._dice
        shift = self._moment(world, now) - now
        luck = (dice.gauss(0.0, 1.0), dice.gauss(0.0, 1.0))
        coming = [arrival for arrival in arrivals if arrival[0] > now][: self._ahead]
        found = []
        for one in options:
            there = world.copy()
            there.wire.shift(shift)
            total = there.serve(replace(request, luck=luck), choice_of(one), now).ttft_s
            for at, other in coming:
                total += there.serve(other, _soonest(there, other, at), at).ttft_s
            found.append(total)
        return found

    def _moment(self, world: World, now: float) -> float:
        """Return a moment of the link's history that looked like this one."""

        def looks(at: float) -> list[float]:
            return [world.wire.carried(max(0.0, at - back), at) / back for back in _LOOK_S]

        mine, most = looks(now), world.shape.trace.duration_s
        moments = [_LOOK_S[-1] + self._dice.random() * most for _ in range(_MOMENTS)]
        return min(moments, key=lambda at: sum(abs(a - b) for a, b in zip(looks(at), mine, strict=True)))


def play_informed(
    requests: Sequence[DayRequest], shape: WorldShape, day: DayShape, seed: int, *, futures: int = 16
) -> list[DayOutcome]:
    """Return what becomes of the requests of a day under `Informed`, by their numbers."""
    return play_day(requests, shape, Informed(shape, other_days(day, shape, seed, futures)))


def _soonest(world: World, request: DayRequest, now: float) -> Choice:
    """Return where a request has its first token soonest, as far as that can be forecast."""
    here, there = world.view(request, now)
    shape, backlog = world.shape, world.wire.backlog(now)
    lacking = max(1, request.tokens - here.cached_tokens) * shape.cache.per_token
    link = RouteLink(world.wire.rate(backlog + lacking, now), world.rtt_s, backlog, shape.live)
    sites = (
        PrefillSite(shape.local.cost, here.queue_s, here.cached_tokens),
        PrefillSite(shape.remote.cost, there.queue_s, there.cached_tokens),
    )
    found = forecasts(request.tokens, *sites, link, shape.cache, both=shape.both)
    return choice_of(min(found, key=lambda one: one.ttft_s))
