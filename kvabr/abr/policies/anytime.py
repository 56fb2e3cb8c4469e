"""``anytime``: request the base of every group first, then the upgrades that save most.

With nested tracks, the best cache for every number of bytes is a prefix of one fixed sequence, so that fetching in that
order needs no prediction. The planner (`kvabr.abr.planner`) decides which groups the engine computes and the final
track of every group; this policy decides the order of requests.

- The base of every group is requested at once. Replacing an undecoded base costs little, and with all bases in place
  the play is safe. On a link as fast as in earlier plays, groups are requested on their final tracks at once,
  provided that all should arrive in time at the lowest rate of the belief (`kvabr.abr.belief`).
- Upgrades are requested just before the link would be idle. They use the planned track if the whole plan should arrive
  in time at the lowest rate of the belief; otherwise the layer with the largest saving per byte that should arrive.
- The play ends when waiting longer would not pay off. In an outage it waits as long as that costs less than the present
  loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kvabr.abr.belief import GROWTH, RATE_TOLERANCE, RECOVERED, SLOW, TIME_TOLERANCE, LinkBelief
from kvabr.abr.estimators import LOW_SHARE
from kvabr.abr.policy import Decision, Division, Policy
from kvabr.abr.view import MAX_PARTS, View
from kvabr.types.parameters import Parameter

if TYPE_CHECKING:
    from kvabr.abr.planner import ComputePlanner
    from kvabr.abr.time_planner import TimePlan

_MIN_IN_FLIGHT = 2
"""Minimum number of requests in flight; one would leave the link idle between events."""
_MIN_AHEAD_SHARE, _MAX_AHEAD_SHARE = 0.01, 0.015
"""Minimum duration of the bytes in flight, in addition to round trips, as a fraction of the deadline; and the duration
that a burst of requests then fills: neighbours in it share a range of an object store."""


class Anytime(Policy):
    """Request the base of every group, then the upgrades that save most per price, at the pace of the link."""

    name: ClassVar[str] = "anytime"
    paces: ClassVar[bool] = True
    takes_cached: ClassVar[bool] = True
    divides: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "ahead_ttfb": Parameter(0.5, 4.0, 1.5),
    }

    def __init__(self, *, ahead_ttfb: float = 1.5) -> None:
        """``ahead_ttfb``: duration of the bytes in flight, in times to first byte."""
        self._ahead_ttfb = ahead_ttfb

    def start(self, view: View) -> None:
        from kvabr.abr.planner import ComputePlanner  # noqa: PLC0415  # they load NumPy, slowly
        from kvabr.abr.time_planner import TimePlanner  # noqa: PLC0415

        self._base = view.ladder.tracks[0]
        self._times, self._link = TimePlanner(view), LinkBelief()
        self._planner: ComputePlanner | None = None
        if view.cost is not None:
            self._planner = ComputePlanner(view, self._times, self._link)
        self._plan: TimePlan | None = None
        self._planned: tuple[object, ...] = ()
        self._planned_rate = self._planned_s = self._link_rate = 0.0
        self._settled = 0
        self._ranked: list[tuple[float, int, int]] | None = None
        """Upgrades of the plan as (saving per price, group, track); the first to request is last. None: not ranked
        yet."""
        self._over, self._filling = False, True
        self._slow_base = view.decode_s(self._base.name) * view.groups / view.decoders > view.deadline_s
        losses = self._base.loss
        self._largest = deque(sorted(range(view.groups), key=lambda group: (-losses[group], -group)))
        self._smallest = deque(self._times.smallest_first(self._base.name))

    def decide(self, view: View) -> Decision:
        """Give work to an idle engine first, then request bases, then upgrades."""
        decision = self._decide(view)
        if decision.kind not in {"wait", "finish", "deliver"}:
            return decision
        first, idle = view.first_missing(), view.engine_backlog_s <= 0
        ends = decision.kind != "wait" or not view.in_flight
        if ends and idle and self._planner is not None and (rest := self._planner.rest(view, idle=True)) is not None:
            return rest
        if first is None:
            return decision
        if not view.in_flight and idle:
            # The engine does not get to the groups planned for it.
            return Decision.fetch(first, self._base.name, "this group is missing, and no request is in flight")
        return decision if decision.kind == "wait" else Decision.wait("the engine computes the rest")

    def _decide(self, view: View) -> Decision:
        missing = bool(view.missing_groups)
        self._link.update(view)
        if (planner := self._planner) is not None:
            planner.plan(view)
            if (decision := planner.next(view)) is not None:
                return decision
            if view.full:
                return Decision.wait("enough is in flight")
            missing = planner.outside(view)
        return self._fetch(view) if missing else self._upgrade(view)

    @property
    def division(self) -> Division | None:
        """Present division of the work; None without an engine."""
        return None if self._planner is None else self._planner.division

    def will_replace(self, view: View, group: int) -> bool:
        """Return True if the plan has another track for a group."""
        plan = self._plan
        if plan is None or self._over or view.rate <= 0:
            return False
        return self._times.names[plan.targets[group]] != view.track_of[group]

    # ------------------------------------------------------------------- plans

    def _computed(self, view: View) -> tuple[range, float]:
        if self._planner is None:
            return range(0), 0.0
        return self._planner.reserved, max(0.0, self._planner.until_s - view.now)

    def _plan_for(self, view: View) -> TimePlan:
        """Return the plan at the present rate; reused while little changes."""
        computed, computed_s = self._computed(view)
        case = (
            bool(view.missing_groups),
            view.growing,
            view.added // (view.keeps + 1),
            bool(computed),
            ((computed.start if view.front_first else computed.stop) // (view.keeps + 1)),
        )
        plan, settled = self._plan, len(view.settled.history)
        if (
            plan is None
            or case != self._planned
            or abs(view.rate - self._planned_rate) > RATE_TOLERANCE * self._planned_rate
            # Plans of long prompts take longer.
            or view.now - self._planned_s > TIME_TOLERANCE * view.deadline_s * (1.0 + view.keeps / MAX_PARTS)
            or (self._ranked == [] and settled - self._settled > view.keeps and not view.missing_groups)
        ):
            rate = view.rate or self._link.best_rate * RECOVERED
            if rate <= 0:  # between published groups the link is idle and free to try
                rate = view.catalog.fp16_bytes if view.coming else self._base.total_bytes / max(view.time_left, 1e-3)
            if view.rate < SLOW * self._link.best_rate:
                rate = max(rate, RECOVERED * self._link.best_rate) if self._hopes(view) else rate
            if view.coming:  # until the last group is published, upgrades delay no group
                computed_s = max(computed_s, view.ends_s - view.now)
            self._times.sync(view)
            self._times.cut_at(computed.start if view.front_first and computed else None)
            plan = self._times.plan(view, self._link.grown(view, rate), computed, computed_s)
            self._plan, self._planned, self._over = plan, case, False
            self._planned_rate, self._planned_s, self._settled = view.rate, view.now, settled
            self._link_rate, self._ranked = rate, None
        return plan

    def _enough(self, view: View, first: int = _MIN_IN_FLIGHT) -> bool:
        """Return True if the bytes in flight last until data of a new request arrives."""
        if view.rate <= 0:
            return len(view.in_flight) >= first
        round_trips_s = self._ahead_ttfb * (GROWTH if view.growing else 1.0) * view.ttfb_s
        ahead = (view.outstanding_bytes / view.rate - round_trips_s) / view.deadline_s
        if not _MIN_AHEAD_SHARE < ahead <= _MAX_AHEAD_SHARE:
            self._filling = ahead <= _MIN_AHEAD_SHARE
        return len(view.in_flight) >= _MIN_IN_FLIGHT and not self._filling

    # ---------------------------------------------------------------- the base

    def _fetch(self, view: View) -> Decision:
        name = self._base.name
        if self._slow_base:
            if self._enough(view):
                return Decision.wait("enough is in flight, and decoding is slow")
            name = view.soonest_track()
        if view.rate > 0 and (final := self._final(view)) is not None:
            return final
        if view.prefix and self._enough(view):
            return Decision.wait("enough is in flight, and the play may be cut before the remaining groups")
        return Decision.fetch(self._next_group(view), name, "the base of every group comes first")

    def _final(self, view: View) -> Decision | None:
        """Request a group on its planned track, or wait; return None if the base must be requested first."""
        plan = self._plan_for(view)
        near_prior = view.prior_own and LOW_SHARE * view.prior_rate <= view.rate <= view.prior_rate / LOW_SHARE
        if view.growing or not near_prior or plan.ends_s >= LOW_SHARE * view.time_left:
            return None
        group = self._next_group(view, least=True)
        track = self._times.names[plan.targets[group]]
        if self._enough(view):
            return Decision.wait("enough is in flight")
        self._times.follow(group, track)
        return Decision.fetch(group, track, f"lowest total cost; all groups take {plan.ends_s:.2f} s more")

    def _next_group(self, view: View, *, least: bool = False) -> int:
        """Return the missing group with the largest loss, or the first one if an engine needs or computes it.

        ``least``: return that with the smallest loss, which is small and is decoded while the others arrive.
        """
        missing = view.missing_groups
        late = view.rate > 0 and not view.growing and view.slack_s() < 0
        whole = least and self._planner is not None and not self._planner.reserved
        if (view.front_first and not whole) or view.in_order or late:
            return next(iter(missing))  # only groups before the first missing one are usable at the deadline
        if self._planner is not None and self._planner.advances:
            return next(reversed(missing))  # the engine computes from the front
        order = self._smallest if least else self._largest
        while order:
            if order[0] in missing:
                return order[0]
            order.popleft()
        return next(iter(missing))  # requested before, but lost

    # ------------------------------------------------------------ the upgrades

    def _upgrade(self, view: View) -> Decision:
        if view.rate <= 0 and view.in_flight:
            return Decision.wait("the link rate is not known yet")
        if view.rate <= 0 and not (view.time_left > 0 and (self._hopes(view) or view.coming)):
            if view.missing_groups:
                return Decision.wait("the link rate is not known yet, and the engine computes the rest")
            return Decision.finish("the link rate is not known, and no request is worth a try")
        plan = self._plan_for(view)
        if self._over:
            return Decision.wait("the play is over")
        scarce = plan.second_price > view.time_price  # then the plan is for whole groups, and a part may be useful
        if plan.objective >= plan.idle_objective and not (scarce or view.coming or self._hopes(view)):
            return self._end(view)
        if self._enough(view):
            return Decision.wait("enough is in flight")
        if (upgrade := self._best_upgrade(view, plan)) is not None:
            return upgrade
        if view.in_flight or view.coming:
            return Decision.wait("every upgrade that is worth the wait is in flight")
        return self._end(view)

    def _best_upgrade(self, view: View, plan: TimePlan) -> Decision | None:
        if self._ranked is None:  # not before it is needed: most plans are replaced unused
            self._times.sync(view)
            arrivals = self._link.arrivals(view, self._link_rate)
            self._ranked = self._times.rank(view, plan, arrivals, self._computed(view)[0])
        while self._ranked:
            gain, group, number = self._ranked.pop()
            track = self._times.names[number]
            settled = group in view.settled and view.track_of[group] != track
            if (settled or view.extends(group, track)) and (group, track) not in view.unavailable:
                self._times.follow(group, track)
                return Decision.upgrade(group, track, f"saves {min(gain, 1e6):.1f} times its price")
        return None

    def _hopes(self, view: View, flying: float = 0.0) -> bool:
        """Return True to wait for a slow link; ``flying``: loss that upgrades in flight will save."""
        lost, spent = self._times.lost() + flying, view.time_price * (view.now - self._link.fast_s)
        return lost > spent > 0.0 or (view.rate <= 0 and lost > view.time_price * view.time_left)

    def _end(self, view: View) -> Decision:
        if not view.in_flight:
            self._over = True
            return Decision.finish("no upgrade is worth the wait")
        if not view.arrived:
            return Decision.wait("the missing groups are on their way")
        saves = self._saved_in_flight(view)
        waited_s = max(
            0.0, view.outstanding_bytes / view.rate - self._computed(view)[1]
        )  # the play waits for the engine anyway
        if saves >= view.time_price * waited_s:
            return Decision.wait("no further upgrade is worth the wait")
        if self._hopes(view, saves):
            return Decision.wait("the link has almost stalled; requests in flight will show when it recovers")
        self._over = True
        return Decision.deliver("the requests in flight are not worth the wait")

    def _saved_in_flight(self, view: View) -> float:
        losses, saved, seen = view.catalog.by_name, 0.0, set()
        for transfer in view.in_flight.values():
            current = view.track_of[transfer.group]
            if current in losses and transfer.group not in seen:  # skip groups computed by an engine meanwhile
                seen.add(transfer.group)
                below = losses[transfer.track].refines or self._base.name
                saved += max(0.0, losses[below].loss[transfer.group] - losses[current].loss[transfer.group])
        return saved
