"""Divides the work between network and engine at the least cost.

The cost is computed for every group at which the engine may stop. It is the loss of the other groups on tracks that the
network can deliver, plus the price of the time until both are done, plus the price of engine time
(`TimePlanner.divide`).

- ``hole``: the engine computes from the front while the network fetches from the back, so the later of the two counts.
- ``suffix``: the engine needs all earlier groups in place and computes from there to the end. Both times add up, and
  computed groups amplify errors right before them. A prefix play is cut there, or as soon as no request pays off.

If the rate is uncertain, the division has the least mean cost over several rates, each relative to the least cost at
that rate. The engine's calls are then short, and only start if that is better than waiting for a better estimate. The
longer a link is silent, the more likely it is dead; waiting ends before the engine would be late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvabr.abr.belief import (
    DIVISION_TOLERANCE,
    HELD_TOLERANCE,
    MIN_WAIT_S,
    RATE_TOLERANCE,
    SPEED_UP,
    UNKNOWN_TTFB_S,
    Belief,
    LinkBelief,
)
from kvabr.abr.policy import Decision, Division
from kvabr.abr.time_planner import UNAVAILABLE_LOSS, TimePlanner
from kvabr.abr.view import MAX_PARTS, View
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import MISS_PENALTY, PrefillCost

_MIN_GAIN = 0.03
"""Minimum relative gain of a new division over the previous one, or over no computing; in suffix mode also the maximum
cost of waiting for a better rate estimate, relative to the least cost of the play, if the engine can meet the
deadline."""
_MIN_PLAY_COST = 1e-6
"""Minimum cost of a play in nats per generated token, so that ratios of costs stay finite."""
_SETTLED_BEFORE_CALL = 8
"""Number of groups right before a call that must have no upgrade in flight or undecoded: computed groups inherit their
loss."""


Array = npt.NDArray[np.float64]


class _Ways(NamedTuple):
    """The possible divisions if the engine continues at one group."""

    start: int
    stops: npt.NDArray[np.intp]
    """Groups at which the engine may stop, or in suffix mode start; the arrays below have one entry per stop."""
    costs: Array
    """Cost by rate and stop, in nats per generated token."""
    engine_s: Array
    """Seconds until the engine has computed its groups, by stop."""
    network_s: Array
    """Seconds until the network has delivered its groups at the last rate, by stop."""


def computed_before_a_lookup(cost: PrefillCost, tokens: int, ttfb_s: float) -> bool:
    """Return True if an engine usually computes ``tokens`` tokens before the first answer to a lookup arrives.

    ``ttfb_s``: time to first byte in earlier plays; 0.0 for an unknown peer.
    """
    return cost.seconds(0, tokens) <= (ttfb_s or UNKNOWN_TTFB_S)


class ComputePlanner:
    """Decides which groups the engine of one play computes."""

    def __init__(self, view: View, times: TimePlanner, link: LinkBelief) -> None:
        catalog, cost = view.catalog, view.cost
        assert cost is not None  # noqa: S101  # callers check that there is an engine
        self._times, self._link, self._suffix = times, link, view.front_first
        self._tokens = [catalog.tokens_before(group) for group in range(view.groups + 1)]
        self._ends = np.array(self._tokens)
        self.reserved = range(0)
        """Groups reserved for the engine; they are not requested."""
        self.until_s = 0.0
        """When the engine should have computed them, after its current work, in seconds since the play began."""
        self._computed = self._ahead = 0
        """First group that is not assigned to the engine, and the first such group that is not in place."""
        self.called_to = 0
        """First group after the engine's last call, or after groups computed since."""
        self._target = 0
        self._planned: tuple[tuple[int, int, int], float, float, bool] | None = None
        """Inputs of the plan: first missing and first inexact group and the end of the last call; rate; time; in suffix
        mode, True if the prefix to fetch was in place."""
        self._holds = 0
        """Number of further decisions before the plan may change, see `View.keeps`."""
        self._network_s = 0.0
        self._stop, self._held_since_s = -1, 0.0
        """Where the engine stops in the last division, and since when it does."""
        self._belief = Belief.of((1.0,))
        self._waits = False
        self._call_to: int | None = None
        """Group at which the next call ends while the rate is uncertain; equal to its first group if there is no
        call."""
        self.division: Division | None = None

    # ------------------------------------------------------------------- the rule

    def plan(self, view: View) -> None:
        """Divide the work between network and engine."""
        place = front, _, _ = self._front(view), self._exact(view), self.called_to
        if view.cost is None or (front == view.groups and view.track_of[-1] == RECOMPUTED):
            self.reserved, self.until_s = range(0), view.now + view.engine_backlog_s
            self._target, self._planned = 0, None
            return
        self._holds -= 1
        if (last := self._planned) is not None:
            before, rate, then, complete = last
            horizon_s = min(view.deadline_s, max(self.division.compute_s if self.division else 0.0, view.now))
            tolerated_s = DIVISION_TOLERANCE * horizon_s + HELD_TOLERANCE * (then - self._held_since_s)
            same = abs(view.rate - rate) <= RATE_TOLERANCE * rate and view.now - then <= tolerated_s
            if self._suffix:  # the rest may now be best left to the engine
                same = same and complete == (view.solid >= self.reserved.start)
            else:
                same = same and before == place
            idle = view.engine_backlog_s <= 0 and not self._suffix
            if same or (self._holds > 0 and not idle):
                return
        self._holds = view.keeps
        self._times.sync(view)
        kept = None
        if last is not None and last[1] > 0:
            kept = self.reserved.start if self._suffix else self.reserved.stop
        first, stop = self._divide(view, front, kept)
        if stop != self._stop:
            self._stop, self._held_since_s = stop, view.now
        if self._suffix:
            self.reserved, self.until_s = range(view.groups if self._waits else stop, view.groups), 0.0
        else:
            self.reserved = range(first, stop)
            self.until_s = view.now + view.engine_backlog_s + self._call_s(view, first, stop)
            self._target = stop
            if self._belief.state in {"unknown", "growing", "prior"}:  # give the network a chance to show its rate
                self._target = self._last(view, first, stop) or first
                self.reserved = range(first, self._target)
        self._planned = place, view.rate, view.now, view.solid >= self.reserved.start

    @property
    def advances(self) -> bool:
        """True if the engine should continue, now or once the rate is better known."""
        return self._target > self.reserved.start

    def outside(self, view: View) -> bool:
        """Return True if groups are missing that only the network will deliver."""
        missing = view.missing_groups
        return any(group is not None and group not in self.reserved for group in (missing.first(), missing.last()))

    def _front(self, view: View) -> int:
        """Return the first group that is neither in place nor assigned to the engine, or the number of groups."""
        self._ahead = max(view.solid, self._ahead)
        while self._ahead < view.groups and view.track_of[self._ahead] == RECOMPUTED:
            self._ahead += 1
        return self._ahead

    def _exact(self, view: View) -> int:
        """Return the first group that is not assigned to the engine."""
        while self._computed < view.groups and view.track_of[self._computed] == RECOMPUTED:
            self._computed += 1
        return self._computed

    def _restarts(self, view: View, front: int) -> Iterable[int]:
        """Return where the engine may begin apart from the first inexact group."""
        if front < view.groups:
            return (front,)
        # It may also recompute lossy groups: where its last call ended, and the last one, which often has most loss.
        while self.called_to < view.groups and view.track_of[self.called_to] == RECOMPUTED:
            self.called_to += 1
        return (one for one in (self.called_to, view.groups - 1) if self._computed < one < view.groups)

    def _call_s(self, view: View, first: int, stop: int) -> float:
        assert view.cost is not None  # noqa: S101  # see `plan`
        return view.cost.seconds(self._tokens[first], self._tokens[stop] - self._tokens[first])

    def _divide(self, view: View, front: int, kept: int | None) -> tuple[int, int]:
        """Return the groups at which the engine continues and stops (in suffix mode: begins).

        ``front``: the first missing group; ``kept``: the stop of the last plan, None if the rate was unknown.
        """
        computed_s = view.engine_backlog_s + self._call_s(view, front, view.groups)
        belief = self._belief = self._link.rates(view)
        if self._suffix and computed_s > view.time_left:  # else waiting could make the play late
            belief = self._link.before_call(view, belief, computed_s)
        starts = [front] if self._suffix else sorted({self._exact(view), *self._restarts(view, front)})
        ways = self.ways(view, starts, belief.rates, belief.ramp)
        least = np.maximum(np.min([way.costs.min(axis=1) for way in ways], axis=0)[:, None], _MIN_PLAY_COST)
        common = np.array(belief.weights[belief.rare :])
        regrets = [common @ (way.costs / least)[belief.rare :] for way in ways]
        way, regret = min(zip(ways, regrets, strict=True), key=lambda each: float(each[1].min()))
        best = int(regret.argmin())
        if not self._suffix and (kept is None or view.arrived):  # computing must pay off
            kept = way.start
        if self._suffix and kept is None and len(common) == 1:  # all or no computing has the most predictable cost
            kept = int(way.stops[0] if regret[0] < regret[-1] else way.stops[-1])
        if kept is not None:  # keep the last plan unless the gain is clear
            same = int(np.searchsorted(way.stops, kept))
            if same < len(way.stops) and float(regret[same]) <= (1.0 + _MIN_GAIN) * float(regret[best]):
                best = same
        self._waits, self._call_to = False, None
        if len(belief.rates) > 1 and belief.learns_s:
            self._learn(view, belief, way, best, least, computed_s)
        self._network_s, stop = float(way.network_s[best]), int(way.stops[best])
        play, compute = (-1, 0) if self._suffix else (0, -1)
        begins_s, before_s = (self._network_s, float(way.network_s[compute])) if self._suffix else (0.0, 0.0)
        self.division = Division(
            view.now,
            *((stop, view.groups) if self._suffix else (way.start, stop)),
            self._network_s,
            begins_s + float(way.engine_s[best]),
            float(way.network_s[play]),
            before_s + float(way.engine_s[compute]),
            known=belief.state not in {"unknown", "growing"} and view.rate > 0,
        )
        return way.start, stop

    def _learn(self, view: View, belief: Belief, way: _Ways, best: int, least: Array, computed_s: float) -> None:
        """Decide whether to wait for a better estimate of the rate, or in hole mode how long the next call is.

        ``best``: index of the best stop; ``least``: least cost by rate; ``computed_s``: seconds to compute everything.
        """
        shares = np.array(belief.weights)
        more = belief.learns_s * (view.time_price + (least >= MISS_PENALTY) / view.deadline_s)
        if 0.0 <= view.time_left - computed_s < belief.learns_s + 2.0 * DIVISION_TOLERANCE * view.deadline_s:
            more += MISS_PENALTY  # at the next decision the engine could not meet the deadline
        waits = 1.0 + more / least
        if self._suffix:
            waited = float((shares @ (view.time_price * view.now / least))[0])
            # If the play is late anyway, waiting as long as the engine takes is at most twice as bad.
            worst = 1.0 if way.costs[-1, best] >= MISS_PENALTY else _MIN_GAIN
            begun = float(shares @ (way.costs[:, best : best + 1] / least)[:, 0])
            self._waits = float((shares @ waits)[0]) < min(1.0 + worst - waited, begun)
        else:
            # Waiting costs nothing if the network then delivers everything.
            waits = np.minimum(waits, way.costs[:, :1] / least)
            self._call_to = self._first_call(view, way, least, shares, float((shares @ waits)[0]))

    def _why(self) -> str:
        if (here := self.division) is None:
            return "is faster"
        taken = "with" if self._suffix else "beside"
        return (
            f"takes {here.engine_s:.2g} s {taken} {here.network_s:.2g} s of fetching; fetching everything would take "
            f"{here.play_s:.2g} s, computing everything {here.compute_s:.2g} s"
        )

    def _first_call(self, view: View, way: _Ways, least: Array, shares: Array, waiting: float) -> int:
        """Return the group at which the next call ends; if no call should start, its first group.

        Calls are often short, because later ones are decided with a better rate. ``way`` has the costs by rate and
        stop, ``least`` their minimum by rate. ``shares`` has the weight of each rate, or of each rate and stop.
        ``waiting`` is the cost of waiting for a better rate, as a multiple of the least cost.
        """
        constant_s, spare_s = self._constant_s(view, way.start), view.time_left - float(way.engine_s[-1])
        again = constant_s * (view.time_price + min(view.gpu_price, 1.0))
        if 0.0 <= spare_s < constant_s:
            again += MISS_PENALTY  # after another call the engine could not meet the deadline
        cheapest_after = np.minimum.accumulate(way.costs[:, ::-1], axis=1)[:, ::-1]
        cheapest_after = np.concatenate(
            [cheapest_after[:, 1:] + again, np.full((len(cheapest_after), 1), np.inf)], axis=1
        )
        begun = (shares.reshape(len(cheapest_after), -1) * np.minimum(way.costs, cheapest_after) / least).sum(axis=0)
        took = way.engine_s - view.engine_backlog_s
        begun[took < min(MIN_WAIT_S, float(took[-1]))] = np.inf
        best = int(begun.argmin())  # the shortest of equal ones
        return int(way.stops[best]) if begun[best] <= waiting else way.start

    def _constant_s(self, view: View, first: int) -> float:
        if first + 2 > view.groups:
            return 0.0
        return max(0.0, 2 * self._call_s(view, first, first + 1) - self._call_s(view, first, first + 2))

    def ways(
        self, view: View, starts: Sequence[int], rates: Sequence[float], ramp: tuple[float, float] | None
    ) -> list[_Ways]:
        """Return the possible divisions from each of ``starts``, and their costs at each rate."""
        cost, tokens = view.cost, self._ends
        assert cost is not None  # noqa: S101  # see `plan`
        each = [self._stops(view, 0 if self._suffix else start) for start in starts]
        stops, start = np.concatenate(each), np.repeat(starts, list(map(len, each)))
        if self._suffix:
            took, inherited = cost.seconds_many(tokens[stops], tokens[-1] - tokens[stops]), np.zeros(len(stops))
        else:
            took = cost.seconds_many(tokens[start], tokens[stops] - tokens[start])
            sums = [np.append(0.0, self._times.inherited(first).cumsum()) for first in starts]
            inherited = np.concatenate([one[stop - first] for first, stop, one in zip(starts, each, sums, strict=True)])
        engine_s = view.engine_backlog_s + took
        # An infinite price is a rule: the engine computes only groups that the network does not deliver.
        spent = view.gpu_price * took if math.isfinite(view.gpu_price) else np.where(took > 0, UNAVAILABLE_LOSS, 0.0)
        found = self._times.divide(view, rates, start, stops, engine_s, inherited, ramp=ramp)
        costs = np.array([one.objective for one in found]) + spent
        ends, network_s = accumulate(map(len, each), initial=0), found[-1].network_s
        parts = [slice(*pair) for pair in pairwise(ends)]
        return [
            _Ways(first, stops[at], costs[:, at], engine_s[at], network_s[at])
            for first, at in zip(starts, parts, strict=True)
        ]

    def _stops(self, view: View, first: int) -> npt.NDArray[np.intp]:
        """Return the groups at which the engine may stop, or in suffix mode start."""
        catalog, groups = view.catalog, view.groups
        stops = np.arange(first, groups + 1)
        if self._suffix and not catalog.every_token:
            stops = np.array([one for one in range(first, groups + 1) if one == groups or catalog.cut(one) == one])
        if len(stops) > MAX_PARTS:
            stops = stops[np.unique(np.linspace(0, len(stops) - 1, MAX_PARTS).astype(int))]
        return stops

    # ------------------------------------------------------------------- its calls

    def next(self, view: View) -> Decision | None:
        """Return the next call of an idle engine, or None."""
        if view.cost is None or view.engine_backlog_s > 0:
            return None
        if self._suffix:
            return self.rest(view)
        return self._call(view) if self._target > self.reserved.start else None

    @staticmethod
    def _can_begin(view: View, group: int) -> bool:
        """Return True if all earlier groups are in place, and the player has not left this one to the engine."""
        left = view.track_of[group] is None and group not in view.missing_groups and group < view.edge
        return group <= view.solid and not left

    def _call(self, view: View) -> Decision | None:
        first, stop = self.reserved.start, self._target
        if not self._can_begin(view, first):
            return None
        changing = {*view.in_flight.groups, *view.undecoded, *(one.group for one in view.decoding.values())}
        if not changing.isdisjoint(range(first - _SETTLED_BEFORE_CALL, first)):
            return None
        if (last := self._last(view, first, stop)) is None:
            return None
        self.called_to = last
        return Decision.recompute(first, f"computing up to group {stop - 1} {self._why()}", last=last)

    def _last(self, view: View, first: int, stop: int) -> int | None:
        last = stop
        if self._call_to is not None:
            last = min(stop, self._call_to) if self._belief.state not in {"unknown", "growing"} else self._call_to
        elif view.rate > 0 and stop > first:
            # The link may turn much faster, and a call cannot be stopped. The longer a rate has held, the less likely.
            rate = self._belief.rates[-1]
            (way,) = self.ways(view, [first], [rate, SPEED_UP * rate], self._belief.ramp)
            count = 1 + int(np.searchsorted(way.stops, stop))
            way = way._replace(stops=way.stops[:count], costs=way.costs[:, :count], engine_s=way.engine_s[:count])
            faster = np.array([self._link.faster(view, float(each)) for each in way.engine_s])
            shares = np.array([1.0 - faster, faster])
            last = self._first_call(view, way, np.ones((len(shares), 1)), shares, math.inf)
        assert view.cost is not None  # noqa: S101  # see `plan`
        took = view.cost.seconds_many(self._ends[first], self._ends[first + 1 : last + 1] - self._ends[first])
        fits = np.flatnonzero(took <= view.time_left)
        return first + 1 + int(fits[-1]) if fits.size else None

    def rest(self, view: View, *, idle: bool = False) -> Decision | None:
        """In suffix mode, let the engine compute the rest, or cut the play, once the best prefix is in place.

        ``idle``: no request is in flight, and none pays off.
        """
        cut = self.reserved.start
        if not self._suffix or not self.reserved or not self._can_begin(view, cut):
            return None
        rest_s = self._call_s(view, cut, view.groups)
        last_s = view.time_left - rest_s - view.margin_s
        if self._network_s > 1e-6 and last_s > 0:
            if not idle:
                return None
            # Groups that are decoded at the end stay in the backlog.
            if view.undecoded or (view.decode_backlog_s > 0 and not view.decodes_last):
                return Decision.wait("the play is cut once the received groups are decoded")
        return Decision.recompute(cut, f"computing from group {cut} on {self._why()}")
