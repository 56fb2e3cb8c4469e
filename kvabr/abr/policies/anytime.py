"""``anytime``: the base of every group, then enhancement upon enhancement, most loss saved per byte first.

With tracks that nest as layers, the best cache for every number of bytes is a prefix of one fixed sequence. Who
fetches in that order stands, at every moment, where one who knew the future would stand, so nothing needs to be
predicted but the end: what is asked for must still arrive. What is left to decide is how much to have in flight.

- The base is needed whatever happens, so it is asked for at once, and the rest is sent behind it. The groups that gain
  most by an enhancement go first, since only what is in place can be enhanced; where the engine throws away what lies
  behind a miss, the earliest groups go first. If decoding so much takes most of the time there is, the base is asked
  for little by little, on the track that brings it in soonest.
- Enhancements are asked for before the link runs dry, which on a long link is long before, and no sooner: what is in
  flight cannot be put into a better order.
- One is asked for if it is in place by the deadline at the lower bound of the rate. If nothing is under way, more than
  the expected rate will do, for a link that stands still carries no bytes that could be wasted. One that saves very
  much is asked for in any case.
- Where an engine can fill a hole it may compute from the front, while the network loads from the back, for a share of
  the deadline that the user gives it (``compute``). The groups that it can reach in time are left to it, one after the
  other; as time goes by, those that it will not reach are fetched after all. Without such a share the engine computes
  only what the network will not bring in time.
- A track that replaces another pays for the group a second time. It is taken where there is no layer left to add, and
  as long as all such tracks together could save more than one could tell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import accumulate
from typing import ClassVar, NamedTuple

from kvabr.abr.parameters import Parameter
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View
from kvabr.catalog import Track

_LEAST_FLYING = 2
"""Requests in flight in any case, while there is something to ask for."""
_FIRST_FLYING = 4
"""Requests in flight while no rate is known and decoding is slow."""
_LOOKED_AT = 8
"""Upgrades that are looked at for one that fits into the time that is left."""
_SLOW = 0.8
"""Share of the deadline that decoding the base may take before its track is chosen by how fast it decodes."""


class _Offer(NamedTuple):
    """One upgrade of one group; the better ones sort first."""

    rank: float
    """Less the loss saved per byte."""
    number: int
    """Which it is of all that were made: of two alike the older one is the better."""
    group: int
    below: str
    """The track that it is offered upon, or instead of."""
    track: Track
    saving: float
    replaces: bool


class Anytime(Policy):
    """Base first, then most loss saved per byte, as much at a time as the link needs."""

    name: ClassVar[str] = "anytime"
    paces: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "ahead_ttfb": Parameter(0.5, 4.0, 2.0),
        "ahead_share": Parameter(0.005, 0.1, 0.03, log=True),
        "compute": Parameter(0.0, 1.0, 0.0),
        "hope": Parameter(0.5, 2.0, 1.25),
        "stake": Parameter(1e-4, 1e-1, 2e-3, log=True),
        "waste": Parameter(1e-6, 1e-1, 5e-4, log=True),
    }

    def __init__(
        self,
        *,
        ahead_ttfb: float = 1.5,
        ahead_share: float = 0.02,
        compute: float = 0.0,
        hope: float = 1.25,
        stake: float = 2e-3,
        waste: float = 5e-4,
    ) -> None:
        """Set how far the policy goes.

        Args:
            ahead_ttfb: what is in flight lasts for so many times the time to first byte,
            ahead_share: and this share of the deadline.
            compute: share of the deadline that an engine may compute, from the front; 0 for a fallback only.
            hope: where nothing is under way, an upgrade may need so many times the expected rate.
            stake: an upgrade that saves so many nats per token is tried whatever the estimate says of its arrival.
            waste: nats per token that replacing tracks must be able to save in all before a group is paid for twice.
        """
        self._ahead_ttfb, self._ahead_share = ahead_ttfb, ahead_share
        self._compute = compute
        self._hope, self._stake, self._waste = hope, stake, waste

    def start(self, view: View) -> None:
        """Work out what can be added to what, and the order of the base."""
        catalog, groups = view.catalog, range(view.groups)
        self._tracks = catalog.by_name
        base = self._base = self._tracks[view.ladder.cheapest]
        self._above: dict[str, list[Track]] = {}
        for track in catalog.tracks:
            if track.refines is not None:
                self._above.setdefault(track.refines, []).append(track)
        alone = self._alone = [track for track in view.ladder.tracks if track is not base]
        self._least = [min((track.loss[group] for track in alone), default=0.0) for group in groups]
        """Per group, the least that a track that replaces another would lose."""
        top = base
        while top.name in self._above:
            top = self._above[top.name][0]
        self._gains = [max(0.0, top.loss[group] - self._least[group]) if alone else 0.0 for group in groups]
        self._gain = sum(self._gains)
        """What tracks that replace others could save in all, behind the last layer."""
        self._offers: list[_Offer] = []
        self._heard = self._made = 0
        self._mean = self._until_s = 0.0
        self._slow = base.decode_s * view.groups > _SLOW * view.deadline_s
        self._order = list(groups)
        if not view.front_first:
            offers = [self._best(group, base.name) for group in groups]
            # Of two that gain alike the later one: what an engine computes, it computes from the front.
            self._order.sort(key=lambda group: (0.0 if (offer := offers[group]) is None else offer.rank, -group))
        self._asked = 0
        self._front = 0
        """Groups before this one are in place, under way, or left to the engine,"""
        self._reach = 0
        """and those from there to before this one are kept for it."""
        if view.cost is not None and not view.front_first:
            size, cost = catalog.spec.group_tokens, view.cost
            each_s = (cost.seconds(group * size, catalog.group_tokens(group)) for group in groups)
            self._computed_s = list(accumulate(each_s, initial=0.0))
            self._reach = self._reached(self._compute * view.deadline_s)

    def decide(self, view: View) -> Decision:
        """First the base of every group, then the upgrades."""
        if self._reach and (decision := self._recompute(view)) is not None:
            return decision
        if view.missing_groups and self._wanted(view):
            return self._fetch(view)
        self._listen(view)
        return self._upgrade(view)

    # ------------------------------------------------------------- the engine

    def _reached(self, seconds: float) -> int:
        """The group that an engine does not reach within so many seconds, one after the other from the front."""
        return bisect_right(self._computed_s, self._computed_s[self._front] + seconds) - 1

    def _recompute(self, view: View) -> Decision | None:
        """Give an engine that has nothing to do the next group, if it is in place by the deadline then."""
        if view.cost is None:
            self._reach = 0  # the engine has failed
            return None
        missing = view.missing_groups
        while self._front < self._reach and self._front not in missing:
            self._front += 1
        self._reach = min(self._reach, self._reached(view.time_left - view.engine_backlog_s))
        if self._front < self._reach and view.engine_backlog_s <= 0:
            return Decision.recompute(self._front, f"the engine computes from the front, up to group {self._reach}")
        return None

    def _wanted(self, view: View) -> bool:
        """Whether a group is missing that is not kept for the engine."""
        missing, kept = view.missing_groups, range(self._front, self._reach)
        return len(missing) > len(kept) or any(group not in kept for group in missing)

    # ---------------------------------------------------------------- the base

    def _fetch(self, view: View) -> Decision:
        name = self._base.name
        if self._slow:
            if self._enough(view, _FIRST_FLYING):
                return Decision.wait("enough is in flight, and decoding is slow")
            name = self._soonest(view)
        missing, order = view.missing_groups, self._order
        # Unless there is one that was never asked for, it is one that was lost on the way, or kept for the engine.
        group = next(one for one in missing if not self._front <= one < self._reach)
        while self._asked < len(order):
            self._asked += 1
            if order[self._asked - 1] in missing and not self._front <= order[self._asked - 1] < self._reach:
                group = order[self._asked - 1]
                break
        return Decision.fetch(group, name, "the base of every group comes first")

    def _soonest(self, view: View) -> str:
        """The track on which what is missing is in place first."""
        left = len(view.missing_groups)

        def seconds(track: Track) -> float:
            network = track.total_bytes / view.groups * left / view.rate
            return max(network, view.decode_backlog_s + track.decode_s * left)

        if view.rate <= 0 or seconds(self._base) <= view.time_left:
            return self._base.name
        return min(view.ladder.tracks, key=seconds).name

    # ------------------------------------------------------------ the upgrades

    def _enough(self, view: View, first: int = 0) -> bool:
        """Whether what is in flight lasts until what is asked for now begins to come."""
        flying = len(view.in_flight)
        if view.rate <= 0:
            return flying >= first
        if flying < _LEAST_FLYING:
            return False
        return view.outstanding_bytes > view.rate * (
            self._ahead_ttfb * view.ttfb_s + self._ahead_share * view.deadline_s
        )

    def _upgrade(self, view: View) -> Decision:
        """The upgrade that saves most per byte among those that would arrive in time."""
        enough = self._enough(view)
        rate = view.lower_bound if view.in_flight else self._hope * max(view.rate, self._mean)
        offer = self._in_time(view, rate, staking=enough)
        if offer is None:
            if enough:
                return Decision.wait("enough is in flight")
            return Decision.wait("no upgrade would arrive in time" if self._offers else "there is nothing to add")
        kilobytes = offer.track.bytes[offer.group] / 1e3
        reason = f"saves {offer.saving:.2e} nats with {kilobytes:.0f} kB, the most per byte"
        return Decision.upgrade(offer.group, offer.track.name, reason)

    def _in_time(self, view: View, rate: float, *, staking: bool) -> _Offer | None:
        """The best offer that is in place by the deadline if the link carries ``rate``, or is worth a try anyway.

        Args:
            view: the play.
            rate: bytes per second.
            staking: only those that are worth a try.
        """
        offers, settled, track_of, left_s = self._offers, view.settled, view.track_of, view.time_left
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
                continue  # it has been taken up; what comes after it is offered once it is in place
            if offer.replaces and self._gain < self._waste:
                continue
            if offer.saving >= self._stake:
                arrives_s = view.ttfb_s
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
        """Take note of the rate, and of the groups that have become ready to be upgraded."""
        if view.now > self._until_s:
            self._mean += (view.rate - self._mean) * (view.now - self._until_s) / view.now
            self._until_s = view.now
        history = view.settled.history
        for group in history[self._heard :]:
            current = view.track_of[group]
            if current in self._tracks and (offer := self._best(group, current)) is not None:
                heappush(self._offers, offer)
        self._heard = len(history)

    def _best(self, group: int, current: str) -> _Offer | None:
        """What a group gains most by, a byte: one layer more, and those upon it counted in, or else another track."""
        lost = self._tracks[current].loss[group]
        self._made += 1
        rank, number = 0.0, self._made
        best: Track | None = None
        reachable = [(layer, layer, 0) for layer in self._above.get(current, ())]
        for first, layer, below in reachable:  # grows while it is gone through
            nbytes = below + layer.bytes[group]
            if (worth := (lost - layer.loss[group]) / nbytes) > -rank:
                rank, best = -worth, first
            reachable.extend((first, above, nbytes) for above in self._above.get(layer.name, ()))
        if best is not None:
            return _Offer(rank, number, group, current, best, lost - best.loss[group], replaces=False)
        for track in self._alone:
            if (worth := (lost - track.loss[group]) / track.bytes[group]) > -rank:
                rank, best = -worth, track
        gain = 0.0 if best is None else lost - self._least[group]
        self._gain += gain - self._gains[group]
        self._gains[group] = gain
        if best is None:
            return None
        return _Offer(rank, number, group, current, best, lost - best.loss[group], replaces=True)
