"""What `anytime` does where time has a price: final tracks at once on fast links, and an end when a wait is too dear.

Any track may be a group's final one, also Int8 or FP16: `kvabr.abr.time_planner` weighs the link against the decoders.

- Groups are requested on their final tracks if the link should carry everything in a part of the time left, at the
  lower bound of its rate; otherwise the base comes first. How much of the bound counts grows during the play: what a
  link carried for a moment says little.
- While no rate is known, a few bases are requested, and in slow start no more than keeps it growing. What is requested
  then is chosen for several times the rate so far, if it comes soon even at that rate.
- Where the base of every group would take long to decode, as on fast links with one decoder, final tracks go first.
- A play that takes all its time within slow start plans for what its last round trips should bring: then the group that
  loses most gets all its layers in one request, and decoders are for what saves most.
- Once every group has arrived, a further request must save more than its wait costs. If nothing does, the play ends,
  and what is still in flight is cancelled if it is not worth waiting for either.
- In an outage nothing seems worth the wait. As long as much is lost without it, one request stays in flight. A link
  that was much faster before may recover: the play waits for that as long as the wait costs less than it would lose.
  The same holds where no rate is known, as when all that has come was in the local store.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvabr.abr.policy import Decision
from kvabr.abr.view import View
from kvabr.types.catalog import Track

if TYPE_CHECKING:
    from kvabr.abr.time_planner import TimePlan, TimePlanner

_LEAST_FLYING = 2
"""Minimum number of requests in flight while there is something to request."""
_FIRST_GROUPS = 6
"""Groups to request while no rate is known: on a fast link their base is not what should be fetched."""
_FIRST_BYTES = 1 << 16
"""Least bytes to request while no rate is known, so that slow start is not starved."""
_SAME_RATE = 0.05
"""A plan holds while the rate changes by no more than this share."""
_SAME_TIME = 0.01
"""A plan holds for this share of the deadline."""
_FOLLOWED_SHARE = 1 / 16
"""A plan holds until this share of the groups was requested by it."""
_AHEAD_SHARE = 0.01
"""Share of the deadline that the bytes in flight last, beyond round trips."""
_GROWTH = 2.0
"""Growth of the rate until a request has an effect, in slow start."""
_GROWTHS = (8.0, 4.0, 2.0)
"""Growth until the end of slow start that is hoped for, most first."""
_HOPED = 1.5
"""Multiple of the rate that earlier plays told which is hoped for at most."""
_WINDOW = 1.8
"""Growth of the window per round trip of slow start, with pacing."""
_MOST_GROWTH = 3.5
"""Most growth of the mean rate until the deadline that is counted on."""
_GROWN_TTFB = 3.0
"""Times to a first byte that a group may take at the rate so far, to be requested for a faster link."""
_LEAST_TTFB_SHARE = 0.005
"""Least time to a first byte for that, as a share of the deadline."""
_GROWING_TTFB = 4.0
"""Times to a first byte that the bytes in flight last at the rate so far, in slow start."""
_GROWN_SHARE = 0.2
"""Share of the time left within which the base of every group should come at the rate so far, in slow start."""
_TRUST = 0.33
"""Share of `sure` that counts when the rate becomes known: it is that of a moment."""
_NEW_SHARE = 0.1
"""Share of the deadline for which the rate counts as new."""
_FIRST_SHARE = 0.02
"""The same for the request of one group."""
_OUTAGE = 2.0
"""A play does not end while it loses more than this multiple of the price of the time left."""
_RECOVERY = 0.5
"""Share of the best rate so far that is hoped for in an outage."""
_SLOW_SHARE = 0.3
"""Share of the best rate so far below which a link may recover."""
_HOPE = 0.6
"""Share of what a play loses that it spends on waiting for a link to recover."""
_DECODED_SHARE = 0.3
"""Share of the time of a plan beyond which decoding the base of all groups costs more than a fading link might."""
_FREE = 1e-12
"""Price that is as good as none, nats."""


class TimeSaver:
    """Decides for one play. A decision of None leaves it to `anytime`'s own order."""

    def __init__(self, base: Track, times: TimePlanner, *, ahead_ttfb: float, sure: float) -> None:
        """Begin a play; ``ahead_ttfb`` and ``sure`` are parameters of `Anytime`."""
        self._times = times
        self._computed, self._computed_s = range(0), 0.0
        """Groups that are left to the engine, and the seconds until it is done."""
        self._stale = self._from_back = False
        """Whether these have changed since the plan was made; and whether the engine comes from the front."""
        self._base, self._ahead_ttfb, self._sure = base, ahead_ttfb, sure
        self._plan: TimePlan | None = None
        self._planned_rate = self._planned_s = self._best_rate = 0.0
        self._planned_for = False, False
        """Whether groups were missing and the link was in slow start."""
        self._pressed = False
        """Whether the plan takes the time left, in slow start: then it is for what the link should carry in the end."""
        self._followed = self._heard = 0
        self._fast_s = 0.0
        """When the link was last as fast as it can be."""
        self._known_s = 0.0
        """When the rate was known first."""
        self._over, self._added = False, 0
        """Whether nothing more is worth its wait, and the tracks that had been added by then."""
        self._by_loss: dict[bool, list[tuple[float, int]]] = {}
        """Heaps of the groups that are missing, those that lose least first, and those that lose most; lazily."""
        self._returned = 0
        self._kept: dict[float | str, tuple[int, TimePlan]] = {}
        """Plans for other rates, by the case that each is for, and for how many more questions each holds."""
        self._ranked: tuple[TimePlan, list[tuple[float, int]]] | None = None
        """A plan and the upgrades in it: a heap of gains and groups, both negated."""
        self._ranked_for = self._flying_for = 0
        """For how many more questions that holds, and `_flying_saves`."""
        self._flying_saves = 0.0
        """Loss that what is in flight spares."""

    def share(self, view: View, computed: range, computed_s: float, *, advances: bool) -> None:
        """Note the groups that are left to the engine, and the seconds until it is done with all it does.

        ``advances``: whether it is to go on from the front.
        """
        self._from_back = advances
        # What it has begun is nothing to plan for any more.
        here, before = (each.start if view.front_first else each.stop for each in (computed, self._computed))
        if abs(here - before) > view.keeps or bool(computed) != bool(self._computed):
            self._stale, self._over, self._kept = True, False, {}
        self._computed, self._computed_s = computed, computed_s
        self._times.cut_at(computed.start if view.front_first and computed else None)

    def request(self, view: View) -> Decision | None:
        """Request a missing group on its final track, or wait; None: its base is next."""
        self._over = False
        if self._plan is None:
            self._known_s = view.now
        if view.rate <= 0:
            enough = len(view.in_flight) >= _FIRST_GROUPS and view.outstanding_bytes >= _FIRST_BYTES
            enough = enough and self._best_rate <= 0  # in an outage, all bases should come when it ends
            return Decision.wait("the first bytes will say how fast the link is") if enough else None
        plan = self._plan_for(view, missing=True)
        group = self._next_group(view)
        track = self._final_track(view, plan, group)
        if self.enough(view) and (track is not None or (view.growing and view.slack_s() > 0)):
            return Decision.wait("enough is in flight")
        if track is None:
            return None
        self._follow(group, track)
        return Decision.fetch(
            group, track, f"cheapest in bytes and decoding; everything takes {plan.ends_s:.2f} s more"
        )

    def upgrade(self, view: View) -> Decision | None:
        """Request what is worth its wait, wait, or end the play; None: the next layer of `anytime`, if `pays`."""
        if self._over and self._added == view.added:
            return Decision.wait("the play is over")
        self._over = False
        if view.rate <= 0:
            return self._probe(view)
        plan = self._plan_for(view, missing=False)
        if self._pressed:
            return Decision.wait("enough is in flight") if self.enough(view) else self._best_upgrade(view, plan)
        if plan.objective >= plan.idle_objective and not (view.in_flight and self._in_flight_pays(view)):
            plan = self._plan_for(view, missing=False, fresh=True)
        if plan.objective >= plan.idle_objective:
            if view.in_flight or not self._hopes(view):
                return self._end(view)
            # In an outage everything looks too slow.
            plan = self._kept_plan(view, "outage", max(view.rate, _RECOVERY * self._best_rate))
        elif not self._fits(view, plan):
            return None
        elif self.enough(view):
            return Decision.wait("enough is in flight")
        if (best := self._best_upgrade(view, plan)) is not None:
            return best
        return Decision.wait("what is worth the wait is in flight") if view.in_flight else None

    def pays(self, view: View, track: Track, group: int, worth: float) -> bool:
        """Return whether a layer that saves ``worth`` nats per byte, with those above it, pays for its time."""
        plan = self._plan
        if plan is None:
            return True
        nbytes, current = track.bytes[group], view.track_of[group]
        if current in view.catalog.by_name and (alone := view.loss(group, current) - track.loss[group]) > 0:
            worth *= self._times.saves(group, current, track.name) / alone
        return worth * nbytes >= plan.byte_price * nbytes + plan.decode_price * view.decode_s(track.name)

    def will_replace(self, view: View, group: int) -> bool:
        """Return whether the plan has another track for a group."""
        plan = self._plan
        if plan is None or self._over or view.rate <= 0:
            return False
        return self._times.names[plan.targets[group]] != view.track_of[group]

    # ----------------------------------------------------------------- plans

    def _plan_for(self, view: View, *, missing: bool, fresh: bool = False) -> TimePlan:
        """Return the plan for the present rate, kept while little changes; ``fresh``: while nothing settles."""
        self._best_rate = max(self._best_rate, view.rate)
        if view.rate >= _SLOW_SHARE * self._best_rate:
            self._fast_s = view.now
        plan, heard = self._plan, len(view.settled.history)
        if (
            plan is None
            or self._stale
            or (missing, view.growing) != self._planned_for
            or abs(view.rate - self._planned_rate) > _SAME_RATE * self._planned_rate
            or view.now - self._planned_s > _SAME_TIME * view.deadline_s
            or self._followed > _FOLLOWED_SHARE * view.groups
            or (heard - self._heard > (0 if fresh else view.keeps) and not missing)
        ):
            self._times.sync(view)
            plan = self._plan_at(view, view.rate * (_GROWTH if view.growing else 1.0))
            self._pressed = view.growing and not missing and plan.ends_s > view.time_left > 0
            if self._pressed:
                rate = _grown(view.time_left / max(view.ttfb_s, _FREE)) * view.rate
                plan = self._times.plan_by(view, rate, view.time_left, self._computed, self._computed_s)
            self._plan = plan
            self._planned_rate, self._planned_s, self._planned_for = view.rate, view.now, (missing, view.growing)
            self._followed, self._heard, self._stale = 0, heard, False
        return plan

    def _plan_at(self, view: View, rate: float) -> TimePlan:
        return self._times.plan(view, rate, self._computed, self._computed_s)

    def _follow(self, group: int, track: str) -> None:
        self._followed += 1
        self._times.follow(group, track)

    def _soon_bytes(self, view: View, new: float = _NEW_SHARE) -> float:
        """Return the bytes that surely come soon: a share of what the lower bound promises, smaller while it is new."""
        trust = _TRUST + (1.0 - _TRUST) * min(1.0, (view.now - self._known_s) / (new * view.deadline_s))
        return trust * self._sure * view.lower_bound * view.time_left

    def _fits(self, view: View, plan: TimePlan) -> bool:
        """Return whether to follow a plan: all of it should come soon, or the base first would take long to decode."""
        decoded_s = view.decode_backlog_s + len(view.missing_groups) * view.decode_s(self._base.name) / view.decoders
        most = view.lower_bound * view.time_left if decoded_s > _DECODED_SHARE * plan.ends_s else self._soon_bytes(view)
        return view.outstanding_bytes + plan.bytes <= most

    def enough(self, view: View) -> bool:
        """Return whether the bytes in flight last until a new request begins to arrive."""
        round_trips = _GROWING_TTFB if view.growing else self._ahead_ttfb
        ahead_s = round_trips * view.ttfb_s + _AHEAD_SHARE * view.deadline_s
        return len(view.in_flight) >= _LEAST_FLYING and view.outstanding_bytes > view.rate * ahead_s

    # -------------------------------------------------------- missing groups

    def _next_group(self, view: View) -> int:
        """Return the missing group to request: in slow start that which loses most, as what follows may be better."""
        if view.front_first or view.in_order:
            return next(iter(view.missing_groups))
        if self._from_back:
            return next(reversed(view.missing_groups))  # the engine comes from the front
        losses, missing = self._base.loss, view.missing_groups
        if not self._by_loss:
            self._by_loss = {
                most: sorted((-losses[group] if most else losses[group], group) for group in missing)
                for most in (False, True)
            }
            self._returned = len(missing.returned)
        for group in missing.returned[self._returned :]:
            heappush(self._by_loss[False], (losses[group], group))
            heappush(self._by_loss[True], (-losses[group], group))
        self._returned = len(missing.returned)
        heap = self._by_loss[view.growing]
        while heap[0][1] not in missing:
            heappop(heap)
        return heap[0][1]

    def _final_track(self, view: View, plan: TimePlan, group: int) -> str | None:
        """Return a group's final track if the link is fast enough to request it now."""
        base_bytes = len(view.missing_groups) * self._base.total_bytes / view.groups
        target = plan.targets[group]
        if view.growing:
            if view.outstanding_bytes + base_bytes > _GROWN_SHARE * view.rate * view.time_left:
                return None
            target = self._grown_target(view, group, target)
        elif not self._fits(view, plan) or plan.ends_s > view.time_left:
            return None
        most = self._soon_bytes(view, _FIRST_SHARE)
        if view.outstanding_bytes + self._times.bytes_to(group, target) + base_bytes > most:
            return None
        return self._times.names[target]

    def _grown_target(self, view: View, group: int, target: int) -> int:
        """Return the target for the fastest link that slow start may lead to, of those that come soon as it is."""
        most = _GROWN_TTFB * view.rate * max(view.ttfb_s, _LEAST_TTFB_SHARE * view.deadline_s)
        for growth in _GROWTHS:
            if growth * view.rate > _HOPED * (view.told_rate or math.inf):
                continue  # earlier plays told a slower link
            found = self._kept_plan(view, growth, growth * view.rate).targets[group]
            if self._times.bytes_to(group, found) <= most:
                return found
        return target

    def _kept_plan(self, view: View, case: float | str, rate: float) -> TimePlan:
        """Return the plan for another rate than the present one; it holds for a while, see `View.keeps`."""
        left, plan = self._kept.get(case, (0, None))
        if plan is None or left == 0:
            left, plan = view.keeps + 1, self._plan_at(view, rate)
        self._kept[case] = (left - 1, plan)
        return plan

    # --------------------------------------------------------------- the end

    def _hopes(self, view: View, flying: float = 0.0) -> bool:
        """Return whether to wait for a slow link to recover; ``flying``: the loss that what is in flight will spare."""
        lost, price = self._times.lost() + flying, view.time_price
        if lost > _OUTAGE * price * view.time_left:
            return True
        return _HOPE * lost > price * (view.now - self._fast_s) > 0.0

    def _probe(self, view: View) -> Decision:
        """Request one upgrade, or end the play, while no rate is known.

        All that came was in the local store, or the link has carried nothing for long.
        """
        if view.in_flight:
            return Decision.wait("no rate is known")
        self._plan = None
        self._times.sync(view)
        if view.time_left > 0 and self._hopes(view):
            rate = _RECOVERY * self._best_rate or self._base.total_bytes / view.time_left
            if (best := self._best_upgrade(view, self._kept_plan(view, "unknown", rate))) is not None:
                return best
        if view.missing_groups:
            return Decision.wait("no rate is known, and the engine computes the rest")
        return Decision.finish("no rate is known, and nothing is worth a try")

    def _best_upgrade(self, view: View, plan: TimePlan) -> Decision | None:
        """Request the planned upgrade that saves most for its price; None if there is none."""
        if self._ranked is None or self._ranked[0] is not plan or self._ranked_for == 0:
            gains = ((-self._worth(view, plan, group), -group) for group in view.settled)
            self._ranked, self._ranked_for = (plan, [one for one in gains if one[0] < 0.0]), view.keeps + 1
            heapify(self._ranked[1])
        self._ranked_for -= 1
        ranked = self._ranked[1]
        while ranked:
            group = -heappop(ranked)[1]
            if group in view.settled and (gain := self._worth(view, plan, group)) > 0.0:
                track = self._times.names[plan.targets[group]]
                self._follow(group, track)
                reason = f"saves {min(gain, 1e4):.1f} times its price in bytes and decoding"
                return Decision.upgrade(group, track, reason)
        return None

    def _worth(self, view: View, plan: TimePlan, group: int) -> float:
        """Return what the planned upgrade of a group saves, as a multiple of its price; 0.0 if there is none."""
        target, current = plan.targets[group], view.track_of[group]
        if current not in view.catalog.by_name or self._times.stays(group, target) or group in self._computed:
            return 0.0
        if current == self._times.names[target]:
            return 0.0  # it has that by now
        saving = self._times.saves(group, current, self._times.names[target])
        seconds = view.decode_s(self._times.names[target])
        price = plan.byte_price * self._times.bytes_to(group, target) + plan.decode_price * seconds
        return saving / max(price, _FREE)

    def _end(self, view: View) -> Decision:
        """End the play, or wait for what is in flight if that is worth it."""
        if not view.in_flight:
            self._over, self._added = True, view.added
            if (found := self._times.next_best(view)) is None:
                return Decision.finish("nothing can be improved")
            group, track, saving, price = found
            what = f"{track} of group {group} would save {saving:.1e} nats and cost {price:.1e}"
            return Decision.finish(f"nothing is worth the wait: {what}")
        if (why := self._in_flight_pays(view)) is not None:
            return Decision.wait(why)
        self._over, self._added = True, view.added
        return Decision.deliver("what is in flight is not worth the wait")

    def _in_flight_pays(self, view: View) -> str | None:
        """Return why what is in flight is worth the wait; None: it is not."""
        if not view.arrived:
            return "nothing more is worth the wait"
        self._flying_for -= 1
        if self._flying_for <= 0:
            self._flying_saves, self._flying_for = self._saved_in_flight(view), view.keeps
        waited_s = max(0.0, view.outstanding_bytes / view.rate - self._computed_s)  # the engine is waited for anyway
        if self._flying_saves >= view.time_price * waited_s:
            return "nothing more is worth the wait"
        if self._hopes(view, self._flying_saves):
            return "the link carries next to nothing; what is in flight shows when it recovers"
        return None

    def _saved_in_flight(self, view: View) -> float:
        """Return the loss that the upgrades in flight will spare, nats per generated token."""
        first: dict[int, str] = {}
        for transfer in view.in_flight.values():
            first.setdefault(transfer.group, transfer.track)
        losses, saved = view.catalog.by_name, 0.0
        for group, track in first.items():
            current = view.track_of[group]
            if current in losses:  # not what an engine has computed meanwhile
                below = losses[track].refines or self._base.name
                saved += max(0.0, losses[below].loss[group] - losses[current].loss[group])
        return saved


def _grown(trips: float) -> float:
    """Return the mean rate of some round trips of slow start, over the rate before them; not more than counted on."""
    growth = min(_MOST_GROWTH, math.log(_WINDOW) * trips)
    return min(_MOST_GROWTH, math.expm1(growth) / growth)
