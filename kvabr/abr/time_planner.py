"""Which track each group should get if time has a price: the cheapest in two resources, the link and the decoders.

A plan minimises loss + time price x T + the price of the bytes, where T is when the link or the decoders will be done,
whichever is later. Each resource gets a share of the price of time, and each group the track that is cheapest at these
prices. The shares of the best plan are what a byte and a second of decoding cost: all the link's where decoding keeps
up, all the decoders' on a link so fast that they do not. A group's options are every track above the one that it has;
layers count once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvabr.abr.belief import Belief
from kvabr.abr.shared_work import Divisions, SharedWork, better, excess, with_mixtures
from kvabr.abr.view import Transfer, View
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.loss import factors_behind, inherited_behind

Array = npt.NDArray[np.float64]

_LINK_SHARES: Array = np.array([1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0])
"""Shares of the price of time that the link gets; the decoders get the rest."""
_FREE_LEVELS = (0.25, 0.0)
"""Shares of the price of time that link and decoders get together, if the engine may take longer."""
_ENGINE_LEVELS, _DEADLINE_LEVELS = (0.2,), (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1e9)
"""Prices of time that are tried to divide work, as multiples of the real one, if the engine may take longer, and if the
deadline comes sooner."""
_FINER_LEVELS = (0.1, 0.01, 1e-3, 0.0)
"""Prices of time, alike, if a cache may lose only so much."""
_FEW_SHARES: Array = np.array([1.0, 0.6, 0.3, 0.0])
_TWO_SHARES: Array = np.array([1.0, 0.4])
_LEAST_PRICE = 1e-4
"""What these are multiples of at least, nats per second."""
_WASTE = 6.0
"""Price of a byte that is replaced, as a multiple of that of a byte to request: others could have used it."""
MAX_PARTS = 128
"""Parts of a long prompt that get a track each where work is divided, and places at which an engine may stop."""
_LATE = 1e3
"""Price of a second after the deadline, nats per token: what ends in time is preferred."""
_ALIKE = 16.0
"""Factor within which upgrades save alike."""
_FREE = 1e-18
"""Price that is as good as none, nats."""
NEVER = 1e9
"""Loss of an option that is not to be had, nats."""


class TimePlan(NamedTuple):
    """What every group should get, and what comes of it."""

    targets: list[int]
    """Number of each group's track in the catalog."""
    objective: float
    """Loss plus priced time from now, nats per generated token."""
    idle_objective: float
    """The same if nothing more is requested; infinite if groups are missing."""
    bytes: float
    """Bytes to request."""
    ends_s: float
    """Seconds until everything is decoded."""
    byte_price: float
    """Nats per byte."""
    decode_price: float
    """Nats per second of decoding."""
    second_price: float
    """Nats per second of the play, so that both are in time."""


class _Options(NamedTuple):
    """What can be chosen for each group, all by track and group."""

    loss: Array
    bytes: Array
    work: Array
    """Seconds that a thread takes to decode it, less those that it spares."""
    waste: Array
    """Bytes that an option makes useless."""


class _Picked(NamedTuple):
    """What groups get at several prices; all by price and group."""

    tracks: npt.NDArray[np.intp]
    bytes: Array
    work: Array
    """Seconds of decoding, with all decoders."""
    loss: Array


class TimePlanner:
    """Plans one play. The play tells it of every change to a group."""

    def __init__(self, view: View) -> None:
        """Begin with every group missing."""
        catalog = view.catalog
        tracks, groups = catalog.tracks, catalog.groups
        self.names = [track.name for track in tracks]
        self._number = {name: number for number, name in enumerate(self.names)}
        self.losses: Array = np.array([track.loss for track in tracks], dtype=float)
        """Loss by track and group."""
        self._share: Array = np.array(catalog.shares)
        shape = (len(tracks), groups)
        states: list[str | None] = [*self.names, None]
        self._steps: Array = np.zeros((len(states), *shape))
        """Bytes from a state (the last one: nothing) to a track, by state, track and group."""
        self._discards: Array = np.zeros((len(states), *shape))
        """Bytes that a step makes useless, alike."""
        self._stacks = {name: frozenset(view.ladder.stacks[name]) for name in self.names}
        """Each track with the layers below it."""
        self._offers: Array = np.full((len(states), *shape), NEVER)
        """Loss of what can be had from a state, alike."""
        self._weigh(view, states)
        self._bytes: Array = self._steps[-1].copy()
        self._loss: Array = self._offers[-1].copy()
        """Loss of what can be requested once what is in flight has arrived, by track and group."""
        self._waste: Array = np.zeros(shape)
        self._moves: Array = np.ones(shape)
        """1.0 where an option must be decoded."""
        self._missing = np.ones(groups, bool)
        self._known: list[tuple[str | None, bool]] = [(None, False)] * groups
        self._changed: set[int] = set(range(groups))
        """Groups to look at again, besides those in `View.changes` from `_read` on."""
        self._read = self._ruled_out = 0
        """How many entries of that have been read; and how many were unavailable."""
        self._whole = float(self._steps[-1].sum(axis=1).max())
        """Bytes of the largest track, with the layers below it."""
        self._stay: Array = np.full(groups, NEVER)
        """Loss of each group if nothing more is requested for it."""
        self._lost, self._unplayed = 0.0, groups
        """Sum of these, without those of groups that would be missing; and how many these are."""
        self._state = np.zeros(groups, int) - 1
        """Track of each group that is in place or in flight, or -1."""
        self._cut: int | None = None
        """See `cut_at`."""
        self._flying = np.zeros(groups, int) - 1
        """Track that is in flight for each group, or -1."""
        self._added = 0
        """See `View.added`."""
        self._left_out = frozenset(catalog.computed)
        """Groups that no asset has: they are the engine's from the beginning."""
        self._behind, self._on_base = self._behind_engine(view)

    def _behind_engine(self, view: View) -> tuple[Array | None, Array | None]:
        """Return what is lost if an engine that needs the first groups computes all behind them.

        What each of the first loses then: over what it loses otherwise, and besides that, by track. And what the others
        inherit if the engine begins on the base, in the middle of a play. None: no such engine.
        """
        if not view.front_first or view.cost is None:
            return None, None
        behind: Array = np.array([factors_behind(view.catalog, name) for name in self.names]).swapaxes(0, 1)
        return behind, None if view.prefix else inherited_behind(view.catalog, view.ladder.cheapest)

    def _weigh(self, view: View, states: list[str | None]) -> None:
        """Work out what each step costs and brings."""
        tracks, groups = view.catalog.tracks, view.catalog.groups
        sizes = {track.name: np.array(track.bytes) for track in tracks}
        for state, current in enumerate(states):
            for number, track in enumerate(tracks):
                self._steps[state, number] = sum(sizes[layer] for layer in view.layers(track.name, current))
                better = np.ones(groups, bool) if current is None else self.losses[number] < self.losses[state]
                self._offers[state, number] = np.where(better, self.losses[number], NEVER)
            if current is not None:
                self._steps[state, state] = 0.0
                for number, track in enumerate(tracks):
                    if current not in view.ladder.stacks[track.name]:
                        self._discards[state, number] = sum(sizes[layer] for layer in view.ladder.stacks[current])
                self._offers[state, state] = self.losses[state]

    def set(self, group: int, track: str | None, *, flying: bool = False, computed: bool = False) -> None:
        """Note that a group now has a track, or will have once what is in flight arrives; None: it is missing."""
        self._missing[group] = track is None and not computed
        self._flying[group] = self._state[group] = -1
        if computed or track is None or track not in self._number:
            self._bytes[:, group], self._loss[:, group] = self._steps[-1, :, group], self._offers[-1, :, group]
            self._moves[:, group], self._waste[:, group] = 1.0, 0.0
            if computed or track is not None:  # the engine has it: nothing to fetch, whatever is chosen
                self._bytes[:, group] = self._loss[:, group] = self._moves[:, group] = 0.0
            self._stays_at(group, 0.0 if computed or track is not None else NEVER)
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
        """Take what every group has now."""
        settled = view.settled
        if self._added != view.added:  # what could not be had may be there now
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
        """Note that a group was requested on a track. If that fails, `sync` sees that it has something else."""
        self._known[group] = (track, False)
        self._changed.add(group)
        self.set(group, track, flying=True)

    def _stays_at(self, group: int, loss: float) -> None:
        """Note what a group loses if nothing more is requested for it."""
        for value, sign in ((float(self._stay[group]), -1), (loss, 1)):
            if value < NEVER:
                self._lost += sign * value
            else:
                self._unplayed += sign
        self._stay[group] = loss

    def cut_at(self, group: int | None) -> None:
        """Note from which group on an engine is to compute the rest: it brings out the errors right in front of it.

        None: no engine that needs what is in front.
        """
        self._cut = group if self._behind is not None else None

    def lost(self) -> float:
        """Return the loss if nothing more is requested, nats per generated token."""
        if self._cut is None:
            return self._lost + self._unplayed * NEVER
        return float(self._staying()[: self._cut].sum())

    def _lost_behind(self, loss: Array, tracks: list[int] | npt.NDArray[np.intp] | slice) -> Array:
        """Return what is lost on some tracks if the engine computes the rest: one loss for each, or a row."""
        if self._behind is None or self._cut is None:
            return loss
        factor, even = self._behind[:, tracks, self._cut]
        if loss.ndim > factor.ndim:
            factor, even = factor[:, None], even[:, None]
        behind: Array = factor * loss + even
        return np.where(loss < NEVER, behind, loss)

    def _staying(self) -> Array:
        """Return the loss of each group if nothing more is requested for it, as it is with what is computed behind."""
        if self._cut is None:
            return self._stay
        return np.where(self._state < 0, self._stay, self._lost_behind(self._stay, self._state))

    def rank(
        self, view: View, plan: TimePlan, belief: Belief, computed: range, *, sure: bool
    ) -> list[tuple[float, int, int]]:
        """Return the upgrades that are worth their price, the first to request last: saving per price, group and track.

        Args:
            view: the play.
            plan: what every group should get in the end.
            belief: rates with which what is requested now may come.
            computed: groups that are left to the engine.
            sure: the whole plan will be carried out.
        """
        base = self._number[view.ladder.cheapest]
        here, coming = self._flying < 0, self._flying == base
        coming &= plan.second_price > view.time_price  # where time is short, layers follow a base that is in flight
        groups = np.flatnonzero((self._stay < NEVER) & (self._state >= 0) & (here | coming))
        groups = groups[(groups < computed.start) | (groups >= computed.stop)] if computed else groups
        if not groups.size:
            return []
        loss = self._lost_behind(self._loss, slice(None))[:, groups]
        saving = np.maximum(0.0, self._staying()[groups] - loss) * (self._moves[:, groups] > 0)
        decode = self._work(view, self._moves)[:, groups]
        nbytes = np.maximum(1.0, self._bytes[:, groups])
        price = max(plan.byte_price, _FREE)
        discard = max(_WASTE * price, plan.second_price * view.deadline_s / self._whole)
        cost = price * nbytes + discard * self._waste[:, groups] + plan.decode_price * decode + _FREE
        columns, left_s = np.arange(groups.size), self._left_s(view)
        if self.lost() > view.max_loss:
            left_s = math.inf  # what loses too much is not delivered at the deadline either
        comes = np.zeros(nbytes.shape)
        for one, weight in zip(belief.rates, belief.weights, strict=True):
            begins_s = max(view.ttfb_s, view.outstanding_bytes / one)
            decoded_s = 0.0 if view.decodes_last else decode
            comes += weight * (begins_s + nbytes / one + decoded_s <= left_s)
        worth = comes * saving / np.maximum(cost, price * nbytes)
        net = comes * saving - cost
        picks, least = net.argmax(axis=0), 1.0
        if not view.growing:
            # Where the deadline leaves time for some groups only, those get what saves most per price.
            picks = np.where(net.max(axis=0) > 0.0, picks, worth.argmax(axis=0))
            least = min(1.0, view.time_price / max(plan.second_price, _FREE))
        apart = np.array([view.ladder.cheapest not in self._stacks[name] for name in self.names])
        gains = np.where(apart[picks] & coming[groups], 0.0, worth[picks, columns])
        worthy = np.flatnonzero(gains > max(_FREE, least))
        # Gains within a factor of `_ALIKE` count alike. Of those, tracks that take longer to decode than to arrive go
        # first, so that the decoders have work until the end.
        level = np.floor(np.log(gains[worthy]) / math.log(_ALIKE)) * (not sure)
        spare = nbytes[picks, columns][worthy] / max(view.rate, _FREE) - decode[picks, columns][worthy] / view.decoders
        order = np.lexsort((-gains[worthy], np.minimum(0.0, spare), -level))[::-1]
        return [(float(gains[column]), int(groups[column]), int(picks[column])) for column in worthy[order]]

    @staticmethod
    def _finer(view: View) -> tuple[float, ...]:
        """Return the prices of time to try, as multiples of the real one, if the cache may lose only so much."""
        return _FINER_LEVELS if math.isfinite(view.max_loss) else ()

    @staticmethod
    def _left_s(view: View) -> float:
        """Return the seconds in which an upgrade must arrive: to the deadline, or until the last group is published."""
        if view.time_left <= 0 and math.isfinite(view.max_loss):
            return math.inf  # a cache that loses too much is not delivered
        return min(view.time_left, view.ends_s - view.now) if view.coming else view.time_left

    def next_best(self, view: View) -> tuple[int, str, float, float] | None:
        """Return the upgrade that pays best: its group and track, what it saves and what it costs, in nats.

        None if nothing can be improved.
        """
        loss = self._lost_behind(self._loss, slice(None))
        savings = np.where(self._moves > 0.0, self._staying() - loss, -NEVER)
        if self._cut is not None:
            savings[:, self._cut :] = -NEVER
        decode: Array = np.array([view.decode_s(name) for name in self.names])
        seconds = view.ttfb_s + self._bytes / view.rate + decode[:, None] * self._share
        prices = view.time_price * seconds
        gains = savings - prices
        track, group = np.unravel_index(int(gains.argmax()), gains.shape)
        saving = float(savings[track, group])
        if saving <= 0:
            return None
        return int(group), self.names[track], saving, float(prices[track, group])

    def without(self, group: int, track: str) -> None:
        """Note that a group cannot be had on a track, nor on what builds on it, unless it is there already."""
        if track in self._stacks.get(self._known[group][0] or "", ()):
            return
        for number, name in enumerate(self.names):
            if track in self._stacks[name] and self._moves[number, group]:
                self._loss[number, group] = NEVER

    def plan(self, view: View, rate: float, computed: range = range(0), computed_s: float = 0.0) -> TimePlan:
        """Return the best plan at a rate.

        Args:
            view: the play.
            rate: of the link, bytes per second.
            computed: groups that the engine is to compute: nothing is planned for them.
            computed_s: seconds until it is done with what it does and with these. Until then network and decoders are
                for nothing else, so what ends sooner costs no time.
        """
        price = max(view.time_price, _LEAST_PRICE)
        share, level = _LINK_SHARES, np.ones(len(_LINK_SHARES))
        for more in _DEADLINE_LEVELS:
            share, level = np.append(share, _TWO_SHARES), np.append(level, np.full(len(_TWO_SHARES), more))
        for free in (*(_FREE_LEVELS if computed_s > 0 else ()), *self._finer(view)):
            share, level = np.append(share, _FEW_SHARES), np.append(level, np.full(len(_FEW_SHARES), free))
        loss = self._lost_behind(self._loss, slice(None))
        now = _Options(loss, self._bytes, self._work(view, self._moves), self._waste)
        picked = self._pick(view, rate, price * level * share, price * level * (1.0 - share), now)
        outside = np.ones(len(self._missing))
        outside[computed.start : computed.stop] = 0.0
        nbytes = picked.bytes @ outside
        works = picked.work * outside
        wait_s = (nbytes > 0) * max(0.0, view.ttfb_s - view.outstanding_bytes / rate)
        arrives_s = (view.outstanding_bytes + nbytes) / rate + wait_s
        # What comes last is decoded after it has come, in a batch at least.
        batch_s = max(map(view.decode_latency_s, self.names))
        worked_s = works.sum(axis=1)
        last_s = arrives_s + (worked_s if view.decodes_last else works.max(axis=1))
        ends_s = np.maximum(last_s, np.maximum(wait_s, self._queued_s(view)) + worked_s) + batch_s
        lost = picked.loss @ outside
        totals = lost + view.time_price * np.maximum(ends_s, computed_s) + excess(lost, view)
        left_s = self._left_s(view)
        late_s = np.maximum(0.0, ends_s - left_s)
        # A higher price of time is for what would be late otherwise.
        usual = np.append(late_s[level <= 1.0], np.inf).min() <= 0.0
        best = int((totals + _LATE * late_s + np.where(usual & (level > 1.0), NEVER, 0.0)).argmin())
        idle = np.inf
        if not (self._missing * outside).any():
            staying = float(self._staying() @ outside)
            idle = (
                staying
                + float(excess(staying, view))
                + view.time_price
                * max(view.outstanding_bytes / rate, view.decode_backlog_s + self._flying_s(view), computed_s)
            )
        paid = price * float(level[best])
        return TimePlan(
            picked.tracks[best].tolist(), float(totals[best]), float(idle), float(nbytes[best]), float(ends_s[best]),
            paid * float(share[best]) / rate, paid * (1.0 - float(share[best])) / view.decoders, paid,
        )  # fmt: skip

    def _later_options(self, view: View) -> _Options:
        """Return what can be chosen once what is in flight has arrived, and upgrades in flight may also be dropped."""
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
        """Return the cheapest track of each group at several prices of a second of link and decoders."""
        work = options.work / view.decoders
        discard = (link + decoding)[:, None, None] * view.deadline_s / self._whole
        link = link[:, None, None] / rate
        cost = (
            options.loss
            + link * options.bytes
            + np.maximum(_WASTE * link, discard) * options.waste
            + decoding[:, None, None] * work
        )
        picks = cost.argmin(axis=1)
        groups = np.arange(picks.shape[1])
        return _Picked(picks, options.bytes[picks, groups], work[picks, groups], options.loss[picks, groups])

    def _work(self, view: View, moves: Array) -> Array:
        """Return the seconds to decode each option, less those of what it replaces before that is decoded."""
        decode: Array = np.array([view.decode_s(name) for name in self.names])
        waiting = np.where(self._flying >= 0, decode[self._flying], 0.0)
        for group in view.undecoded:
            if (state := self._state[group]) >= 0:
                waiting[group] = decode[state]
        work: Array = (decode[:, None] - waiting) * self._share * moves
        return work

    def _flying_s(self, view: View) -> float:
        """Return the seconds that decoding what is in flight takes."""
        flying = self._flying[self._flying >= 0]
        if not flying.size:
            return 0.0
        decode: Array = np.array([view.decode_s(name) for name in self.names])
        spared = sum(bool(self._flying[group] >= 0) for group in view.undecoded) * view.decode_s(view.ladder.cheapest)
        return max(0.0, float(decode[flying].sum()) - spared) / view.decoders

    def _queued_s(self, view: View) -> float:
        return view.decode_backlog_s + self._flying_s(view)

    def _parts(self, view: View, starts: npt.NDArray[np.intp]) -> tuple[_Options, Array]:
        """Return what can be chosen for the parts of a prompt that begin at some groups, and what is in flight of them.

        The second array has bytes and requests, by part.
        """
        options, held = self._later_options(view), np.zeros((2, len(self._missing)))
        for transfer in view.in_flight.required.values():
            held[:, transfer.group] += transfer.remaining, 1
        if len(starts) == len(self._missing):
            return options, held
        # Of groups that are taken together some may have better tracks already, and keep them.
        stay = (options.loss >= NEVER) & (self._stay < NEVER)
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
        """Return the seconds until what the network is to bring is published, by stop."""
        if not view.coming or view.ready_s is None:
            return np.zeros(len(stops))
        last = stops if view.front_first else np.where(stops < view.groups, view.groups, 0)
        ready = np.array([view.ready_s(int(stop) - 1) if stop > view.edge else view.now for stop in last])
        found: Array = ready - view.now + (ready > view.now) * view.ttfb_s / 2
        return found

    def divide(
        self,
        view: View,
        rate: float,
        first: int,
        stops: npt.NDArray[np.intp],
        engine_s: Array,
        inherited: Array,
        *,
        ramp: tuple[float, float] | None = None,
    ) -> Divisions:
        """Return what each division of the work between network and engine comes to, all at once.

        An engine that fills holes computes groups ``first`` to a stop while the network brings the others. One that
        needs a prefix computes what is behind a stop once the network has brought what is before it.

        Args:
            view: the play.
            rate: of the link, bytes per second.
            first: the group at which the engine goes on.
            stops: where the engine stops, or the network does, ascending.
            engine_s: seconds until the engine is done, by stop.
            inherited: loss of what the engine computes, by stop.
            ramp: in slow start, the rate that the link begins with, and the seconds in which that doubles.
        """
        groups = len(self._missing)
        edges, apart = np.arange(groups + 1), groups // MAX_PARTS
        if apart > 1:
            edges = np.union1d(np.append(stops, first), edges[:groups:apart])
        options, held = self._parts(view, starts := edges[edges < groups])
        work = SharedWork(view, rate, ramp, stops, engine_s, inherited, np.searchsorted(edges, [first, *stops]))
        flying, requests = work.brought(held)
        queue_s = view.decode_backlog_s + (requests > 0) * self._flying_s(view)
        ready_s, begun = self._ready_s(view, stops), None
        if self._on_base is not None:
            base = view.ladder.cheapest
            lacks = np.where(self._missing, np.array((self._bytes[self._number[base]], np.ones(groups))), 0.0)
            nbytes, bases = work.brought(np.add.reduceat(lacks, starts, axis=1))
            decode_s = view.decode_s(base) / view.decoders
            here_s = work.carried_s(nbytes + flying) + work.lacking * work.first_s
            decoded_s = np.maximum(work.first_s - decode_s, queue_s) + bases * decode_s
            here_s = np.maximum(here_s, work.lacking * decoded_s)
            begun = np.maximum(here_s, ready_s), self._on_base[stops]
        behind, counts = self._behind, np.diff(np.append(starts, groups))

        def divided(prices: list[tuple[float, Array]]) -> Divisions:
            """Return the best divisions with what groups get at some prices of time and shares of the link in them."""
            link = np.concatenate([price * shares for price, shares in prices])
            decoding = np.concatenate([price * (1.0 - shares) for price, shares in prices])
            picked = self._pick(view, rate, link, decoding, options)
            sums = work.brought(np.array((picked.work, picked.bytes, picked.loss)))
            if behind is not None:
                used = np.flatnonzero(np.bincount(picked.tracks.ravel()))
                on = picked.tracks[:, None] == used[:, None]
                parts = work.brought(np.array((on * picked.loss[:, None], on * counts)))
                sums[2] = (parts * behind[:, None, used][..., stops]).sum(axis=0).sum(axis=1)
            if not view.decodes_last:
                ahead_s = queue_s + sums[0] - work.carried_s(sums[1] + flying)
                sums = with_mixtures(sums, ahead_s, np.flatnonzero(decoding[1:] > decoding[:-1]))
            works, nbytes, lost = sums
            network_s = work.network_s(works, nbytes, flying, queue_s)
            network_s *= work.lacking | (nbytes + requests > 0) | (view.decode_backlog_s > 0)
            return work.least(lost, np.maximum(network_s, ready_s), begun)

        prices = [(view.time_price, _FEW_SHARES)]
        prices += [(level * max(view.time_price, _LEAST_PRICE), _TWO_SHARES) for level in self._finer(view)]
        if not view.front_first:  # where the engine takes longer, the network's time is worth less
            prices += [(level * view.time_price, _FEW_SHARES) for level in _ENGINE_LEVELS]
        found = divided(prices)
        if (found.late & (engine_s <= view.time_left)).any():  # at a higher price of time the network may be in time
            least = max(view.time_price, _LEAST_PRICE)
            found = better(divided([(level * least, _TWO_SHARES) for level in _DEADLINE_LEVELS]), found)
        return found
