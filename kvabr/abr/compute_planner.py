"""The one rule for what an engine computes: the division of the work between network and engine that costs least.

The engine goes on behind what is in place. For every group at which it could stop, the rule adds up what the others
lose on the tracks that the network can bring, the price of the time until both are done, and that of the engine's time
(`TimePlanner.divide`); the least sum wins. To stop at once is to play everything, to go on to the end to compute it.

- ``hole``: the engine computes from the front while the network loads the others from the back, so the later of the two
  counts. Groups in between belong to the engine if it is sooner, also those in flight or in place.
- ``suffix``: the engine needs everything in front, and computes from there to the end. So both times count, one after
  the other, and what is computed brings out the errors right in front of it. A play of a prefix is cut there, or as
  soon as nothing more is worth a request.

While no rate is known, or in slow start, the rule weighs a spread of rates: the division with the least mean of costs,
each over the least at that rate. The longer a link brings nothing at all, the more counts that it may be dead, and no
wait goes on until the engine could not be in time any more. A call is as long as its constant part asks for, and
otherwise so short that a wrong rate can be corrected; while the rate is not known well, none begins that is worth less
than to wait for a better known one. The engine does not compute behind groups for which an upgrade is in flight, whose
errors would stay. With nothing else to do it recomputes groups in place that gain more than that costs
(`kvabr.types.loss`: what they inherit).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvabr.abr.estimator import WINDOW
from kvabr.abr.policy import Decision, Division
from kvabr.abr.tail import LOADS, SPARE
from kvabr.abr.view import View
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import LEAST_CALL, MISS_PENALTY, PrefillCost
from kvabr.types.loss import INHERITED, predicted_loss

if TYPE_CHECKING:
    from kvabr.abr.time_planner import TimePlanner

_SAME_RATE, _SAME_TIME, _SURE_TIME = 0.05, 0.01, 0.025
"""A plan holds while the rate changes by no more than this share, and for this share of the deadline; and for that one
if it is made for a single rate."""
_BUSY = 4.0
"""How many times as long, and as much, while the engine is busy."""
_GROWTH = 1.5
"""Growth of the rate until a request has an effect, in slow start."""
_SLOW_SHARE, _RECOVERY = 0.3, 0.5
"""Share of the best rate so far below which a link may recover; and the share that is hoped for then."""
_BETTER = 0.03
"""Share by which another division must be better than the last one, or than to compute nothing."""
_CUT_BETTER = 0.1
"""Share by which a cut must be better than to compute all or nothing: it is as good as many groups are in time."""
_HOPED = 3.0
"""Multiple of the rate at which the engine must compute something as well, so that one call does it all."""
_CHANCES = 4.0
"""What a shorter call must save at that rate, as a multiple of what the constant part of another one costs."""
_SPLIT = 0.02
"""Constant part of a call, as a share of it, with which it is cut in two for no other reason."""
_CALL_SHARE = 0.1
"""Length of a call at most, as a share of the deadline, if it need not be longer."""
_UNKNOWN_WAIT_S = 0.04
"""Seconds until the first bytes come, where nothing is known of the peer."""
_FINE = 1 / 6
"""Share of the exact cache's bytes that a track takes which loses next to nothing."""
_MOST_WAIT = 1.05
"""Cost of a wait for a better known rate at most, as a multiple of the least cost of the play."""
_SLOW_START = 0.5
"""Share of what a wait costs that counts in slow start: each round trip tells more."""
_DOUBT, _LEAST_DOUBT = 0.7, 0.03
"""Share of the rate that earlier plays told which the link may have as well: at first, and at least."""
_LATE_START, _DOUBT_SHARE, _MOST_DOUBLINGS = 1.5, 0.005, 64.0
"""Multiple of the time that slow start takes to that rate after which it is doubted; least round trips in this, as a
share of the deadline, as the rate is measured no more often; and how often slow start can double."""
_NOW = 2.0 * math.log(2.0)
"""Rate of a link in slow start, over the mean of the last round trip; it counts where it is told to what it grows."""
_RAMP_ROUNDS, _RAMP = 1.5, 1.3
"""A link whose rate was lower by this factor as many times to first byte ago is in slow start."""
_LEAST_WAIT_S = 0.02
"""Seconds until more is known of the rate, at least."""
_SILENT_ROUNDS, _DEAD = 4.0, 1e-3
"""Round trips without a byte after which a link may be dead, and what such a link brings in time, as a share of the
base."""
_SAME_COST = 1e-9
"""Share of a cost that is no difference."""
_NEVER = 1e6
"""Cost of what is not to be done, nats per token."""
_TINY = 1e-6
"""Cost of a play at least, nats per token, where others are multiples of it."""
_MOST_STOPS = 128
_NEAR = 8
"""Number of preceding groups that are considered for inherited loss."""
_LOOKED_AT = 4
"""Number of groups in place that are examined to find one worth computing."""
_PAUSE_SHARE = 1 / 50
"""Share of the deadline to pause after a search that found nothing."""
_SAFETY = 1.1
"""Safety margin: a computation on a complete cache must fit the remaining time this many times."""
_AT_ONCE_S = 1e-6
"""Seconds that are none."""
_LATE = 0.25
"""Lateness, as a share of the deadline, with which no engine begins with the rest while the link carries anything."""
_LAST_TICKS = 1.5 / 50
"""Share of the deadline before the last moment at which an engine that needs a prefix is started."""

Worth = Callable[[int, str | None], float]
"""Cost in nats per token of leaving a group to the network, given its current track or None."""


Array = npt.NDArray[np.float64]


class _Belief(NamedTuple):
    """What the link may carry."""

    rates: list[float]
    """Bytes per second."""
    shares: Array
    """How much each of them counts."""
    ramp: tuple[float, float] | None
    """In slow start, the rate at which the link begins to double, and the seconds in which it does."""


class _Ways(NamedTuple):
    """The ways to divide the work if the engine goes on at one group."""

    start: int
    stops: npt.NDArray[np.intp]
    """Where the engine stops; or where it begins, if it computes the rest."""
    costs: Array
    """What each costs, by rate and stop, nats per generated token."""
    engine_s: Array
    """Seconds until the engine is done, by stop."""
    network_s: Array
    """The same of the network, at the last of the rates."""


def computed_before_a_lookup(cost: PrefillCost, tokens: int, ttfb_s: float) -> bool:
    """Return whether an engine has computed a whole prompt before a lookup usually brings anything.

    Args:
        cost: of the engine's prefill.
        tokens: length of the prompt.
        ttfb_s: seconds from a request to its first byte, by earlier plays; 0.0: nothing is known of the peer.
    """
    return cost.seconds(0, tokens) <= (ttfb_s or _UNKNOWN_WAIT_S)


def computed_on_any_link(
    cost: PrefillCost, tokens: int, deadline_s: float, *, time_price: float, gpu_price: float
) -> bool:
    """Return whether an engine computes a whole prompt by the rule above, as long as nothing is known of the link.

    What a play takes is guessed for the rates that the rule weighs, with a track that loses next to nothing.

    Args:
        cost: of the engine's prefill.
        tokens: length of the prompt.
        deadline_s: seconds in which the cache is wanted.
        time_price: price of a second before the first token, nats per token.
        gpu_price: price of a second of engine time.
    """
    computed_s = cost.seconds(0, tokens)
    if time_price <= 0 or computed_s > deadline_s:
        return False
    computed_s *= 1.0 + gpu_price / time_price
    played_s = [min(deadline_s, _UNKNOWN_WAIT_S + _FINE * deadline_s / load) for load in LOADS]
    return sum(computed_s / min(computed_s, one) - one / min(computed_s, one) for one in played_s) <= 0.0


class ComputePlanner:
    """Decides what the engine of one play computes."""

    def __init__(self, view: View, times: TimePlanner, worth: Worth) -> None:
        """Start a play that has an engine; ``worth``: cost of leaving a group to the network."""
        catalog, cost = view.catalog, view.cost
        assert cost is not None  # noqa: S101  # callers check that there is an engine
        self._times, self._worth, self._suffix = times, worth, view.front_first
        self._tokens = [catalog.tokens_before(group) for group in range(view.groups + 1)]
        self._ends = np.array(self._tokens)
        self._seconds = [cost.seconds(begin, end - begin) for begin, end in pairwise(self._tokens)]
        """Seconds to compute each group alone."""
        base = view.ladder.tracks[0]
        near = list(accumulate(reversed(base.loss), initial=0.0))
        self._near = [sum_ / near[-1] if near[-1] > 0 else 1.0 for sum_ in near]
        """Share of a group's inherited loss that comes from the n groups right before it, by n."""
        self._solid = 0
        """All groups before this one are in place, or were."""
        self._offers: list[tuple[float, int, str]] = []
        """Heap of the groups in place with all before them in place: loss per second, negated, group and track."""
        self._behind: dict[int, tuple[float, int, str]] = {}
        """Other groups in place, alike."""
        self._again_s = 0.0
        self.reserved = range(0)
        """Groups reserved for the engine: nothing is requested for them."""
        self.until_s = 0.0
        """When the engine should be done with what it does and with these, seconds since the play began."""
        self._rates: deque[tuple[float, float]] = deque()
        """Times and rates of the last round trips."""
        self._told = 0.0
        """The rate that earlier plays told, bytes per second; 0.0: none."""
        self._round_s = math.inf
        """The shortest time to first byte so far: slow start doubles in it."""
        self._growing = self._slow = self._silent = False
        """Whether the link may be in slow start; is much slower than it was; and has brought nothing yet, for long."""
        self._best_rate, self._fast_s = 0.0, 0.0
        """The best rate so far, and when the link was last about as fast."""
        self._computed = 0
        """All groups before this one are computed, so that what is behind them is exact."""
        self._target = 0
        """Where the engine should stop in the end."""
        self._planned: tuple[tuple[int, int], float, float, int] | None = None
        """Where the engine went on, the rate, the time, and the groups that had settled, when that was planned."""
        self._holds = 0
        """For how many more decisions that holds in any case, see `View.keeps`."""
        self._network_s = 0.0
        """Seconds that the network is given for its part."""
        self._sure = self._waits = False
        """Whether the last plan was made for one rate only, and whether a better known one is worth its wait."""
        self._call_to: int | None = None
        """Where the next call ends while the rate is not known well; where it would begin, if it should not."""
        self.division: Division | None = None
        """What was decided last, and what is expected of it."""

    def settled(self, group: int, track: str, loss: float) -> None:
        """Note that a group is in place on a track, with its loss."""
        if self._suffix or loss <= 0:
            return
        offer = (-loss / self._seconds[group], group, track)
        if group < self._solid:
            heappush(self._offers, offer)
        else:
            self._behind[group] = offer

    # ------------------------------------------------------------------- the rule

    def plan(self, view: View) -> None:
        """Divide the work between network and engine."""
        if view.cost is None:
            self.reserved, self.until_s, self._target = range(0), 0.0, 0
            return
        if (first := self._front(view)) == view.groups and view.track_of[-1] == RECOMPUTED:
            self.reserved, self.until_s = range(0), view.now + view.engine_backlog_s
            self._target, self._planned = 0, None
            return
        self._holds -= 1
        if (last := self._planned) is not None:
            front, rate, then, heard = last
            busy = _BUSY if view.engine_backlog_s > 0 and rate > 0 else 1.0  # the engine will ask when it is done
            same = abs(view.rate - rate) <= busy * _SAME_RATE * rate
            same = same and view.now - then <= busy * (_SURE_TIME if self._sure else _SAME_TIME) * view.deadline_s
            # What is behind may be best left to the engine at once.
            arrived = self._suffix and view.solid >= self.reserved.start and len(view.settled.history) > heard
            idle = view.engine_backlog_s <= 0 and not self._suffix
            if (same and front == (first, self._exact(view)) and not arrived) or (self._holds > 0 and not idle):
                return
        self._holds = view.keeps
        self._planned = (first, self._exact(view)), view.rate, view.now, len(view.settled.history)
        self._times.sync(view)
        kept = None
        if last is not None and last[1] > 0:
            kept = self.reserved.start if self._suffix else self.reserved.stop
        first, stop = self._divide(view, first, kept)
        if self._suffix:
            self.reserved, self.until_s = range(view.groups if self._waits else stop, view.groups), 0.0
        else:
            self.reserved = range(first, stop)
            self.until_s = view.now + view.engine_backlog_s + self._call_s(view, first, stop)
            self._target = stop
            if view.rate <= 0 or self._growing:  # the network is to show what it can
                self.reserved = range(first, self._last(view, first, stop) or first)

    @property
    def advances(self) -> bool:
        """Whether the engine is to go on behind what is in place, or may be once the rate is known better."""
        return self._target > self.reserved.start or self._growing or self._slow

    def outside(self, view: View) -> bool:
        """Return whether the network is to bring groups that are missing."""
        missing, reserved = view.missing_groups, self.reserved
        if not missing or not reserved:
            return bool(missing)
        first, last = missing.first(), missing.last()
        return (first is not None and first < reserved.start) or (last is not None and last >= reserved.stop)

    def _front(self, view: View) -> int:
        """Return the first group that is neither in place nor left to the engine, or the number of groups."""
        first, track_of = view.solid, view.track_of
        while first < view.groups and track_of[first] == RECOMPUTED:
            first += 1
        return first

    def _exact(self, view: View) -> int:
        """Return the first group that the engine has not computed, or is not about to."""
        while self._computed < view.groups and view.track_of[self._computed] == RECOMPUTED:
            self._computed += 1
        return self._computed

    def _call_s(self, view: View, first: int, stop: int) -> float:
        assert view.cost is not None  # noqa: S101  # see `plan`
        return view.cost.seconds(self._tokens[first], self._tokens[stop] - self._tokens[first])

    def _divide(self, view: View, front: int, kept: int | None) -> tuple[int, int]:
        """Return where the engine goes on, and where it stops; or begins, if it computes the rest.

        Args:
            view: the play.
            front: the first group that is missing.
            kept: where it stops by the last plan, if the rate was known.
        """
        computed_s = view.engine_backlog_s + self._call_s(view, front, view.groups)
        belief = self._believed(view, saved=computed_s <= view.time_left)
        rates, shares = belief.rates, belief.shares
        self._sure = len(rates) == 1
        # What is in place right behind what is exact may be taken over.
        starts = [front] if self._suffix else sorted({front, self._exact(view)})
        ways = [self._ways(view, start, rates, belief.ramp) for start in starts]
        least = np.maximum(np.min([way.costs.min(axis=1) for way in ways], axis=0)[:, None], _TINY)
        regrets = [shares @ (way.costs / least) for way in ways]
        number = int(np.argmin([regret.min() for regret in regrets]))
        way, regret = ways[number], regrets[number]
        best = int(regret.argmin())
        if not self._suffix and (kept is None or view.arrived):  # what the engine does must be worth it
            kept = way.start
        better = _BETTER
        if self._suffix and kept is None and len(rates) == 1:  # to compute all, or to play all, holds what it promises
            kept, better = int(way.stops[0] if regret[0] < regret[-1] else way.stops[-1]), _CUT_BETTER
        if kept is not None:  # what is under way for the last plan counts
            same = int(np.searchsorted(way.stops, kept))
            if same < len(way.stops) and float(regret[same]) <= (1.0 + better) * float(regret[best]):
                best = same
        self._waits, self._call_to = False, None
        quiet = self._slow or self._silent
        if len(rates) > 1 and (self._growing or quiet):
            waited_s = self._better_known_s(view)
            more = view.time_price * waited_s
            if quiet and computed_s <= view.time_left < computed_s + waited_s:
                more += MISS_PENALTY  # the engine could not save the deadline any more
            waits = 1.0 + more / least
            waiting = float((shares @ waits)[0])
            if self._suffix:
                self._waits = (quiet or float(waits.max()) <= _MOST_WAIT) and waiting < float(regret[best])
            else:
                share = _SLOW_START if self._growing and view.rate > 0 else 1.0
                self._call_to = self._first_call(view, way, least, shares, 1.0 + share * (waiting - 1.0))
        self._network_s = float(way.network_s[best])
        stop = int(way.stops[best])
        play, compute = (-1, 0) if self._suffix else (0, -1)
        begins_s, before_s = (self._network_s, float(way.network_s[compute])) if self._suffix else (0.0, 0.0)
        self.division = Division(
            view.now,
            *((stop, view.groups) if self._suffix else (way.start, stop)),
            self._network_s,
            begins_s + float(way.engine_s[best]),
            float(way.network_s[play]),
            before_s + float(way.engine_s[compute]),
            known=view.rate > 0 and not self._growing,
        )
        return way.start, stop

    def _believed(self, view: View, *, saved: bool) -> _Belief:
        """Return the rates to weigh; ``saved``: without the link the engine would still be in time."""
        rates, ramp = self._rates_of(view)
        shares = np.full(len(rates), 1.0 / len(rates))
        if self._silent and saved:
            dead = min(1.0, view.now / view.deadline_s)
            rates = [_DEAD * view.ladder.tracks[0].total_bytes / view.time_left, *rates]
            shares = np.append(dead, (1.0 - dead) * shares)
        return _Belief(rates, shares, ramp)

    def _why(self) -> str:
        """Return what is expected of the division."""
        if (here := self.division) is None:
            return "is sooner"
        taken = "with" if self._suffix else "beside"
        return (
            f"takes {here.engine_s:.2g} s {taken} {here.network_s:.2g} s of the network; to play all would take "
            f"{here.play_s:.2g} s, to compute all {here.compute_s:.2g} s"
        )

    def _rates_of(self, view: View) -> tuple[list[float], tuple[float, float] | None]:
        """Return the rates of a link that is alive, bytes per second; and its slow start, see `_Belief`."""
        self._growing = self._grows(view)
        told = 0.0 < view.rate == self._told
        measured_s = max(view.ttfb_s or _UNKNOWN_WAIT_S, _DOUBT_SHARE * view.deadline_s)
        heard = self._best_rate > 0 or view.in_flight.receiving or view.settled.history
        self._silent = not heard and view.outstanding_bytes > 0 and view.now > _SILENT_ROUNDS * measured_s
        if not told and view.rate >= _SLOW_SHARE * self._best_rate:
            self._best_rate, self._fast_s = max(self._best_rate, view.rate), view.now
        self._slow = view.rate < _SLOW_SHARE * self._best_rate
        if self._slow:  # perhaps for a moment
            return [view.rate or _LEAST_DOUBT * self._best_rate, _RECOVERY * self._best_rate], None
        self._round_s = min(self._round_s, view.ttfb_s or math.inf)
        round_s = self._round_s if view.ttfb_s > 0 else _UNKNOWN_WAIT_S
        if view.rate > 0 and not self._growing:
            if not told:
                return [view.rate], None
            doublings = min(view.now / round_s, _MOST_DOUBLINGS)
            less = self._doubt(view, view.rate, measured_s)
            return [less * view.rate, view.rate], (_NOW * 2.0**doublings * WINDOW / round_s, round_s)
        begins = max(view.rate, WINDOW / round_s)
        if view.told_rate > view.rate:  # too fast for an estimate to begin with it, but that is where slow start leads
            less = max(self._doubt(view, view.told_rate, measured_s) * view.told_rate, _GROWTH * view.rate)
            return sorted((less, view.told_rate)), (_NOW * begins, round_s)
        # It has not been slower so far; and as long as nothing is known, it is trusted to carry the base in time.
        left_s = max(view.time_left, _SAME_TIME * view.deadline_s, _LEAST_WAIT_S)
        least = max(_GROWTH * view.rate, SPARE * view.ladder.tracks[0].total_bytes / left_s)
        rates = [max(least, load * view.catalog.fp16_bytes / left_s) for load in LOADS]
        return rates, (begins, round_s)

    @staticmethod
    def _doubt(view: View, told: float, measured_s: float) -> float:
        """Return the share of the rate that earlier plays told which the link may have as well.

        Slow start takes a while to get there. If it takes much longer, that is believed less and less.
        """
        round_s = view.ttfb_s or _UNKNOWN_WAIT_S
        due = math.log2(max(1.0, told * round_s / WINDOW))
        late = _LATE_START * due - view.now / measured_s
        return min(_DOUBT, max(_LEAST_DOUBT, math.exp2(min(0.0, late))))

    def _grows(self, view: View) -> bool:
        """Return whether the link may be in slow start: its rate was clearly lower a round trip ago, or not known."""
        if view.rate > 0:
            if not self._rates and view.now <= 0:
                self._told = view.rate
            self._rates.append((view.now if self._told != view.rate else -math.inf, view.rate))
        before_s = view.now - _RAMP_ROUNDS * view.ttfb_s
        while len(self._rates) > 1 and self._rates[1][0] <= before_s:
            self._rates.popleft()
        known = bool(self._rates) and self._rates[0][0] <= before_s
        return view.growing or not known or view.rate > _RAMP * self._rates[0][1]

    def _better_known_s(self, view: View) -> float:
        """Return the seconds until the rate is known better; the longer it was waited for already, the longer."""
        since_s = view.now - self._fast_s if self._slow else 0.0 if self._growing and not self._silent else view.now
        return max(_LEAST_WAIT_S if view.ttfb_s > 0 else _UNKNOWN_WAIT_S, view.ttfb_s, since_s)

    def _first_call(self, view: View, way: _Ways, least: Array, shares: Array, waiting: float) -> int:
        """Return where the next call ends, so that what follows may be decided better; the start: none should begin.

        Args:
            view: the play.
            way: what each length costs, if the engine stops there; it may also go on in another call.
            least: the least cost at each rate.
            shares: how much each rate counts.
            waiting: what it costs to wait for a better known rate, as a multiple of that.
        """
        again = self._constant_s(view, way.start) * (view.time_price + min(view.gpu_price, 1.0))
        behind = np.minimum.accumulate(way.costs[:, ::-1], axis=1)[:, ::-1]
        behind = np.concatenate([behind[:, 1:] + again, np.full((len(behind), 1), np.inf)], axis=1)
        begun = shares @ (np.minimum(way.costs, behind) / least)
        took = way.engine_s - view.engine_backlog_s
        begun[took < min(self._better_known_s(view), float(took[-1]))] = np.inf
        best = int((begun <= (1.0 + _SAME_COST) * begun.min()).argmax())  # of equal ones the shortest
        return int(way.stops[best]) if begun[best] <= waiting else way.start

    def _constant_s(self, view: View, first: int) -> float:
        """Return the seconds that a call takes whatever it computes."""
        if first + 2 > view.groups:
            return 0.0
        return max(0.0, 2 * self._call_s(view, first, first + 1) - self._call_s(view, first, first + 2))

    def _ways(self, view: View, start: int, rates: list[float], ramp: tuple[float, float] | None) -> _Ways:
        """Return what each division of the work costs at each rate."""
        cost, catalog, groups, ends = view.cost, view.catalog, view.groups, self._ends
        assert cost is not None  # noqa: S101  # see `plan`
        first = 0 if self._suffix else start
        stops = np.arange(first, groups + 1)
        if self._suffix and not catalog.every_token:
            stops = np.array([one for one in range(first, groups + 1) if one == groups or catalog.cut(one) == one])
        if len(stops) > _MOST_STOPS:
            stops = stops[np.unique(np.linspace(0, len(stops) - 1, _MOST_STOPS).astype(int))]
        if self._suffix:
            took, inherited = cost.seconds_many(ends[stops], ends[-1] - ends[stops]), np.zeros(len(stops))
        else:
            took = cost.seconds_many(ends[start], ends[stops] - ends[start])
            inherited = self._inherited(view, start)[stops - start]
        engine_s = view.engine_backlog_s + took
        # An infinite price is a rule: the engine computes only what the network does not bring.
        spent = view.gpu_price * took if math.isfinite(view.gpu_price) else np.where(took > 0, _NEVER, 0.0)
        found = [self._times.divide(view, rate, start, stops, engine_s, inherited, ramp=ramp) for rate in rates]
        costs = np.array([each.objective for each in found]) + spent
        return _Ways(start, stops, costs, engine_s, found[-1].network_s)

    def _inherited(self, view: View, first: int) -> Array:
        """Return the loss that groups from ``first`` on inherit if they are computed, by where the engine stops."""
        groups, before = view.groups, first - 1
        total = np.zeros(groups - first + 1)
        while before >= 0 and view.track_of[before] == RECOMPUTED:
            before -= 1
        track = view.track_of[before] if before >= 0 else None
        if track is not None:
            losses, near = np.array(view.catalog.by_name[track].loss), np.array(self._near)
            index = np.arange(first, groups)
            lossy = near[index] - near[index - before - 1]
            share = np.divide(lossy, near[index], out=np.zeros(len(index)), where=near[index] > 0)
            total[1:] = np.cumsum(INHERITED * losses[index] * share)
        return total

    # ------------------------------------------------------------------- its calls

    def next(self, view: View) -> Decision | None:
        """Return what an idle engine should compute now, if anything."""
        if view.cost is None or view.engine_backlog_s > 0:
            return None
        self._look(view)
        if self._suffix:
            return self.rest(view)
        if self._target > self.reserved.start and (call := self._call(view)) is not None:
            return call
        if view.now < self._again_s:
            return None
        found = self._best(view)
        if found is None:
            self._again_s = view.now + _PAUSE_SHARE * view.deadline_s
        return found

    def _call(self, view: View) -> Decision | None:
        """Return the next call behind what is in place."""
        first, stop = self.reserved.start, self._target
        if first > view.solid or self._unsettled_before(view, first):
            return None
        if view.track_of[first] is None and first not in view.missing_groups and first < view.edge:
            return None  # the player has left it to the engine already
        if (last := self._last(view, first, stop)) is None:
            return None
        return Decision.recompute(first, f"to compute up to group {stop - 1} {self._why()}", last=last)

    @staticmethod
    def _unsettled_before(view: View, group: int) -> bool:
        """Return whether an upgrade is in flight right before a group, whose errors would stay in what is computed."""
        flying = view.in_flight.groups
        return bool(flying) and any(before in flying for before in range(group - _NEAR, group))

    def _last(self, view: View, first: int, stop: int) -> int | None:
        """Return the end of a call; None if none should begin."""
        last = stop
        if self._call_to is not None:
            last = self._call_to
        else:
            constant_s, whole_s = self._constant_s(view, first), self._call_s(view, first, stop)
            most_s = _CALL_SHARE * view.deadline_s
            if constant_s < _SPLIT * whole_s:  # to go on in a second call costs next to nothing
                most_s = min(most_s, whole_s / 2)
            wanted_s = max(LEAST_CALL * constant_s, most_s)
            # What a much faster link leaves to the engine, too, is one call; or all, if that would not save enough.
            if whole_s > wanted_s and constant_s > 0 and view.rate > 0:
                hoped = self._ways(view, first, [_HOPED * view.rate], None)
                costs, again = hoped.costs[0], constant_s * (view.time_price + min(view.gpu_price, 1.0))
                whole = int(np.searchsorted(hoped.stops, stop))
                surely = stop if costs[whole] - costs.min() <= _CHANCES * again else int(hoped.stops[costs.argmin()])
                surely = min(stop, surely)
                wanted_s = max(wanted_s, self._call_s(view, first, max(first, surely)))
            if whole_s > wanted_s:
                last = self._within(view, first, stop, wanted_s)
                if self._call_s(view, last, stop) <= wanted_s / 2:
                    last = stop
        if last <= first:
            return None
        if self._call_s(view, first, last) > view.time_left:
            last = self._within(view, first, last, view.time_left)
            if self._call_s(view, first, last) > view.time_left:
                return None
        return last

    def _within(self, view: View, first: int, stop: int, seconds: float) -> int:
        """Return the end of the longest call within a time, of one group at least."""
        low, high = first + 1, stop
        while low < high:
            middle = (low + high + 1) // 2
            if self._call_s(view, first, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def rest(self, view: View, *, idle: bool = False) -> Decision | None:
        """Have the engine compute the rest, or the play be cut, once the best prefix is in place.

        ``idle``: nothing is under way, and nothing more is worth a request.
        """
        cut = self.reserved.start
        if not self._suffix or not self.reserved or cut > view.solid:
            return None
        if view.track_of[cut] is None and cut not in view.missing_groups and cut < view.edge:
            return None  # the player has left it to the engine already
        rest_s = self._call_s(view, cut, view.groups)
        last_s = view.time_left - rest_s - _LAST_TICKS * view.deadline_s
        if self._network_s > _AT_ONCE_S and last_s > 0:
            if not idle:
                return None
            # What is expanded last stays in the backlog.
            if view.undecoded or (view.decode_backlog_s > 0 and not view.decodes_last):
                return Decision.wait("what has arrived is decoded first, and then the play is cut")
        if view.rate > 0 and rest_s > view.time_left + _LATE * view.deadline_s:
            return None  # it could not be shortened any more, and the link may recover
        return Decision.recompute(cut, f"to compute from group {cut} on {self._why()}")

    # ---------------------------------------------------------- what is in place

    def _look(self, view: View) -> None:
        """Take in up to where all groups are in place."""
        while self._solid < view.solid:
            if (offer := self._behind.pop(self._solid, None)) is not None:
                heappush(self._offers, offer)
            self._solid += 1

    def _best(self, view: View) -> Decision | None:
        """Pick the group in place, with all before it, whose recomputation gains most per second."""
        offers, settled, track_of = self._offers, view.settled, view.track_of
        looked: list[tuple[float, int, str]] = []
        # The play could end once the network is done: what the engine takes longer costs its time, too.
        network_s = self._network_s - (view.now - self._planned[2]) if self._planned is not None else 0.0
        # Before that, the engine must stay free for what the link may not bring in time.
        left_s = view.time_left if self._solid == view.groups else view.slack_s()
        most, best = 0.0, -1
        while offers and len(looked) < _LOOKED_AT:
            offer = heappop(offers)
            _, group, track = offer
            if group not in settled or track_of[group] != track:
                continue  # it returns to the heap once it is in place on another track
            looked.append(offer)
            if self._unsettled_before(view, group):
                continue
            seconds = self._seconds[group]
            gain = self._gain(view, group, track) / seconds
            price = view.gpu_price + view.time_price * max(0.0, 1.0 - max(0.0, network_s) / seconds)
            if gain > max(most, price) and _SAFETY * seconds <= left_s:
                most, best = gain, group
        for offer in looked:
            heappush(offers, offer)
        if best < 0:
            return None
        return Decision.recompute(best, f"computing it saves {most * self._seconds[best]:.1e} nats")

    def _gain(self, view: View, group: int, track: str) -> float:
        """Return the nats per token that recomputing a group saves: its present cost less the loss it would inherit."""
        before = group - 1
        while before >= 0 and group - before < _NEAR and view.track_of[before] == RECOMPUTED:
            before -= 1
        other = view.track_of[before] if before >= 0 else None
        inherited = 0.0
        if other is not None and other != RECOMPUTED:
            inherited = INHERITED * view.loss(group, other) * (1.0 - self._near[group - 1 - before])
        gain = self._worth(group, track) - inherited
        if gain > 0 and all(name == RECOMPUTED for name in islice(view.track_of, group + 1, None)):
            # At the end of the prompt that brings out all errors before it, which a track close to the exact does not.
            tracks = [name or view.ladder.cheapest for name in view.track_of]
            computed = [*tracks[:group], RECOMPUTED, *tracks[group + 1 :]]
            gain = min(gain, predicted_loss(view.catalog, tracks) - predicted_loss(view.catalog, computed))
        return gain
