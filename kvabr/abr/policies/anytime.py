"""``anytime``: the base of every group, then enhancements in the order of loss saved per byte.

With tracks that nest as layers, the best cache for every number of bytes is a prefix of one fixed sequence. A player
that fetches in that order needs no prediction to match one that knows the future, except for the end: what it requests
must still arrive. What remains to decide is how much to keep in flight.

- The base is requested at once, and the rest is sent behind it. Groups that gain most from an enhancement go first, or
  the earliest if the engine discards everything behind a miss, or the last while an engine comes from the front, or may
  come once the rate is known better. If decoding the base takes most of the time, it is
  requested little by little, on the track that completes soonest.
- Enhancements are requested just before the link runs dry: requests in flight cannot be reordered. One is requested if
  it arrives by the deadline at the lower bound of the rate. With nothing in flight, more than the expected rate may be
  assumed, because an idle link wastes no bytes. One that saves very much is requested in any case.
- An engine with spare time computes what costs it less than it costs the network, see `kvabr.abr.compute_planner`.
- While a cache is being prefilled, the publisher pushes the base of each group that it publishes, and what is idle
  until the last group exists goes to enhancements of those before it.
- A track that replaces another pays for the group a second time. It is chosen where no layer is left to add, as long as
  all such tracks together save a noticeable amount; or instead of a layer, where it pays even at half the rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import accumulate, islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvabr.abr.policies.time_saver import TimeSaver
from kvabr.abr.policy import Decision, Division, Parameter, Policy
from kvabr.abr.view import View
from kvabr.types.catalog import Track

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvabr.abr.compute_planner import ComputePlanner

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
_DECODED_SHARE = 0.6
"""Share of the time left that decoding what has arrived may take, before other tracks replace it."""
_SOONER = 0.5
"""Share of the base's decode time that such a track may take."""
_LAST_ARRIVED = 64
"""Groups that arrived last which are looked at for one to replace."""
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
    divides: ClassVar[bool] = True
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
        losses = [track.loss for track in alone] or [(0.0,) * view.groups]
        self._least = list(map(min, zip(*losses, strict=True)))
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
        self._slow = view.decode_s(base.name) * view.groups / view.decoders > _SLOW * view.deadline_s
        self._order = list(groups) if view.front_first else self._by_gain(view)
        self._asked = 0
        self._spared_for = self._priced_for = 0
        """For how many more decisions what follows holds, see `View.keeps`."""
        self._spared_s = 0.0
        """Seconds of decoding that are spared by what is in flight for groups that have arrived."""
        self._priced: list[int] = []
        """Bytes of the upgrades on offer up to each, the best first."""
        self._worths: list[float] = []
        """Loss that each of them saves per byte."""
        self._spent = 0
        """Bytes of all upgrades requested."""
        self._byte_price = 0.0
        """Value of a byte, nats per token."""
        self._planner: ComputePlanner | None = None
        self._saver: TimeSaver | None = None
        if view.time_price > 0 or view.cost is not None:
            from kvabr.abr.compute_planner import ComputePlanner  # noqa: PLC0415  # they load NumPy, slowly
            from kvabr.abr.time_planner import TimePlanner  # noqa: PLC0415

            times = TimePlanner(view)
            if view.time_price > 0:
                self._saver = TimeSaver(base, times, ahead_ttfb=self._ahead_ttfb, sure=self._sure)
            if view.cost is not None:
                self._planner = ComputePlanner(view, times, self._cost)

    def decide(self, view: View) -> Decision:
        """Use an idle engine first, then request the base of every group, then upgrades."""
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
            # Whatever was planned for the engine, it does not come to it.
            return Decision.fetch(first, self._base.name, "nothing is under way, and this is missing")
        return decision if decision.kind == "wait" else Decision.wait("the engine computes the rest")

    def _decide(self, view: View) -> Decision:
        self._listen(view)
        missing, saver = bool(view.missing_groups), self._saver
        if (planner := self._planner) is not None:
            spend = self._to_spend(view, view.rate, planner.reserved) if view.rate else _BLIND * self._base.total_bytes
            self._byte_price = view.ladder.price(spend)
            planner.plan(view)
            if (decision := planner.next(view)) is not None:
                return decision
            missing = planner.outside(view)
            if saver is not None:
                saver.share(view, planner.reserved, max(0.0, planner.until_s - view.now), advances=planner.advances)
        if view.coming and not missing:
            return self._upgrade(view)  # what comes before the last group exists costs no time
        if not missing and (sooner := self._hasten(view)) is not None:
            return sooner
        if saver is not None and (sooner := saver.request(view) if missing else saver.upgrade(view)) is not None:
            return sooner
        return self._fetch(view) if missing else self._upgrade(view)

    @property
    def division(self) -> Division | None:
        """How the work is divided at present; None without an engine."""
        return None if self._planner is None else self._planner.division

    def will_replace(self, view: View, group: int) -> bool:
        """Return whether the plan has another track for a group."""
        return self._saver is not None and self._saver.will_replace(view, group)

    # ---------------------------------------------------------- what bytes cost

    def _to_spend(self, view: View, rate: float, reserved: range = range(0)) -> float:
        """Return the bytes available for all upgrades at ``rate`` until the deadline, past upgrades included."""
        base = max(0, len(view.missing_groups) - len(reserved)) * self._base.total_bytes / view.groups
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
        if view.prefix and self._saver is not None and self._saver.enough(view):
            return Decision.wait("enough is in flight, and the play may be cut before the rest")
        missing, order = view.missing_groups, self._order
        if view.front_first and len(missing) == 1 and (found := self._last_with_more(view)) is not None:
            return found
        if self._planner is not None and view.in_order and not self._planner.reserved:
            return Decision.fetch(next(iter(missing)), name, "the base comes first, in the order of the prompt")
        if self._planner is not None and self._planner.advances and not view.front_first:
            group = next(reversed(missing))  # the engine comes from the front
            return Decision.fetch(group, name, "the base comes first, from the back")
        group = next(iter(missing))  # the first missing group; if it was requested before, it was lost
        if view.rate > 0 and not view.growing and view.slack_s() < 0:
            # Of an incomplete cache, what comes before the first missing group can be used.
            return Decision.fetch(group, name, "not all may come in time: the earliest groups come first")
        while self._asked < len(order):
            self._asked += 1
            if order[self._asked - 1] in missing:
                group = order[self._asked - 1]
                break
        return Decision.fetch(group, name, "the base of every group comes first")

    def _last_with_more(self, view: View) -> Decision | None:
        """Request the last missing group with its next layer at once, if no upgrade on offer saves more per byte.

        An upgrade is on offer once its group is in place, which may be too late for a group that comes last.
        """
        group = next(iter(view.missing_groups))
        if view.rate <= 0 or (more := self._best(view, group, self._base.name)) is None or more.replaces:
            return None
        nbytes = more.track.bytes[group]
        if (self._offers and self._offers[0].rank <= more.rank) or nbytes > view.lower_bound * view.slack_s():
            return None
        if not self._pays(view, more):
            return None
        self._spent += nbytes
        return Decision.fetch(group, more.track.name, "the last base, with the layer that saves most per byte")

    def _hasten(self, view: View) -> Decision | None:
        """Replace what waits to be decoded by what is decoded sooner, if all of it would take too long."""
        left_s = _DECODED_SHARE * view.time_left
        if view.decode_backlog_s <= left_s or view.rate <= 0 or self._enough(view):
            return None
        self._spared_for -= 1
        if self._spared_for <= 0:
            flying = {one.group: one.track for one in view.in_flight.values() if one.group in view.undecoded}
            base_s, self._spared_for = view.decode_s(self._base.name), view.keeps
            self._spared_s = sum(max(0.0, base_s - view.decode_s(track)) for track in flying.values()) / view.decoders
        if view.decode_backlog_s - self._spared_s <= left_s:
            return None
        arrives_s = max(view.ttfb_s, view.outstanding_bytes / view.rate)
        for group in islice(reversed(view.undecoded), _LAST_ARRIVED):  # they have to wait anyway
            current = view.track_of[group]
            if group not in view.settled or current not in self._tracks:
                continue
            most_s = _SOONER * view.decode_s(current)
            found = [one for one in self._alone if (group, one.name) not in view.unavailable]
            found = [one for one in found if view.decode_s(one.name) <= most_s]
            track = min(found, key=lambda one: one.bytes[group], default=None)
            if track is None:
                continue
            if arrives_s + track.bytes[group] / view.rate > view.decode_backlog_s:
                return None
            return Decision.upgrade(group, track.name, "what has arrived would be decoded too late, and this sooner")
        return None

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

    def _upgrade(self, view: View) -> Decision:
        """Request the upgrade that saves most per byte among those that arrive in time and are worth it."""
        if view.now > self._until_s:
            self._mean += (view.rate - self._mean) * (view.now - self._until_s) / view.now
            self._until_s = view.now
        # Until the next group is published an idle link costs nothing, and what is pushed may be too little to measure.
        blind = view.coming and view.rate <= 0 and not view.in_flight
        enough = self._enough(view) and not blind
        rate = view.lower_bound if view.in_flight else self._hope * max(view.rate, self._mean)
        if blind:
            rate = float("inf")
        offer = self._in_time(view, rate, staking=enough)
        if offer is not None and not self._pays(view, offer):
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

    def _pays(self, view: View, offer: _Offer) -> bool:
        """Return whether an upgrade is worth its time, if that costs anything."""
        if self._saver is None or view.coming:
            return True
        return self._saver.pays(view, offer.track, offer.group, -offer.rank)

    def _instead(self, view: View, offer: _Offer) -> _Offer:
        """Return a track that replaces the group instead, if the link should carry enough for it in the end."""
        if offer.replaces or self._gains[offer.group] < _SKIPPED * self._waste:
            return offer
        rate = _RICH * min(view.lower_bound, self._mean)
        group, lost, most = offer.group, self._tracks[offer.below].loss[offer.group], float("inf")
        if view.ends_s > 0:
            # What was spent before the last groups existed could not have been spent on them.
            most = rate * self._left_s(view) - view.outstanding_bytes
            price = self._price_left(view, most - offer.track.bytes[group])
        else:
            price = view.ladder.price(self._to_spend(view, rate))
        least, best = self._layered(group, offer.track, price), offer.track
        for track in self._alone:
            total = price * track.bytes[group] + track.loss[group]
            if total < least and track.bytes[group] <= most and (group, track.name) not in view.unavailable:
                least, best = total, track
        if best is offer.track:
            return offer
        return offer._replace(track=best, saving=lost - best.loss[group], replaces=True)

    def _price_left(self, view: View, spare: float) -> float:
        """Return the loss per byte that is left to save once ``spare`` bytes are spent on the upgrades on offer."""
        self._priced_for -= 1
        if self._priced_for <= 0:
            settled, track_of = view.settled, view.track_of
            here = [one for one in sorted(self._offers) if one.group in settled and track_of[one.group] == one.below]
            self._worths, self._priced_for = [-offer.rank for offer in here], view.keeps
            self._priced = list(accumulate(offer.track.bytes[offer.group] for offer in here))
        index = bisect_right(self._priced, spare)
        return self._worths[index] if index < len(self._worths) else 0.0

    def _layered(self, group: int, layer: Track, price: float) -> float:
        """Return the least cost of a group with one or more further layers; bytes already in place are free."""
        total = price * layer.bytes[group]
        above = (self._layered(group, further, price) for further in self._above.get(layer.name, ()))
        return total + min(layer.loss[group], *above, float("inf"))

    def _in_time(self, view: View, rate: float, *, staking: bool) -> _Offer | None:
        """Pop the best offer that arrives in time at ``rate``, or is worth trying anyway (``staking``: only those)."""
        offers, settled, track_of, left_s = self._offers, view.settled, view.track_of, self._left_s(view)
        if not offers or (staking and offers[0].saving < self._stake):
            return None
        begins_s = max(view.ttfb_s, view.outstanding_bytes / rate) if rate > 0 else float("inf")
        decoded_s = view.decode_backlog_s + view.flying_decode_s() / view.decoders
        too_late: list[_Offer] = []
        reserved = range(0) if self._planner is None else self._planner.reserved
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
            if group in reserved:
                too_late.append(offer)  # unless the engine does not come to it
                continue
            if offer.saving >= self._stake:
                arrives_s = 0.0  # the minimum time to first byte says little where all requests queue
            else:
                arrives_s = begins_s + (track.bytes[group] / rate if rate > 0 else 0.0)
            if view.decoded_by(arrives_s, decoded_s) + view.last_decode_s(track.name) <= left_s:
                found = offer
            else:
                too_late.append(offer)
        for offer in too_late:
            heappush(offers, offer)
        return found

    @staticmethod
    def _left_s(view: View) -> float:
        """Return the seconds in which an upgrade must arrive: to the deadline, or until the last group is published."""
        return min(view.time_left, view.ends_s - view.now) if view.coming else view.time_left

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

    def _by_gain(self, view: View) -> list[int]:
        """Return the groups in the order in which their best upgrade of the base saves per byte, see `_best`."""
        import numpy as np  # noqa: PLC0415  # slow to load

        lost, none = np.array(self._base.loss, float), np.zeros(view.groups)

        def worth(track: Track, nbytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            found: npt.NDArray[np.float64] = (lost - np.array(track.loss)) / nbytes
            found[[group for group, name in view.unavailable if name == track.name]] = 0.0
            return found

        layered, reachable = none, [(layer, none) for layer in self._above.get(self._base.name, ())]
        for layer, below in reachable:  # grows during the loop
            nbytes = below + np.array(layer.bytes)
            layered = np.maximum(layered, worth(layer, nbytes))
            reachable.extend((above, nbytes) for above in self._above.get(layer.name, ()))
        replacing = np.max([none, *(worth(track, np.array(track.bytes)) for track in self._alone)], axis=0)
        gains = np.where(replacing > 0, lost - np.array(self._least), 0.0)
        self._gains = np.where(layered > 0, self._gains, gains).tolist()
        self._gain = sum(self._gains)
        # Of equal gains the later group goes first: the engine computes from the front.
        ranks = -np.where(layered > 0, layered, replacing)
        return list(map(int, np.lexsort((-np.arange(view.groups), ranks))))

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
