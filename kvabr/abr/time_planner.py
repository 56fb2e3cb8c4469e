"""Chooses the track of each group with the least cost, including link time and decoding time.

A plan minimises loss + time price x T + price of the bytes, in which T is the time until both link and decoders are
done. The time price is split between the two, and each group gets the cheapest track at these prices. The best split
determines the price of a byte and of a second of decoding: the link gets the whole time price if decoding keeps up, the
decoders if the link is faster. A group's options are all tracks above its present one; shared layers count once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvabr.abr.belief import Belief
from kvabr.abr.shared_work import Divisions, SharedWork, better
from kvabr.abr.view import MAX_PARTS, Transfer, View, excess
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.loss import factors_if_rest_computed, inherited_if_rest_computed, inherited_later

Array = npt.NDArray[np.float64]

_LINK_SHARES = (1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0)
"""Fractions of the time price for the link; the decoders get the rest."""
_DEADLINE_LEVELS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1e9)
"""Factors on the time price to try if the plan would miss the deadline."""
_FINER_LEVELS = (0.25, 0.01, 1e-3, 0.0)
"""Factors on the time price to try if the loss is limited, or if the engine or the producer may finish last."""
_FEW_SHARES = (1.0, 0.4)
"""Fractions as in `_LINK_SHARES`, used with these factors."""
_MIN_TIME_PRICE = 1e-4
"""Minimum time price for choosing tracks, in nats per second."""
_REPLACED_BYTE_PRICE = 6.0
"""Price of a replaced byte, as a multiple of that of a requested one, since other plays could have used it."""
_LATE_SECOND_COST = 1e3
"""Cost of a second after the deadline, in nats per generated token, so that plans that end in time are preferred."""
_SIMILAR_FACTOR, _EQUAL_FACTOR, _NEAR_FACTOR = 16.0, 1.25, 8.0
"""Factors within which gains count as similar, gains count as equal, and losses of groups are near to each other."""
_NEGLIGIBLE_PRICE = 1e-18
"""Price that is practically zero, nats; avoids division by zero."""
UNAVAILABLE_LOSS = 1e9
"""Loss of an unavailable option, nats."""


class _Of(IntEnum):
    """Index of the arrays of a table of options, each by track and group."""

    LOSS = 0
    BYTES = 1
    """To request."""
    WORK = 2
    """Seconds of one thread to decode it, minus the decoding that it saves. Without decoding times: 1.0 if it must be
    decoded."""
    WASTE = 3
    """Bytes that become useless."""


class TimePlan(NamedTuple):
    """The track of every group, and the expected outcome."""

    targets: list[int]
    """Index in the catalog of each group's track."""
    objective: float
    """Loss plus priced time from now, nats per generated token."""
    idle_objective: float
    """`objective` without further requests; infinite if groups are missing."""
    bytes: float
    """Bytes to request."""
    ends_s: float
    """Seconds until everything is decoded."""
    byte_price: float
    """Price of a byte in nats."""
    decode_price: float
    """Price of a second of decoding in nats."""
    second_price: float
    """Price of a second of the play in nats; above `View.time_price` if time is short."""


class _Picked(NamedTuple):
    """Chosen tracks at several prices."""

    tracks: npt.NDArray[np.intp]
    """By price and group."""
    options: Array
    """Loss, bytes, and seconds of decoding by all decoders, by price and group."""


class _Fixed(NamedTuple):
    """The parts of a prompt to divide, independent of the rate."""

    options: Array
    """See `_Of`, but by track and part."""
    stops: npt.NDArray[np.intp]
    counts: Array
    """Number of groups by part."""
    engine_s: Array
    """Seconds until the engine is done, by stop; the following arrays are also by stop."""
    ready_s: Array
    """Seconds until all groups to fetch are published."""
    flying: Array
    """Bytes in flight."""
    requests: Array
    queue_s: Array
    """Seconds of decoding for data that has arrived or is in flight."""
    lacks: Array | None
    """Bytes and groups that lack the base; only for an engine in the middle of a play."""


class TimePlanner:
    """Plans the tracks of one play, which reports every change to a group."""

    def __init__(self, view: View) -> None:
        catalog = view.catalog
        tracks, groups = catalog.tracks, catalog.groups
        self.names = [track.name for track in tracks]
        self.after_s = 0.0
        """Seconds that the engine takes once the cache is in place; 0.0 if the play's deadline allows for them."""
        self._number = {name: number for number, name in enumerate(self.names)}
        self.losses: Array = np.array([track.loss for track in tracks], dtype=float)
        self._share: Array = np.array(catalog.shares)
        self._decode_s: Array = np.array([view.decode_s(name) for name in self.names])
        """Seconds to decode a group, by track."""
        self._batch_s = max(map(view.decode_latency_s, self.names))
        """Additional seconds for the last batch."""
        shape = (len(tracks), groups)
        states: list[str | None] = [*self.names, None]
        self._from: Array = np.zeros((len(states), 4, *shape))
        """The options of a group in each state (a track; the last state: none), see `_Of`; by state first."""
        self._stacks = {name: frozenset(view.ladder.stacks[name]) for name in self.names}
        self._above = {name: np.array([name in self._stacks[other] for other in self.names]) for name in self.names}
        """For each track, True for the tracks that need its data, itself included."""
        self._weigh(view, states)
        self._now: Array = self._from[-1].copy()
        """The present options, see `_Of`; tracks that cannot follow those in flight have `UNAVAILABLE_LOSS`."""
        self._missing = np.ones(groups, bool)
        self._known: list[tuple[str | None, bool]] = [(None, False)] * groups
        self._changed: set[int] = set(range(groups))
        """Groups to check in addition to new `View.changes`."""
        self._read = self._ruled_out = 0
        """Number of entries of `View.changes` read, and of unavailable tracks handled."""
        self._whole = float(self._now[_Of.BYTES].sum(axis=1).max())
        self._stay: Array = np.full(groups, UNAVAILABLE_LOSS)
        """Loss of each group without further requests."""
        self._lost, self._unplayed = 0.0, groups
        """Sum of `_stay` without missing groups, and the number of missing groups."""
        self._state = np.zeros(groups, int) - 1
        """Track of each group, in place or in flight; -1: none."""
        self._cut: int | None = None
        self._flying = np.zeros(groups, int) - 1
        """Track in flight for each group; -1: none."""
        self._added = 0
        self._left_out = frozenset(catalog.computed)
        """Groups that are in no asset and always computed."""
        self._rest_factors, self._on_base = self._if_rest_computed(view)

    def _if_rest_computed(self, view: View) -> tuple[Array | None, Array | None]:
        """Return the losses if a suffix engine computes the rest; None without one.

        First, by track, the factor on the loss of each earlier group and the amount added to it. Second, the loss
        inherited by later groups if the engine begins on the base, in the middle of a play.
        """
        if not view.front_first or view.cost is None:
            return None, None
        factors: Array = np.array([factors_if_rest_computed(view.catalog, name) for name in self.names])
        with_rest: Array = factors.swapaxes(0, 1)
        return with_rest, None if view.prefix else inherited_if_rest_computed(view.catalog, view.ladder.cheapest)

    def _weigh(self, view: View, states: list[str | None]) -> None:
        names, stacks = self.names, view.ladder.stacks
        sizes = np.array([track.bytes for track in view.catalog.tracks], float)
        needed = np.array([[[one in view.layers(to, now) for one in names] for to in names] for now in states], float)
        apart = np.array([[state is not None and state not in stacks[to] for to in names] for state in states])
        whole = np.array([[one in stacks[name] for one in names] for name in names], float) @ sizes
        loss, nbytes, moves, waste = self._from.swapaxes(0, 1)
        nbytes[:], moves[:], loss[-1] = needed @ sizes, 1.0, self.losses
        loss[:-1] = np.where(self.losses < self.losses[:, None], self.losses, UNAVAILABLE_LOSS)
        waste[:-1] = apart[:-1, :, None] * whole[:, None]
        for state in range(len(names)):
            nbytes[state, state] = moves[state, state] = 0.0
            loss[state, state] = self.losses[state]

    def set(self, group: int, track: str | None, *, flying: bool = False, computed: bool = False) -> None:
        """Set the track of a group, in place or in flight; None: missing."""
        self._missing[group] = track is None and not computed
        self._flying[group] = self._state[group] = -1
        if track is None and not computed:
            self._now[:, :, group] = self._from[-1, :, :, group]
            self._stays_at(group, UNAVAILABLE_LOSS)
            return
        if computed or track not in self._number:  # the engine has it already
            self._now[:, :, group] = 0.0
            self._stays_at(group, 0.0)
            return
        state = self._state[group] = self._number[track]
        self._now[:, :, group] = self._from[state, :, :, group]
        self._stays_at(group, float(self.losses[state, group]))
        if flying:
            self._flying[group] = state

    def sync(self, view: View) -> None:
        """Read the current track of every changed group, and the decoding times."""
        settled = view.settled
        self._decode_s = np.array([view.decode_s(name) for name in self.names])
        if self._added != view.added:  # unavailable tracks may exist now
            self._added = view.added
            self._known = [(None, False)] * view.groups
            self._changed, self._ruled_out = set(range(view.groups)), 0
            for group in range(view.groups):
                self.set(group, None)
        changed = self._changed.union(view.changes[self._read :])
        self._changed, self._read = set(), len(view.changes)
        for group in changed:
            track = view.track_of[group]
            known = (track, group in settled)
            if known != self._known[group] or group in self._left_out:
                self._known[group] = known
                computed = track == RECOMPUTED or group in self._left_out
                self.set(group, track, flying=not known[1], computed=computed)
        if view.unavailable:
            few = self._ruled_out == len(view.unavailable)
            again = ((group, name) for group in changed for name in self.names) if few else iter(view.unavailable)
            self._ruled_out = len(view.unavailable)
            for group, name in again:
                if (group, name) in view.unavailable and group not in self._left_out:
                    self.without(group, name)

    def follow(self, group: int, track: str) -> None:
        """Record that a group was requested; `sync` corrects this if the request fails."""
        self._known[group] = (track, False)
        self._changed.add(group)
        self.set(group, track, flying=True)

    def _stays_at(self, group: int, loss: float) -> None:
        for value, sign in ((float(self._stay[group]), -1), (loss, 1)):
            if value < UNAVAILABLE_LOSS:
                self._lost += sign * value
            else:
                self._unplayed += sign
        self._stay[group] = loss

    def inherited(self, first: int) -> Array:
        """Return the loss that each group from ``first`` on inherits from the earlier ones if it is computed."""
        tracks = np.unique(self._state[:first])
        tracks = tracks[tracks >= 0]
        if not tracks.size:
            return np.zeros(len(self._state) - first)
        return inherited_later(self.losses[tracks], self._state[:first] == tracks[:, None])

    def cut_at(self, group: int | None) -> None:
        """Set where a suffix engine begins, since it amplifies errors right before; None: it computes nothing."""
        self._cut = group if self._rest_factors is not None else None

    def smallest_first(self, track: str) -> list[int]:
        """Return all groups by their loss on a track, the smallest first; those with near losses in order.

        Neighbours that are requested together share a range of an object store.
        """
        losses = np.maximum(self.losses[self._number[track]], _NEGLIGIBLE_PRICE)
        order: list[int] = np.argsort(_rounded(losses, _NEAR_FACTOR), kind="stable").tolist()
        return order

    def lost(self) -> float:
        """Return the loss without further requests, nats per generated token."""
        if self._cut is None:
            return self._lost + self._unplayed * UNAVAILABLE_LOSS
        return float(self._staying()[: self._cut].sum())

    def _loss_if_rest_computed(self, loss: Array, tracks: list[int] | npt.NDArray[np.intp] | slice) -> Array:
        """Return the given losses on some tracks as they are if the engine computes the rest, shaped like ``loss``."""
        if self._rest_factors is None or self._cut is None:
            return loss
        factor, even = self._rest_factors[:, tracks, self._cut]
        if loss.ndim > factor.ndim:
            factor, even = factor[:, None], even[:, None]
        with_rest: Array = factor * loss + even
        return np.where(loss < UNAVAILABLE_LOSS, with_rest, loss)

    def _staying(self) -> Array:
        """Return the loss of each group without further requests, with errors amplified by computing the rest."""
        if self._cut is None:
            return self._stay
        return np.where(self._state < 0, self._stay, self._loss_if_rest_computed(self._stay, self._state))

    def rank(self, view: View, plan: TimePlan, belief: Belief, computed: range) -> list[tuple[float, int, int]]:
        """Return the upgrades that pay off as (saving per price, group, track), the first to request last.

        ``belief``: possible rates of new requests; ``computed``: groups assigned to the engine.
        """
        base = self._number[view.ladder.cheapest]
        here, coming = self._flying < 0, self._flying == base
        coming &= plan.second_price > view.time_price  # if time is short, layers follow a base in flight
        groups = np.flatnonzero((self._stay < UNAVAILABLE_LOSS) & (self._state >= 0) & (here | coming))
        groups = groups[(groups < computed.start) | (groups >= computed.stop)] if computed else groups
        if not groups.size:
            return []
        loss, nbytes, decode, waste = self._options(view)[..., groups]
        saving = np.maximum(0.0, self._staying()[groups] - loss) * (self._now[_Of.WORK][:, groups] > 0)
        nbytes = np.maximum(1.0, nbytes)
        price = max(plan.byte_price, _NEGLIGIBLE_PRICE)
        discard = max(_REPLACED_BYTE_PRICE * price, plan.second_price * view.deadline_s / self._whole)
        cost = price * nbytes + discard * waste + plan.decode_price * decode + _NEGLIGIBLE_PRICE
        columns, left_s = np.arange(groups.size), self._left_s(view)
        if self.lost() > view.max_loss:
            left_s = math.inf  # a cache above max_loss is not delivered at the deadline either
        rates = np.array(belief.rates)[:, None, None]
        arrives_s = np.maximum(view.ttfb_s, view.outstanding_bytes / rates) + nbytes / rates
        in_time = arrives_s + (0.0 if view.decodes_last else decode) <= left_s
        comes = (np.array(belief.weights)[:, None, None] * in_time).sum(axis=0)
        worth = comes * saving / np.maximum(cost, price * nbytes)
        net = comes * saving - cost
        picks, least = net.argmax(axis=0), 1.0
        if not view.growing:
            # If the deadline leaves time for some groups only, the largest saving per price wins.
            picks = np.where(net.max(axis=0) > 0.0, picks, worth.argmax(axis=0))
            least = min(1.0, view.time_price / max(plan.second_price, _NEGLIGIBLE_PRICE))
        gains = np.where(self._above[view.ladder.cheapest][picks] | ~coming[groups], worth[picks, columns], 0.0)
        worthy = np.flatnonzero(gains > max(_NEGLIGIBLE_PRICE, least))
        # Of upgrades with a similar gain, tracks that decode slower than they arrive go first, to keep decoders busy
        # until the end. At about equal gains, neighbours follow each other: they share a range of an object store.
        similar, equal = (_rounded(gains[worthy], factor) for factor in (_SIMILAR_FACTOR, _EQUAL_FACTOR))
        carried_s = nbytes[picks, columns][worthy] / max(view.rate, _NEGLIGIBLE_PRICE)
        faster = carried_s >= decode[picks, columns][worthy] / view.decoders
        order = worthy[np.lexsort((groups[worthy], -equal, faster, -similar))[::-1]]
        return list(zip(gains[order].tolist(), groups[order].tolist(), picks[order].tolist(), strict=True))

    @staticmethod
    def _finer(view: View) -> tuple[float, ...]:
        return _FINER_LEVELS if math.isfinite(view.max_loss) else ()

    @staticmethod
    def _left_s(view: View) -> float:
        """Return the seconds left for an upgrade, to the deadline or the publication of the last group."""
        if view.time_left <= 0 and math.isfinite(view.max_loss):
            return math.inf  # a cache above max_loss is not delivered
        return min(view.time_left, view.ends_s - view.now) if view.coming else view.time_left

    def without(self, group: int, track: str) -> None:
        """Mark a track, and the layers above it, as unavailable for a group, unless already there."""
        if track in self._stacks.get(self._known[group][0] or "", ()):
            return
        for number, name in enumerate(self.names):
            if track in self._stacks[name] and self._now[_Of.WORK, number, group]:
                self._now[_Of.LOSS, number, group] = UNAVAILABLE_LOSS

    def plan(self, view: View, rate: float, computed: range = range(0), computed_s: float = 0.0) -> TimePlan:
        """Return the best plan at a rate in bytes per second.

        ``computed``: groups assigned to the engine, which are not planned here; ``computed_s``: seconds until the
        engine is done with these and its current work. The plan gains nothing by ending sooner.
        """
        price = max(view.time_price, _MIN_TIME_PRICE)
        now = self._options(view)
        outside = np.ones(len(self._missing))
        outside[computed.start : computed.stop] = 0.0
        queue_s, left_s = view.decode_backlog_s + self._flying_s(view), self._left_s(view)
        idle = math.inf
        if not (self._missing * outside).any():
            staying = float(self._staying() @ outside)
            waits_s = max(view.outstanding_bytes / rate, queue_s, computed_s)
            idle = staying + float(excess(staying, view)) + view.time_price * waits_s

        def planned(levels: tuple[float, ...]) -> tuple[float, TimePlan]:
            link, decoding, second = (price * each for each in _prices(levels))
            picked = self._pick(view, rate, link, decoding, now)
            lost, nbytes, works = picked.options
            lost, nbytes, works = lost @ outside, nbytes @ outside, works * outside
            wait_s = (nbytes > 0) * max(0.0, view.ttfb_s - view.outstanding_bytes / rate)
            arrives_s = (view.outstanding_bytes + nbytes) / rate + wait_s
            # The last arrivals are decoded after they arrive, in at least one batch.
            worked_s = works.sum(axis=1)
            last_s = arrives_s + (worked_s if view.decodes_last else works.max(axis=1))
            ends_s = np.maximum(last_s, np.maximum(wait_s, queue_s) + worked_s) + self._batch_s
            totals = lost + view.time_price * np.maximum(ends_s, computed_s) + excess(lost, view)
            late_cost = _LATE_SECOND_COST * np.maximum(0.0, ends_s - left_s)
            best = int((totals + late_cost).argmin())
            return float(late_cost[best] + totals[best]), TimePlan(
                picked.tracks[best].tolist(), float(totals[best]), idle, float(nbytes[best]), float(ends_s[best]),
                float(link[best]) / rate, float(decoding[best]) / view.decoders, float(second[best]),
            )  # fmt: skip

        # Until the engine is done, time costs nothing.
        cost, plan = planned((1.0, *(_FINER_LEVELS if computed_s > 0 else self._finer(view))))
        if plan.ends_s > left_s:
            cost, plan = min((cost, plan), planned(_DEADLINE_LEVELS), key=itemgetter(0))
        return plan

    def _options(self, view: View) -> Array:
        """Return the present options, with seconds of decoding, as they are if the engine computes the rest."""
        now = self._now.copy()
        now[_Of.LOSS] = self._loss_if_rest_computed(now[_Of.LOSS], slice(None))
        now[_Of.WORK] = self._work(view, now[_Of.WORK])
        return now

    def _later_options(self, view: View) -> Array:
        """Return the options once everything in flight has arrived; upgrades in flight may also be dropped."""
        later = self._now.copy()
        flying: dict[int, list[Transfer]] = {}
        for transfer in view.in_flight.upgrades.values():
            flying.setdefault(transfer.group, []).append(transfer)
        for group, transfers in flying.items():
            if view.track_of[group] not in self._number:
                continue
            below = self._number[view.catalog.by_name[transfers[0].track].refines or view.ladder.cheapest]
            later[:, :, group] = self._from[below, :, :, group]
            for transfer in transfers:
                later[_Of.BYTES, self._above[transfer.track], group] -= transfer.bytes - transfer.remaining
        later[_Of.WORK] = self._work(view, later[_Of.WORK])
        return later

    def _pick(self, view: View, rate: float, link: Array, decoding: Array, options: Array) -> _Picked:
        """Return the cheapest tracks at several prices of a second of link and decoders."""
        loss, nbytes, work, waste = options
        discard = (link + decoding)[:, None, None] * view.deadline_s / self._whole
        link, decoding = link[:, None, None] / rate, decoding[:, None, None] / view.decoders
        wasted = np.maximum(_REPLACED_BYTE_PRICE * link, discard) * waste
        picks = (loss + link * nbytes + wasted + decoding * work).argmin(axis=1)
        groups = np.arange(picks.shape[1])
        picked = options[: _Of.WASTE, picks, groups]
        picked[_Of.WORK] /= view.decoders
        return _Picked(picks, picked)

    def _work(self, view: View, moves: Array) -> Array:
        """Return the seconds to decode each option, minus those of undecoded data that it replaces."""
        decode = self._decode_s
        waiting = np.where(self._flying >= 0, decode[self._flying], 0.0)
        for group in view.undecoded:
            if (state := self._state[group]) >= 0:
                waiting[group] = decode[state]
        work: Array = (decode[:, None] - waiting) * self._share * moves
        return work

    def _flying_s(self, view: View) -> float:
        flying = self._flying[self._flying >= 0]
        if not flying.size:
            return 0.0
        spared = sum(bool(self._flying[group] >= 0) for group in view.undecoded) * view.decode_s(view.ladder.cheapest)
        return max(0.0, float(self._decode_s[flying].sum()) - spared) / view.decoders

    def _parts(self, view: View, starts: npt.NDArray[np.intp]) -> tuple[Array, Array]:
        """Return the options of the parts that begin at ``starts``, and their bytes and requests in flight."""
        options, required = self._later_options(view), view.in_flight.required.values()
        wanted = [transfer.group for transfer in required]
        held = np.array(
            [
                np.bincount(wanted, [transfer.remaining for transfer in required], len(self._missing)),
                np.bincount(wanted, None, len(self._missing)),
            ]
        )
        if len(starts) < len(self._missing):
            # Groups of a part that already have better tracks keep them.
            stay = (options[_Of.LOSS] >= UNAVAILABLE_LOSS) & (self._stay < UNAVAILABLE_LOSS)
            options[_Of.LOSS] = np.where(stay, self._stay, options[_Of.LOSS])
            options[_Of.BYTES :, stay] = 0.0
            options, held = (np.add.reduceat(each, starts, axis=-1) for each in (options, held))
        return options, held

    @staticmethod
    def _ready_s(view: View, stops: npt.NDArray[np.intp]) -> Array:
        """Return the seconds until all groups to fetch are published, by stop."""
        if not view.coming or view.ready_s is None:
            return np.zeros(len(stops))
        last = stops if view.front_first else np.where(stops < view.groups, view.groups, 0)
        ready = np.array([view.ready_s(int(stop) - 1) if stop > view.edge else view.now for stop in last])
        found: Array = ready - view.now + (ready > view.now) * view.ttfb_s / 2
        return found

    def divide(
        self,
        view: View,
        rates: Sequence[float],
        first: npt.NDArray[np.intp],
        stops: npt.NDArray[np.intp],
        engine_s: Array,
        inherited: Array,
        *,
        ramp: tuple[float, float] | None = None,
    ) -> list[Divisions]:
        """Return, by rate, the cost of each division of the work between network and engine.

        In hole mode the engine computes the groups from ``first`` to a stop while the network delivers the others. In
        suffix mode the engine computes from a stop on, once the network has delivered the groups before it.

        Args:
            view: the play.
            rates: link rates, bytes per second.
            first: groups at which the engine continues, by stop.
            stops: ends of the engine's groups in hole mode, of the network's in suffix mode.
            engine_s: seconds until the engine is done, by stop.
            inherited: loss of the computed groups, by stop.
            ramp: in slow start, the initial rate and its doubling time in seconds.
        """
        groups = len(self._missing)
        edges, apart = np.arange(groups + 1), groups // MAX_PARTS
        if apart > 1:
            edges = np.union1d(np.append(stops, first), edges[:groups:apart])
        options, held = self._parts(view, starts := edges[edges < groups])
        at = np.searchsorted(edges, (first, stops))
        works = [SharedWork(view, rate, ramp, stops, engine_s, inherited, at, self.after_s) for rate in rates]
        flying, requests = works[0].brought(held)
        queue_s = view.decode_backlog_s + (requests > 0) * self._flying_s(view)
        lacks: Array | None = None
        if self._on_base is not None:
            every = np.array((self._now[_Of.BYTES, self._number[view.ladder.cheapest]], np.ones(groups)))
            lacks = works[0].brought(np.add.reduceat(np.where(self._missing, every, 0.0), starts, axis=1))
        counts, ready_s = np.diff(np.append(starts, groups)), self._ready_s(view, stops)
        fixed = _Fixed(options, stops, counts, engine_s, ready_s, flying, requests, queue_s, lacks)
        return [self._divide(view, work, fixed) for work in works]

    def _divide(self, view: View, work: SharedWork, fixed: _Fixed) -> Divisions:
        _, stops, _, engine_s, ready_s, flying, requests, queue_s, lacks = fixed
        begun = None
        if lacks is not None and self._on_base is not None:
            nbytes, bases = lacks
            decode_s = view.decode_s(view.ladder.cheapest) / view.decoders
            here_s = work.carried_s(nbytes + flying) + work.lacking * work.first_s
            decoded_s = np.maximum(work.first_s - decode_s, queue_s) + bases * decode_s
            here_s = np.maximum(here_s, work.lacking * decoded_s)
            begun = np.maximum(here_s, ready_s), self._on_base[stops]
        with_rest, price = self._rest_factors, max(view.time_price, _MIN_TIME_PRICE)

        def divided(levels: tuple[float, ...]) -> Divisions:
            link, decoding, _ = (price * each for each in _prices(levels))
            picked = self._pick(view, work.rate, link, decoding, fixed.options)
            lost, nbytes, works = work.brought(picked.options)
            if with_rest is not None:
                used = np.flatnonzero(np.bincount(picked.tracks.ravel()))
                on = picked.tracks[:, None] == used[:, None]
                parts = work.brought(np.array((on * picked.options[_Of.LOSS][:, None], on * fixed.counts)))
                lost = (parts * with_rest[:, None, used][..., stops]).sum(axis=0).sum(axis=1)
            network_s = work.network_s(works, nbytes, flying, queue_s, self._batch_s)
            network_s *= work.lacking | (nbytes + requests > 0) | (view.decode_backlog_s > 0)
            return work.least(lost, np.maximum(network_s, ready_s), begun)

        found = divided((1.0, *self._finer(view)))
        if (found.late & (engine_s <= view.time_left)).any():  # at a higher time price the network may be in time
            found = better(divided(_DEADLINE_LEVELS), found)
        return found


@cache
def _prices(levels: tuple[float, ...]) -> tuple[Array, Array, Array]:
    """Return prices of a second of the link, of the decoders, and of the play, as multiples of the time price."""
    prices = [
        (level * share, level * (1.0 - share), level)
        for level in levels
        for share in (_LINK_SHARES if level == 1.0 else _FEW_SHARES)
    ]
    link, decoding, second = np.array(prices).T.copy()
    return link, decoding, second


def _rounded(values: Array, factor: float) -> Array:
    """Return positive values on a logarithmic scale, rounded down to steps of a factor."""
    return np.floor(np.log(values) / math.log(factor))
