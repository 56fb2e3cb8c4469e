"""Chooses the track of each group with the least cost, including link time and decoding time.

A plan minimises loss + time price x T + price of the bytes, in which T is the time until both link and decoders are
done. The time price is split between the two, and each group gets the cheapest track at these prices. The best split
determines the price of a byte and of a second of decoding: the link gets the whole time price if decoding keeps up, the
decoders if the link is faster. A group's options are all tracks above its present one; shared layers count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvabr.abr.belief import Belief
from kvabr.abr.shared_work import Divisions, SharedWork, better
from kvabr.abr.view import MAX_PARTS, Transfer, View, excess
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.loss import factors_if_rest_computed, inherited_if_rest_computed

Array = npt.NDArray[np.float64]

_LINK_SHARES: Array = np.array([1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0])
"""Fractions of the time price for the link; the decoders get the rest."""
_DEADLINE_LEVELS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1e9)
"""Factors on the time price to try if the plan would miss the deadline."""
_FINER_LEVELS = (0.25, 0.01, 1e-3, 0.0)
"""Factors on the time price to try if the loss is limited, or if the engine or the producer may finish last."""
_FEW_SHARES: Array = np.array([1.0, 0.4])
"""Fractions as in `_LINK_SHARES`, used with these factors."""
_MIN_TIME_PRICE = 1e-4
"""Minimum time price to which `_DEADLINE_LEVELS` and `_FINER_LEVELS` apply, in nats per second."""
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


class _Options(NamedTuple):
    """Options of tracks, by track and group."""

    loss: Array
    bytes: Array
    work: Array
    """Seconds of one thread to decode the option, minus the decoding that it saves."""
    waste: Array


class _Picked(NamedTuple):
    """Chosen tracks at several prices, by price and group."""

    tracks: npt.NDArray[np.intp]
    bytes: Array
    work: Array
    """Seconds of decoding by all decoders."""
    loss: Array


class _Fixed(NamedTuple):
    """The parts of a prompt to divide, independent of the rate."""

    options: _Options
    """Options by track and part."""
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
        shape = (len(tracks), groups)
        states: list[str | None] = [*self.names, None]
        self._steps: Array = np.zeros((len(states), *shape))
        """Bytes from a state (a track; the last state: none) to a track, by state, track and group."""
        self._discards: Array = np.zeros((len(states), *shape))
        """Bytes that the step makes useless, by state, track and group."""
        self._stacks = {name: frozenset(view.ladder.stacks[name]) for name in self.names}
        self._offers: Array = np.full((len(states), *shape), UNAVAILABLE_LOSS)
        """Loss of the tracks reachable from a state, by state, track and group."""
        self._weigh(view, states)
        self._bytes: Array = self._steps[-1].copy()
        self._loss: Array = self._offers[-1].copy()
        """Loss of the tracks that can follow those in flight, by track and group."""
        self._waste: Array = np.zeros(shape)
        self._moves: Array = np.ones(shape)
        """1.0 if the option must be decoded, else 0.0."""
        self._missing = np.ones(groups, bool)
        self._known: list[tuple[str | None, bool]] = [(None, False)] * groups
        self._changed: set[int] = set(range(groups))
        """Groups to check in addition to new `View.changes`."""
        self._read = self._ruled_out = 0
        """Number of entries of `View.changes` read, and of unavailable tracks handled."""
        self._whole = float(self._steps[-1].sum(axis=1).max())
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
        self._steps[:] = needed @ sizes
        self._offers[-1] = self.losses
        self._offers[:-1] = np.where(self.losses < self.losses[:, None], self.losses, UNAVAILABLE_LOSS)
        self._discards[:-1] = apart[:-1, :, None] * whole[:, None]
        for state in range(len(names)):
            self._steps[state, state] = 0.0
            self._offers[state, state] = self.losses[state]

    def set(self, group: int, track: str | None, *, flying: bool = False, computed: bool = False) -> None:
        """Set the track of a group, in place or in flight; None: missing."""
        self._missing[group] = track is None and not computed
        self._flying[group] = self._state[group] = -1
        if computed or track is None or track not in self._number:
            self._bytes[:, group], self._loss[:, group] = self._steps[-1, :, group], self._offers[-1, :, group]
            self._moves[:, group], self._waste[:, group] = 1.0, 0.0
            if computed or track is not None:  # the engine has it already
                self._bytes[:, group] = self._loss[:, group] = self._moves[:, group] = 0.0
            self._stays_at(group, 0.0 if computed or track is not None else UNAVAILABLE_LOSS)
            return
        state = self._state[group] = self._number[track]
        self._bytes[:, group], self._moves[:, group] = self._steps[state, :, group], 1.0
        self._waste[:, group] = self._discards[state, :, group]
        self._loss[:, group] = self._offers[state, :, group]
        self._moves[state, group] = 0.0
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

    def tracks_before(self, group: int) -> Iterator[tuple[Array, npt.NDArray[np.bool_]]]:
        """Yield the losses on each track that earlier groups are on, and True for each group that is on it."""
        for number in np.unique(self._state[:group]):
            if number >= 0:
                yield self.losses[number], self._state[:group] == number

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
        loss = self._loss_if_rest_computed(self._loss, slice(None))[:, groups]
        saving = np.maximum(0.0, self._staying()[groups] - loss) * (self._moves[:, groups] > 0)
        decode = self._work(view, self._moves)[:, groups]
        nbytes = np.maximum(1.0, self._bytes[:, groups])
        price = max(plan.byte_price, _NEGLIGIBLE_PRICE)
        discard = max(_REPLACED_BYTE_PRICE * price, plan.second_price * view.deadline_s / self._whole)
        cost = price * nbytes + discard * self._waste[:, groups] + plan.decode_price * decode + _NEGLIGIBLE_PRICE
        columns, left_s = np.arange(groups.size), self._left_s(view)
        if self.lost() > view.max_loss:
            left_s = math.inf  # a cache above max_loss is not delivered at the deadline either
        comes = np.zeros(nbytes.shape)
        for one, weight in zip(belief.rates, belief.weights, strict=True):
            begins_s = max(view.ttfb_s, view.outstanding_bytes / one)
            decoded_s = 0.0 if view.decodes_last else decode
            comes += weight * (begins_s + nbytes / one + decoded_s <= left_s)
        worth = comes * saving / np.maximum(cost, price * nbytes)
        net = comes * saving - cost
        picks, least = net.argmax(axis=0), 1.0
        if not view.growing:
            # If the deadline leaves time for some groups only, the largest saving per price wins.
            picks = np.where(net.max(axis=0) > 0.0, picks, worth.argmax(axis=0))
            least = min(1.0, view.time_price / max(plan.second_price, _NEGLIGIBLE_PRICE))
        apart = np.array([view.ladder.cheapest not in self._stacks[name] for name in self.names])
        gains = np.where(apart[picks] & coming[groups], 0.0, worth[picks, columns])
        worthy = np.flatnonzero(gains > max(_NEGLIGIBLE_PRICE, least))
        # Of upgrades with a similar gain, tracks that decode slower than they arrive go first, to keep decoders busy
        # until the end. At about equal gains, neighbours follow each other: they share a range of an object store.
        similar, equal = (_rounded(gains[worthy], factor) for factor in (_SIMILAR_FACTOR, _EQUAL_FACTOR))
        arrives_s = nbytes[picks, columns][worthy] / max(view.rate, _NEGLIGIBLE_PRICE)
        faster = arrives_s >= decode[picks, columns][worthy] / view.decoders
        order = np.lexsort((groups[worthy], -equal, faster, -similar))[::-1]
        return [(float(gains[column]), int(groups[column]), int(picks[column])) for column in worthy[order]]

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
            if track in self._stacks[name] and self._moves[number, group]:
                self._loss[number, group] = UNAVAILABLE_LOSS

    def plan(self, view: View, rate: float, computed: range = range(0), computed_s: float = 0.0) -> TimePlan:
        """Return the best plan at a rate in bytes per second.

        ``computed``: groups assigned to the engine, which are not planned here; ``computed_s``: seconds until the
        engine is done with these and its current work. The plan gains nothing by ending sooner.
        """
        price = max(view.time_price, _MIN_TIME_PRICE)
        # Until the engine is done, time costs nothing.
        share, level = _prices(_FINER_LEVELS if computed_s > 0 else self._finer(view))
        loss = self._loss_if_rest_computed(self._loss, slice(None))
        now = _Options(loss, self._bytes, self._work(view, self._moves), self._waste)
        picked = self._pick(view, rate, price * level * share, price * level * (1.0 - share), now)
        outside = np.ones(len(self._missing))
        outside[computed.start : computed.stop] = 0.0
        nbytes = picked.bytes @ outside
        works = picked.work * outside
        wait_s = (nbytes > 0) * max(0.0, view.ttfb_s - view.outstanding_bytes / rate)
        arrives_s = (view.outstanding_bytes + nbytes) / rate + wait_s
        # The last arrivals are decoded after they arrive, in at least one batch.
        batch_s = max(map(view.decode_latency_s, self.names))
        worked_s, queue_s = works.sum(axis=1), view.decode_backlog_s + self._flying_s(view)
        last_s = arrives_s + (worked_s if view.decodes_last else works.max(axis=1))
        ends_s = np.maximum(last_s, np.maximum(wait_s, queue_s) + worked_s) + batch_s
        lost = picked.loss @ outside
        totals = lost + view.time_price * np.maximum(ends_s, computed_s) + excess(lost, view)
        left_s = self._left_s(view)
        late_s = np.maximum(0.0, ends_s - left_s)
        # Use a higher time price only if the plan would be late otherwise.
        usual = np.append(late_s[level <= 1.0], np.inf).min() <= 0.0
        best = int(
            (totals + _LATE_SECOND_COST * late_s + np.where(usual & (level > 1.0), UNAVAILABLE_LOSS, 0.0)).argmin()
        )
        idle = np.inf
        if not (self._missing * outside).any():
            staying = float(self._staying() @ outside)
            idle = (
                staying
                + float(excess(staying, view))
                + view.time_price * max(view.outstanding_bytes / rate, queue_s, computed_s)
            )
        paid = price * float(level[best])
        return TimePlan(
            picked.tracks[best].tolist(), float(totals[best]), float(idle), float(nbytes[best]), float(ends_s[best]),
            paid * float(share[best]) / rate, paid * (1.0 - float(share[best])) / view.decoders, paid,
        )  # fmt: skip

    def _later_options(self, view: View) -> _Options:
        """Return the options once everything in flight has arrived; upgrades in flight may also be dropped."""
        loss, nbytes, moves, waste = self._loss, self._bytes, self._moves, self._waste
        if view.in_flight.upgrades:
            loss, nbytes, moves, waste = loss.copy(), nbytes.copy(), moves.copy(), waste.copy()
        flying: dict[int, list[Transfer]] = {}
        for transfer in view.in_flight.upgrades.values():
            flying.setdefault(transfer.group, []).append(transfer)
        for group, transfers in flying.items():
            if view.track_of[group] not in self._number:
                continue
            below = self._number[view.catalog.by_name[transfers[0].track].refines or view.ladder.cheapest]
            loss[:, group], moves[:, group] = self._offers[below, :, group], 1.0
            nbytes[:, group], moves[below, group] = self._steps[below, :, group], 0.0
            waste[:, group] = self._discards[below, :, group]
            for transfer in transfers:
                for number, name in enumerate(self.names):
                    if transfer.track in self._stacks[name]:
                        nbytes[number, group] -= transfer.bytes - transfer.remaining
        return _Options(loss, nbytes, self._work(view, moves), waste)

    def _pick(self, view: View, rate: float, link: Array, decoding: Array, options: _Options) -> _Picked:
        """Return the cheapest tracks at several prices of a second of link and decoders."""
        work = options.work / view.decoders
        discard = (link + decoding)[:, None, None] * view.deadline_s / self._whole
        link = link[:, None, None] / rate
        cost = (
            options.loss
            + link * options.bytes
            + np.maximum(_REPLACED_BYTE_PRICE * link, discard) * options.waste
            + decoding[:, None, None] * work
        )
        picks = cost.argmin(axis=1)
        groups = np.arange(picks.shape[1])
        return _Picked(picks, options.bytes[picks, groups], work[picks, groups], options.loss[picks, groups])

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

    def _parts(self, view: View, starts: npt.NDArray[np.intp]) -> tuple[_Options, Array]:
        """Return the options of the parts that begin at ``starts``, and their bytes and requests in flight."""
        options, held = self._later_options(view), np.zeros((2, len(self._missing)))
        for transfer in view.in_flight.required.values():
            held[:, transfer.group] += transfer.remaining, 1
        if len(starts) == len(self._missing):
            return options, held
        # Groups of a part that already have better tracks keep them.
        stay = (options.loss >= UNAVAILABLE_LOSS) & (self._stay < UNAVAILABLE_LOSS)
        together = _Options(
            np.add.reduceat(np.where(stay, self._stay, options.loss), starts, axis=1),
            *(
                np.add.reduceat(np.where(stay, 0.0, each), starts, axis=1)
                for each in (options.bytes, options.work, options.waste)
            ),
        )
        return together, np.add.reduceat(held, starts, axis=1)

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
            every = np.array((self._bytes[self._number[view.ladder.cheapest]], np.ones(groups)))
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
        with_rest = self._rest_factors

        def divided(prices: list[tuple[float, Array]]) -> Divisions:
            link = np.concatenate([price * shares for price, shares in prices])
            decoding = np.concatenate([price * (1.0 - shares) for price, shares in prices])
            picked = self._pick(view, work.rate, link, decoding, fixed.options)
            sums = work.brought(np.array((picked.work, picked.bytes, picked.loss)))
            if with_rest is not None:
                used = np.flatnonzero(np.bincount(picked.tracks.ravel()))
                on = picked.tracks[:, None] == used[:, None]
                parts = work.brought(np.array((on * picked.loss[:, None], on * fixed.counts)))
                sums[2] = (parts * with_rest[:, None, used][..., stops]).sum(axis=0).sum(axis=1)
            works, nbytes, lost = sums
            network_s = work.network_s(works, nbytes, flying, queue_s)
            network_s *= work.lacking | (nbytes + requests > 0) | (view.decode_backlog_s > 0)
            return work.least(lost, np.maximum(network_s, ready_s), begun)

        prices = [(view.time_price, _LINK_SHARES)]
        prices += [(level * max(view.time_price, _MIN_TIME_PRICE), _FEW_SHARES) for level in self._finer(view)]
        found = divided(prices)
        if (found.late & (engine_s <= view.time_left)).any():  # at a higher time price the network may be in time
            least = max(view.time_price, _MIN_TIME_PRICE)
            found = better(divided([(level * least, _FEW_SHARES) for level in _DEADLINE_LEVELS]), found)
        return found


@cache
def _prices(finer: tuple[float, ...]) -> tuple[Array, Array]:
    """Return the link's fraction of each time price to try, and the price as a multiple of the usual one."""
    levels = (*_DEADLINE_LEVELS, *finer)
    share = np.append(_LINK_SHARES, np.tile(_FEW_SHARES, len(levels)))
    return share, np.append(np.ones(len(_LINK_SHARES)), np.repeat(levels, len(_FEW_SHARES)))


def _rounded(values: Array, factor: float) -> Array:
    """Return positive values on a logarithmic scale, rounded down to steps of a factor."""
    return np.floor(np.log(values) / math.log(factor))
