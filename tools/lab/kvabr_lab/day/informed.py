"""A rule with the best knowledge that a router can have, and the gain from further knowledge.

`Informed` shows how much of the advantage of `oracle`, which knows the future, a router could reach. It has the
simulator, the request generator, the history of the link, and unlimited time per decision (about a second). For every
place of a request it plays several futures: requests of other seeds at this time of day, the link as it continued after
similar moments, and random prefill times. Later requests go where their first token is soonest. It deviates from
kvabr's rule only if the gain exceeds its standard error.

If it is given a piece of `KNOWLEDGE`, that piece is the same in all futures; the gain shows which part of the oracle's
advantage it explains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from kvabr.types.errors import UsageError
from kvabr_lab.day.requests import DayRequest, DayShape, day_of_requests, shared_parts
from kvabr_lab.day.rules import Kvabr, choice_of
from kvabr_lab.day.world import Choice, Day, DayOutcome, World, WorldShape
from kvabr_lab.route import Forecast, PrefillSite, RouteLink, forecasts

REQUESTS, LINK, TIMES = "requests", "link", "times"
KNOWLEDGE = (REQUESTS, LINK, TIMES)
_OTHER_DAYS_OFFSET = 1 << 40
_MOMENTS, _LOOK_S = 24, (2.0, 30.0)
"""Number of past moments of the link to compare per future, and seconds before these moments that must be similar."""
_EQUAL_REQUESTS, _EQUAL_S = 4, 1e-6
"""Number of consecutive equal requests after which two futures count as equal, and the tolerance in seconds."""

Arrival = tuple[float, DayRequest]


def other_days(day: DayShape, shape: WorldShape, seed: int, count: int) -> list[list[Arrival]]:
    """Return the arrivals on ``count`` other days with the same statistics; ``seed`` is that of the actual day."""
    found = []
    for number in range(count):
        requests = day_of_requests(day, seed + _OTHER_DAYS_OFFSET + number)
        shared = shared_parts(requests)
        known, offset = {part for part, _ in shared}, _OTHER_DAYS_OFFSET * (number + 1)
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
    """kvabr's rule, corrected by simulated futures that are as likely as the actual one."""

    def __init__(
        self,
        shape: WorldShape,
        day: Day,
        others: Sequence[Sequence[Arrival]],
        *,
        futures: int,
        knows: Collection[str] = (),
        ahead: int = 32,
    ) -> None:
        """Start a day; each decision plays ``futures`` futures of at most ``ahead`` requests.

        ``knows`` is a subset of `KNOWLEDGE`. Unless it contains the requests, ``others`` are other days, one per
        future.
        """
        super().__init__(shape)
        if unknown := set(knows) - set(KNOWLEDGE):
            raise UsageError(
                f"unknown kind of knowledge {', '.join(sorted(unknown))}; choose from {', '.join(KNOWLEDGE)}"
            )
        self._day, self._others, self._ahead, self._knows = day, others, ahead, frozenset(knows)
        self._futures = 1 if self._knows == set(KNOWLEDGE) else futures
        self._dice = random.Random(0)  # noqa: S311  # a simulation
        self._lucks: list[dict[int, tuple[float, float]]] = [{} for _ in range(self._futures)]

    def _known(self, options: Sequence[Forecast], request: DayRequest, world: World, now: float) -> Sequence[Forecast]:
        del world  # the world of the day
        if len(options) < 2:
            return options
        usual = min(range(len(options)), key=lambda each: options[each].price_s)
        sums = [self._future(number, options, usual, request, now) for number in range(self._futures)]
        prices = [0.0] * len(options)
        for index in range(len(options)):
            gains = [one[usual] - one[index] for one in sums]
            gain, error = fmean(gains), _standard_error(gains) if index != usual else 0.0
            prices[index] = -gain if gain > error else 0.0 if index == usual else math.inf
        return [replace(one, ttft_s=price, others_s=0.0) for one, price in zip(options, prices, strict=True)]

    def _future(
        self, number: int, options: Sequence[Forecast], usual: int, request: DayRequest, now: float
    ) -> list[float]:
        """Return, for each place, the total time of a request and its successors in one future."""
        shift = 0.0 if LINK in self._knows else self._moment(self._day.world, now) - now
        worlds, totals = [], []
        for one in options:
            world = self._day.world.copy()
            world.wire.shift(shift)
            worlds.append(world)
            totals.append(world.serve(self._lucky(request, number), choice_of(one), now).ttft_s)
        alike = 0
        for at, other in self._coming(number, choice_of(options[usual]), shift, now):
            took = [world.serve(other, _soonest(world, other, at), at).ttft_s for world in worlds]
            totals = [total + ttft_s for total, ttft_s in zip(totals, took, strict=True)]
            alike = alike + 1 if max(took) - min(took) < _EQUAL_S else 0
            if alike >= _EQUAL_REQUESTS:
                break
        return totals

    def _coming(self, number: int, usual: Choice, shift: float, now: float) -> Iterator[Arrival]:
        """Yield one future's next requests; the actual day's arrive as if the current one went to its usual place."""
        if REQUESTS not in self._knows:
            coming = (arrival for arrival in self._others[number] if arrival[0] > now)
            yield from (arrival for arrival, _ in zip(coming, range(self._ahead), strict=False))
            return
        day = self._day.copy()
        day.world.wire.shift(shift)
        day.serve(usual)
        for _ in range(self._ahead):
            if (arriving := day.next()) is None:
                return
            other, at = arriving
            yield at, self._lucky(other, number)
            day.serve(_soonest(day.world, other, at))

    def _lucky(self, request: DayRequest, number: int) -> DayRequest:
        if TIMES in self._knows:
            return request
        luck = self._lucks[number].setdefault(request.number, (self._dice.gauss(0.0, 1.0), self._dice.gauss(0.0, 1.0)))
        return replace(request, luck=luck)

    def _moment(self, world: World, now: float) -> float:
        def looks(at: float) -> list[float]:
            return [world.wire.carried(max(0.0, at - back), at) / back for back in _LOOK_S]

        mine, most = looks(now), world.shape.trace.duration_s
        moments = [_LOOK_S[-1] + self._dice.random() * most for _ in range(_MOMENTS)]
        return min(moments, key=lambda at: sum(abs(a - b) for a, b in zip(looks(at), mine, strict=True)))


def play_informed(
    requests: Sequence[DayRequest],
    shape: WorldShape,
    day: DayShape,
    seed: int,
    *,
    futures: int = 16,
    knows: Collection[str] = (),
) -> list[DayOutcome]:
    """Return the outcomes of a day's requests under `Informed`, by number."""
    others = [] if REQUESTS in knows else other_days(day, shape, seed, futures)
    played = Day(requests, World(shape))
    rule = Informed(shape, played, others, futures=futures, knows=knows)
    found: dict[int, DayOutcome] = {}
    while (arriving := played.next()) is not None:
        request, now = arriving
        found[request.number] = played.serve(rule.place(request, played.world, now))
    return [found[number] for number in range(len(requests))]


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _soonest(world: World, request: DayRequest, now: float) -> Choice:
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
