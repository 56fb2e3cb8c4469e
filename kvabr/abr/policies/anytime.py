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
- An engine with time to spare computes what costs it less than it costs the network, see `kvabr.abr.compute_planner`.
- A track that replaces another pays for the group a second time. It is taken where there is no layer left to add, and
  as long as all such tracks together could save more than one could tell; or instead of a layer, where half the rate
  would still bring so much that it pays.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple

from kvabr.abr.compute_planner import Spare
from kvabr.abr.policy import Decision, Parameter, Policy
from kvabr.abr.view import View
from kvabr.types.catalog import Track

_LEAST_FLYING = 2
"""Requests in flight in any case, while there is something to ask for."""
_FIRST_FLYING = 4
"""Requests in flight while no rate is known and decoding is slow."""
_LOOKED_AT = 8
"""Upgrades that are looked at for one that fits into the time that is left."""
_BLIND = 0.25
"""While no rate is known, bytes are as dear to an engine as if the link brought so much more than the base."""
_RICH = 0.5
"""Share of the rate that must be enough for a layer to be skipped in favour of a track that replaces the group."""
_SKIPPED = 0.1
"""Share of ``waste`` that such a track must save of one group, beyond what its last layer would."""
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
    takes_kept: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "ahead_ttfb": Parameter(0.5, 4.0, 1.5),
        "ahead_share": Parameter(0.005, 0.1, 0.02, log=True),
        "hope": Parameter(0.5, 2.0, 1.25),
        "stake": Parameter(1e-4, 1e-1, 2e-3, log=True),
        "waste": Parameter(1e-6, 1e-1, 5e-4, log=True),
    }

    def __init__(
        self,
        *,
        ahead_ttfb: float = 1.5,
        ahead_share: float = 0.02,
        hope: float = 1.25,
        stake: float = 2e-3,
        waste: float = 5e-4,
    ) -> None:
        """Set how far the policy goes.

        Args:
            ahead_ttfb: what is in flight lasts for so many times the time to first byte,
            ahead_share: and this share of the deadline.
            hope: where nothing is under way, an upgrade may need so many times the expected rate.
            stake: an upgrade that saves so many nats per token is tried whatever the estimate says of its arrival.
            waste: nats per token that replacing tracks must be able to save in all before a group is paid for twice.
        """
        self._ahead_ttfb, self._ahead_share = ahead_ttfb, ahead_share
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
        self._spent = 0
        """Bytes of the upgrades asked for."""
        self._byte_price = 0.0
        """What a byte less costs, nats per token."""
        self._spare = None if view.cost is None else Spare(view, self._cost)

    def decide(self, view: View) -> Decision:
        """First the base of every group, then the upgrades; an engine that has time to spare before all else."""
        self._listen(view)
        kept = 0
        if (spare := self._spare) is not None:
            kept = len(spare.kept)
            spend = self._to_spend(view, view.rate, kept) if view.rate else _BLIND * self._base.total_bytes
            self._byte_price = view.ladder.frontier.price(spend)
            spare.plan(view)
            if (decision := spare.next(view)) is not None:
                return decision
            kept = len(spare.kept)
        if len(view.missing_groups) > kept:
            return self._fetch(view)
        return self._upgrade(view)

    # ---------------------------------------------------------- what bytes cost

    def _to_spend(self, view: View, rate: float, kept: int = 0) -> float:
        """Bytes for upgrades, those asked for before included, if the link carries ``rate`` until the deadline."""
        base = (len(view.missing_groups) - kept) * self._base.total_bytes / view.groups
        return self._spent + rate * view.time_left - view.outstanding_bytes - base

    def _cost(self, group: int, current: str | None) -> float:
        """What a group costs if the network brings it, or betters it: its loss, and the bytes that others lack."""
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
            name = self._soonest(view)
        missing, order = view.missing_groups, self._order
        if self._spare is not None and not view.front_first:
            group = next(reversed(missing))  # the engine comes from the other side
            return Decision.fetch(group, name, "the base comes first, from the back")
        group = next(iter(missing))  # unless there is one that was never asked for, it is one that was lost on the way
        while self._asked < len(order):
            self._asked += 1
            if order[self._asked - 1] in missing:
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
        if view.now > self._until_s:
            self._mean += (view.rate - self._mean) * (view.now - self._until_s) / view.now
            self._until_s = view.now
        enough = self._enough(view)
        rate = view.lower_bound if view.in_flight else self._hope * max(view.rate, self._mean)
        offer = self._in_time(view, rate, staking=enough)
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
        """A track that replaces the group, where the link should bring so much that it would be taken in the end."""
        if offer.replaces or self._gains[offer.group] < _SKIPPED * self._waste:
            return offer
        price = view.ladder.frontier.price(self._to_spend(view, _RICH * min(view.lower_bound, self._mean)))
        group, lost = offer.group, self._tracks[offer.below].loss[offer.group]
        least, best = self._layered(group, offer.track, price), offer.track
        for track in self._alone:
            if (total := price * track.bytes[group] + track.loss[group]) < least:
                least, best = total, track
        if best is offer.track:
            return offer
        return offer._replace(track=best, saving=lost - best.loss[group], replaces=True)

    def _layered(self, group: int, layer: Track, price: float) -> float:
        """The least that a group costs with a layer added, or more upon it; no byte of what is in place counted."""
        total = price * layer.bytes[group]
        above = (self._layered(group, further, price) for further in self._above.get(layer.name, ()))
        return total + min(layer.loss[group], *above, float("inf"))

    def _in_time(self, view: View, rate: float, *, staking: bool) -> _Offer | None:
        """The best offer that is in place by the deadline if the link carries ``rate``, or is worth a try anyway.

        Args:
            view: the play.
            rate: bytes per second.
            staking: only those that are worth a try.
        """
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
                continue  # it has been taken up; what comes after it is offered once it is in place
            if offer.replaces and self._gain < self._waste:
                continue
            if offer.saving >= self._stake:
                arrives_s = 0.0  # the least time to a first byte says little where all requests had to queue
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
        """Take note of the groups that have become ready to be upgraded."""
        history = view.settled.history
        for group in history[self._heard :]:
            current = view.track_of[group]
            if current in self._tracks:
                if self._spare is not None:
                    self._spare.settled(group, current, self._tracks[current].loss[group])
                if (offer := self._best(group, current)) is not None:
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
