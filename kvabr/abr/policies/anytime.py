"""``anytime``: the base of every group, then enhancements in the order of loss saved per byte.

With tracks that nest as layers, the best cache for every number of bytes is a prefix of one fixed sequence. A player
that fetches in that order needs no prediction to match one that knows the future, except for the end: what it requests
must still arrive. What remains to decide is how much to keep in flight.

- The base is requested at once, and the rest is sent behind it. Groups that gain most from an enhancement go first, or
  the earliest if the engine discards everything behind a miss. If decoding the base takes most of the time, it is
  requested little by little, on the track that completes soonest.
- Enhancements are requested just before the link runs dry: requests in flight cannot be reordered. One is requested if
  it arrives by the deadline at the lower bound of the rate. With nothing in flight, more than the expected rate may be
  assumed, because an idle link wastes no bytes. One that saves very much is requested in any case.
- An engine with spare time computes what costs it less than it costs the network, see `kvabr.abr.compute_planner`.
- A track that replaces another pays for the group a second time. It is chosen where no layer is left to add, as long as
  all such tracks together save a noticeable amount; or instead of a layer, where it pays even at half the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from kvabr.abr.compute_planner import ComputePlanner
from kvabr.abr.policy import Decision, Parameter, Policy
from kvabr.abr.time_planner import TimePlan, TimePlanner
from kvabr.abr.view import View
from kvabr.types.catalog import Track

_LEAST_FLYING = 2
"""Minimum number of requests in flight while there is something to request."""
_FIRST_FLYING = 4
"""Requests in flight while no rate is known and decoding is slow."""
_LOOKED_AT = 8
"""Maximum number of upgrades examined to find one that fits the remaining time."""
_BLIND = 0.25
"""Spare bytes, as a share of the base, that price bytes for the engine while no rate is known."""
_RICH = 0.5
"""Share of the rate that must suffice to skip a layer in favour of a track that replaces the group."""
_SKIPPED = 0.1
"""Share of ``waste`` that such a track must save on one group, beyond its last layer."""
_FIRST_GROUPS = 6
"""Groups to request while no rate is known: on a fast link their base is not what should be fetched."""
_FIRST_BYTES = 1 << 16
"""Least bytes to request while no rate is known, so that slow start is not starved."""
_SAME_RATE = 0.05
"""A plan holds while the rate changes by no more than this share."""
_SAME_TIME = 0.01
"""A plan holds for this share of the deadline."""
_LEAST_HORIZON = 0.005
"""Least round trip to plan with during slow start, as a share of the deadline."""
_GROWN = 0.2
"""Share of the time left within which the base of every group should come at the rate so far, in slow start."""
_GROWTH = 2.0
"""Growth of the rate until a request has an effect, in slow start."""
_GROWING_TTFB = 4.0
"""Times to a first byte that the bytes in flight should last at the rate so far, in slow start."""
_TRUST = 0.33
"""Share of `sure` that counts at the start, when the rate is that of a moment."""
_NEW_SHARE = 0.2
"""Share of the deadline until which the rate counts as new."""
_SLOW = 0.8
"""Share of the deadline beyond which decoding the base counts as slow."""


class _Offer(NamedTuple):
    """One upgrade of one group; better ones sort first."""

    rank: float
    """Loss saved per byte, negated."""
    number: int
    """Creation order; of equal offers, the older one sorts first."""
    group: int
    below: str
    """The track that it builds on or replaces."""
    track: Track
    saving: float
    replaces: bool


class Anytime(Policy):
    """Base first, then most loss saved per byte, with as much in flight as the link needs."""

    name: ClassVar[str] = "anytime"
    paces: ClassVar[bool] = True
    takes_cached: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "ahead_ttfb": Parameter(0.5, 4.0, 1.5),
        "ahead_share": Parameter(0.005, 0.1, 0.02, log=True),
        "hope": Parameter(0.5, 2.0, 1.25),
        "stake": Parameter(1e-4, 1e-1, 2e-3, log=True),
        "waste": Parameter(1e-6, 1e-1, 5e-4, log=True),
        "sure": Parameter(0.1, 1.0, 0.6),
    }

    def __init__(
        self,
        *,
        ahead_ttfb: float = 1.5,
        ahead_share: float = 0.02,
        hope: float = 1.25,
        stake: float = 2e-3,
        waste: float = 5e-4,
        sure: float = 0.6,
    ) -> None:
        """Set the policy's parameters.

        Args:
            ahead_ttfb: target of bytes in flight: this many times the time to first byte,
            ahead_share: plus this share of the deadline.
            hope: with nothing in flight, an upgrade may assume this multiple of the expected rate.
            stake: an upgrade that saves this many nats per token is tried whatever its estimated arrival.
            waste: nats per token that all replacing tracks together must be able to save before any group is paid for
                twice.
            sure: groups are requested on their final track at once if everything should come within this share of the
                time left, at the lower bound of the rate.
        """
        self._ahead_ttfb, self._ahead_share = ahead_ttfb, ahead_share
        self._hope, self._stake, self._waste = hope, stake, waste
        self._sure = sure

    def start(self, view: View) -> None:
        """Work out what builds on what, and the order of the base."""
        catalog, groups = view.catalog, range(view.groups)
        self._tracks = catalog.by_name
        base = self._base = self._tracks[view.ladder.cheapest]
        self._above = view.ladder.above
        alone = self._alone = [track for track in view.ladder.tracks if track is not base]
        self._least = [min((track.loss[group] for track in alone), default=0.0) for group in groups]
        """Least loss of each group on any track that replaces another."""
        top = base
        while top.name in self._above:
            top = self._above[top.name][0]
        self._gains = [max(0.0, top.loss[group] - self._least[group]) if alone else 0.0 for group in groups]
        self._gain = sum(self._gains)
        """Total that replacing tracks could save beyond the last layer."""
        self._offers: list[_Offer] = []
        self._heard = self._made = 0
        self._mean = self._until_s = 0.0
        self._slow = base.decode_s * view.groups > _SLOW * view.deadline_s
        self._order = list(groups)
        if not view.front_first:
            offers = [self._best(view, group, base.name) for group in groups]
            # Of equal gains the later group goes first: the engine computes from the front.
            self._order.sort(key=lambda group: (0.0 if (offer := offers[group]) is None else offer.rank, -group))
        self._asked = 0
        self._spent = 0
        """Bytes of all upgrades requested."""
        self._byte_price = 0.0
        """Value of a byte, nats per token."""
        self._planner = None if view.cost is None else ComputePlanner(view, self._cost)
        self._times = TimePlanner(view) if view.time_price > 0 else None
        self._plan: TimePlan | None = None
        self._planned: tuple[float, float, bool, int] = (0.0, 0.0, False, 0)
        """Rate and time of the plan, whether groups were missing, and how often it was followed."""
        self._best_rate = 0.0
        self._over = False

    def decide(self, view: View) -> Decision:
        """Use an idle engine first, then request the base of every group, then upgrades."""
        self._listen(view)
        reserved = 0
        if (planner := self._planner) is not None:
            reserved = len(planner.reserved)
            spend = self._to_spend(view, view.rate, reserved) if view.rate else _BLIND * self._base.total_bytes
            self._byte_price = view.ladder.price(spend)
            planner.plan(view)
            if (decision := planner.next(view)) is not None:
                return decision
            reserved = len(planner.reserved)
        missing = len(view.missing_groups) > reserved
        if self._times is None or self._over:
            return Decision.wait("the cache is delivered") if self._over else self._fetch_or_upgrade(view, missing)
        return self._soonest(view, self._times, missing)

    def _fetch_or_upgrade(self, view: View, missing: bool) -> Decision:
        return self._fetch(view) if missing else self._upgrade(view)

    # ------------------------------------------------------- what time costs

    def _soonest(self, view: View, times: TimePlanner, missing: bool) -> Decision:
        """Request every group on its final track if the link is fast; end the play when nothing is worth its wait."""
        if view.rate <= 0:
            if not missing:
                return Decision.wait("no rate is known")
            if len(view.in_flight) >= _FIRST_GROUPS and view.outstanding_bytes >= _FIRST_BYTES:
                return Decision.wait("the first bytes will say how fast the link is")
            return self._fetch(view)
        self._best_rate = max(self._best_rate, view.rate)
        plan = self._planned_for(view, times, missing)
        if not missing:
            return self._improve(view, times, plan)
        enough = self._enough_for(view)
        if (track := self._final(view, times, plan)) is None:
            return Decision.wait("enough is in flight for slow start") if enough and view.growing else self._fetch(view)
        if enough:
            return Decision.wait("enough is in flight")
        group, name = track
        self._follow(times, group, name)
        return Decision.fetch(group, name, f"cheapest of all in bytes and time: {plan.ends_s:.2f} s for everything")

    def _enough_for(self, view: View) -> bool:
        """Return whether the bytes in flight last until a new request begins to arrive, or until slow start is over."""
        round_trips = _GROWING_TTFB if view.growing else self._ahead_ttfb
        ahead_s = round_trips * view.ttfb_s + 0.5 * self._ahead_share * view.deadline_s
        return len(view.in_flight) >= _LEAST_FLYING and view.outstanding_bytes > view.rate * ahead_s

    def _planned_for(self, view: View, times: TimePlanner, missing: bool) -> TimePlan:
        """Return the plan for the present rate, which is kept while little changes."""
        rate, now, then, followed = *self._planned[:2], self._planned[2], self._planned[3]
        fresh = (
            self._plan is not None
            and then == missing
            and abs(view.rate - rate) <= _SAME_RATE * rate
            and view.now - now <= _SAME_TIME * view.deadline_s
            and followed < max(1, view.groups // 16)
            and not (not missing and view.settled.history[-1:] and len(view.settled.history) != self._seen)
        )
        if not fresh or self._plan is None:
            self._seen = len(view.settled.history)
            times.sync(view)
            self._plan = times.plan(view, view.rate * (_GROWTH if view.growing else 1.0))
            self._planned = (view.rate, view.now, missing, 0)
        return self._plan

    def _follow(self, times: TimePlanner, group: int, track: str) -> None:
        rate, now, missing, followed = self._planned
        self._planned = (rate, now, missing, followed + 1)
        times.set(group, track, flying=True)

    def _final(self, view: View, times: TimePlanner, plan: TimePlan) -> tuple[int, str] | None:
        """Return a missing group and its final track, if the link is fast enough for it; None: the base comes first."""
        missing, losses = view.missing_groups, self._base.loss
        base_bytes = len(missing) * self._base.total_bytes / view.groups
        soon_bytes = self._soon_bytes(view)
        if view.growing:
            if view.outstanding_bytes + base_bytes > _GROWN * view.rate * view.time_left:
                return None
        elif view.outstanding_bytes + plan.bytes > soon_bytes or plan.ends_s > view.time_left:
            return None
        if view.front_first:
            group = next(iter(missing))
        else:
            group = max(missing, key=lambda one: losses[one] if view.growing else -losses[one])
        target = plan.targets[group]
        if view.growing:
            most = 3 * view.rate * max(view.ttfb_s, _LEAST_HORIZON * view.deadline_s)
            for faster in (8.0, 4.0, 2.0):
                found = times.plan(view, faster * view.rate).targets[group]
                if times.bytes_to(group, found) <= most:
                    target = found
                    break
        if view.outstanding_bytes + times.bytes_to(group, target) + base_bytes > self._sure * view.lower_bound * view.time_left:
            return None
        return group, times.names[target]

    def _soon_bytes(self, view: View) -> float:
        """Return the bytes that surely come soon: a share of what the lower bound promises, smaller while it is new."""
        trust = _TRUST + (1.0 - _TRUST) * min(1.0, view.now / (_NEW_SHARE * view.deadline_s))
        return self._sure * trust * view.lower_bound * view.time_left

    def _improve(self, view: View, times: TimePlanner, plan: TimePlan) -> Decision:
        """Request the upgrade that is worth its wait, or end the play."""
        now_lost = plan.idle_objective
        urgent = False
        if plan.objective >= now_lost:
            lost = times.lost()
            if lost <= 2 * view.time_price * view.time_left:
                if not view.in_flight:
                    return self._deliver("nothing is worth the wait")
                return self._abandoned(view) or Decision.wait("nothing more is worth the wait")
            # An outage makes everything look too slow: keep one request in flight until it is over.
            if view.in_flight:
                return Decision.wait("the link carries nothing; what is in flight shows when it does again")
            urgent = True
            plan = times.plan(view, max(view.rate, 0.5 * self._best_rate))
        sure = view.outstanding_bytes + plan.bytes <= self._soon_bytes(view)
        if not (sure or urgent):
            return self._upgrade(view, plan)
        if not urgent and self._enough_for(view):
            return Decision.wait("enough is in flight")
        best, chosen = 0.0, -1
        for group in view.settled:
            target = plan.targets[group]
            current = view.track_of[group]
            if current not in self._tracks or times.stays(group, target):
                continue
            saving = self._tracks[current].loss[group] - times.losses[target, group]
            cost = plan.byte_price * times.bytes_to(group, target) + plan.decode_price * view.decode_s(
                times.names[target]
            )
            if saving / max(cost, 1e-12) > best:
                best, chosen = float(saving / max(cost, 1e-12)), group
        if chosen < 0:
            if urgent:
                return self._upgrade(view)
            return Decision.wait("what is worth the wait is in flight")
        name = times.names[plan.targets[chosen]]
        self._follow(times, chosen, name)
        return Decision.upgrade(chosen, name, f"saves {best:.1f} times its price in time")

    def _abandoned(self, view: View) -> Decision | None:
        """End the play if what is in flight is not worth waiting for."""
        if not view.arrived or view.rate <= 0:
            return None
        saving = 0.0
        for group, track in {t.group: view.track_of[t.group] for t in view.in_flight.values()}.items():
            below = next(t for t in view.in_flight.values() if t.group == group)
            lower = self._tracks[below.track].refines
            before = self._tracks[lower].loss[group] if lower else self._base.loss[group]
            saving += max(0.0, before - self._tracks[track or self._base.name].loss[group])
        if saving >= view.time_price * view.outstanding_bytes / view.rate:
            return None
        return self._deliver("what is in flight is not worth the wait", cancel=True)

    def _deliver(self, reason: str, *, cancel: bool = False) -> Decision:
        self._over = True
        return Decision.deliver(reason) if cancel else Decision.finish(reason)

    # ---------------------------------------------------------- what bytes cost

    def _to_spend(self, view: View, rate: float, reserved: int = 0) -> float:
        """Return the bytes available for all upgrades at ``rate`` until the deadline, past upgrades included."""
        base = (len(view.missing_groups) - reserved) * self._base.total_bytes / view.groups
        return self._spent + rate * view.time_left - view.outstanding_bytes - base

    def _cost(self, group: int, current: str | None) -> float:
        """Return the cost of leaving a group to the network: its final loss plus the value of the bytes it takes."""
        price = self._byte_price
        if current is None:
            current, spent = self._base.name, price * self._base.bytes[group]
        else:
            spent = 0.0
        least = self._tracks[current].loss[group]
        if price == float("inf"):
            return spent + least
        for layer in self._above.get(current, ()):
            least = min(least, self._layered(group, layer, price))
        instead = (price * track.bytes[group] + track.loss[group] for track in self._alone)
        return min(spent + least, min(instead, default=float("inf")))

    # ---------------------------------------------------------------- the base

    def _fetch(self, view: View) -> Decision:
        name = self._base.name
        if self._slow:
            if self._enough(view, _FIRST_FLYING):
                return Decision.wait("enough is in flight, and decoding is slow")
            name = view.soonest_track()
        missing, order = view.missing_groups, self._order
        if self._planner is not None and not view.front_first:
            group = next(reversed(missing))  # the engine comes from the front
            return Decision.fetch(group, name, "the base comes first, from the back")
        group = next(iter(missing))  # the first missing group; if it was requested before, it was lost
        while self._asked < len(order):
            self._asked += 1
            if order[self._asked - 1] in missing:
                group = order[self._asked - 1]
                break
        return Decision.fetch(group, name, "the base of every group comes first")

    # ------------------------------------------------------------ the upgrades

    def _enough(self, view: View, first: int = 0) -> bool:
        """Return whether the bytes in flight last until a new request begins to arrive."""
        flying = len(view.in_flight)
        if view.rate <= 0:
            return flying >= first
        if flying < _LEAST_FLYING:
            return False
        return view.outstanding_bytes > view.rate * (
            self._ahead_ttfb * view.ttfb_s + self._ahead_share * view.deadline_s
        )

    def _upgrade(self, view: View, plan: TimePlan | None = None) -> Decision:
        """Request the upgrade that saves most per byte among those that arrive in time and are worth it."""
        if view.now > self._until_s:
            self._mean += (view.rate - self._mean) * (view.now - self._until_s) / view.now
            self._until_s = view.now
        enough = self._enough(view)
        rate = view.lower_bound if view.in_flight else self._hope * max(view.rate, self._mean)
        offer = self._in_time(view, rate, staking=enough)
        if offer is not None and plan is not None:
            cost = plan.byte_price * offer.track.bytes[offer.group] + plan.decode_price * view.decode_s(
                offer.track.name
            )
            if -offer.rank * offer.track.bytes[offer.group] < cost:
                heappush(self._offers, offer)
                return Decision.wait("no upgrade is worth its wait")
        if offer is None:
            if enough:
                return Decision.wait("enough is in flight")
            return Decision.wait("no upgrade would arrive in time" if self._offers else "there is nothing to add")
        offer = self._instead(view, offer)
        self._spent += offer.track.bytes[offer.group]
        kilobytes = offer.track.bytes[offer.group] / 1e3
        reason = f"saves {offer.saving:.2e} nats with {kilobytes:.0f} kB, the most per byte"
        return Decision.upgrade(offer.group, offer.track.name, reason)

    def _instead(self, view: View, offer: _Offer) -> _Offer:
        """Return a track that replaces the group instead, if the link should carry enough for it in the end."""
        if offer.replaces or self._gains[offer.group] < _SKIPPED * self._waste:
            return offer
        price = view.ladder.price(self._to_spend(view, _RICH * min(view.lower_bound, self._mean)))
        group, lost = offer.group, self._tracks[offer.below].loss[offer.group]
        least, best = self._layered(group, offer.track, price), offer.track
        for track in self._alone:
            total = price * track.bytes[group] + track.loss[group]
            if total < least and (group, track.name) not in view.unavailable:
                least, best = total, track
        if best is offer.track:
            return offer
        return offer._replace(track=best, saving=lost - best.loss[group], replaces=True)

    def _layered(self, group: int, layer: Track, price: float) -> float:
        """Return the least cost of a group with one or more further layers; bytes already in place are free."""
        total = price * layer.bytes[group]
        above = (self._layered(group, further, price) for further in self._above.get(layer.name, ()))
        return total + min(layer.loss[group], *above, float("inf"))

    def _in_time(self, view: View, rate: float, *, staking: bool) -> _Offer | None:
        """Pop the best offer that arrives in time at ``rate``, or is worth trying anyway (``staking``: only those)."""
        offers, settled, track_of, left_s = self._offers, view.settled, view.track_of, view.time_left
        if not offers or (staking and offers[0].saving < self._stake):
            return None
        begins_s = max(view.ttfb_s, view.outstanding_bytes / rate) if rate > 0 else float("inf")
        decoded_s = view.decode_backlog_s + sum(self._tracks[one.track].decode_s for one in view.in_flight.values())
        too_late: list[_Offer] = []
        found: _Offer | None = None
        while found is None and offers and len(too_late) < _LOOKED_AT:
            if staking and offers[0].saving < self._stake:
                break
            offer = heappop(offers)
            group, track = offer.group, offer.track
            if group not in settled or track_of[group] != offer.below:
                continue  # already taken; what builds on it is offered once it is in place
            if offer.replaces and self._gain < self._waste:
                continue
            if offer.saving >= self._stake:
                arrives_s = 0.0  # the minimum time to first byte says little where all requests queue
            else:
                arrives_s = begins_s + (track.bytes[group] / rate if rate > 0 else 0.0)
            if max(arrives_s, decoded_s) + track.decode_s <= left_s:
                found = offer
            else:
                too_late.append(offer)
        for offer in too_late:
            heappush(offers, offer)
        return found

    def _listen(self, view: View) -> None:
        """Queue offers for the groups that have settled since the last call."""
        history = view.settled.history
        for group in history[self._heard :]:
            current = view.track_of[group]
            if current in self._tracks:
                if self._planner is not None:
                    self._planner.settled(group, current, self._tracks[current].loss[group])
                if (offer := self._best(view, group, current)) is not None:
                    heappush(self._offers, offer)
        self._heard = len(history)

    def _best(self, view: View, group: int, current: str) -> _Offer | None:
        """Return a group's best upgrade per byte: the next layer (judged with those above it), else another track."""
        lost = self._tracks[current].loss[group]
        self._made += 1
        rank, number = 0.0, self._made
        best: Track | None = None
        reachable = [(layer, layer, 0) for layer in self._above.get(current, ())]
        for first, layer, below in reachable:  # grows during the loop
            if (group, layer.name) in view.unavailable:
                continue
            nbytes = below + layer.bytes[group]
            if (worth := (lost - layer.loss[group]) / nbytes) > -rank:
                rank, best = -worth, first
            reachable.extend((first, above, nbytes) for above in self._above.get(layer.name, ()))
        if best is not None:
            return _Offer(rank, number, group, current, best, lost - best.loss[group], replaces=False)
        for track in self._alone:
            worth = (lost - track.loss[group]) / track.bytes[group]
            if worth > -rank and (group, track.name) not in view.unavailable:
                rank, best = -worth, track
        gain = 0.0 if best is None else lost - self._least[group]
        self._gain += gain - self._gains[group]
        self._gains[group] = gain
        if best is None:
            return None
        return _Offer(rank, number, group, current, best, lost - best.loss[group], replaces=True)
