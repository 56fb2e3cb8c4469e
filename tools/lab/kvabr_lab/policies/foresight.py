"""The plan of ``oracle``: the lowest objective found with knowledge of the whole link.

Every group has one option of the `Frontier`, or the engine computes it. Each pair of prices, of a byte and of a second
of decoding, gives a plan: every group's cheapest option at these prices. A plan's end follows from the link's capacity
and the decoders' queue, with requests in the order of Johnson's rule for two machines in series. The best plan is
improved until no change of a single group helps.

The model ignores early decoding of layers on slow links, and losses that computed groups inherit. So several plans are
simulated, with spare time for decoding, and with each kind of engine use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from kvabr.abr.view import PlannedPlay, View
from kvabr.replay.frontier import Array, Frontier
from kvabr.replay.link import Capacity
from kvabr.types.cost import MISS_PENALTY

Picks = npt.NDArray[np.intp]
"""Indices of options, [plan, group] or [group]."""

_BYTE_PRICES, _DECODE_STRIDE = 48, 64
"""Number of byte prices, and stride over the frontier's decode prices."""
_COARSE_STRIDE = 3
"""Stride over decode prices for comparing divisions between network and engine."""
_MAX_DIVISIONS = 33
_MAX_EXHAUSTIVE = 4096
"""Maximum number of plans to compare exhaustively."""
_MAX_MOVES, _MAX_ROUNDS = 1024, 64
"""Maximum changes per round of improvement, and maximum rounds. If more changes are possible, a single group is too
small to matter.
"""
_SPARES = (0.0, 1.0, 3.0)
"""Spare times before the deadline to try, in multiples of the slowest decoding."""
_HORIZON_DEADLINES = 10.0
"""Number of deadlines after which the link is no longer considered."""
_NOTHING = range(0)
_NEVER_S = 1e9
"""Arrival time of later bytes, plus a second for each byte."""


class Foresight:
    """The link and decoders of a play, and the best plan for them."""

    def __init__(
        self,
        view: View,
        frontier: Frontier,
        capacity: Capacity,
        first_byte_s: float,
        tried: Callable[[PlannedPlay], float],
    ) -> None:
        """Prepare for one play.

        Args:
            view: View of the play before it begins.
            frontier: Its catalog's options.
            capacity: The link from the play's beginning.
            first_byte_s: Time to the first byte of a request.
            tried: Returns a plan's objective in a simulated play.
        """
        self.view, self.frontier, self._tried = view, frontier, tried
        self.names = [track.name for track in view.catalog.tracks]
        least = float(frontier.least_bytes.sum())
        needed_s = min(_HORIZON_DEADLINES * view.deadline_s, 2.0 * capacity.when(first_byte_s, least))
        self._times, carried = capacity.points(max(view.deadline_s, needed_s))
        self._carried: Array = carried - np.interp(first_byte_s, self._times, carried)
        self._first_byte_s = first_byte_s
        self._rate = max(1.0, float(carried[-1] / self._times[-1]))
        steps = view.ladder.layered_steps
        worths = np.geomspace(2.0 * steps[0].worth, 0.5 * steps[-1].worth, _BYTE_PRICES) if steps else np.zeros(0)
        # With the first price, the cheapest cache is selected, in case nothing else arrives in time.
        self.byte_prices: Array = np.concatenate([1e6 * worths[:1] + 1.0, worths, [0.0]])
        second = view.time_price / view.decoders
        self.decode_prices: Array = np.unique([*frontier.prices[::_DECODE_STRIDE], second / 4, second / 2, second])

    def best(self) -> PlannedPlay:
        """Return the best plan found."""
        deadline_s = self.view.deadline_s
        bytes_, decodes = self.byte_prices[::_COARSE_STRIDE], self.decode_prices[::_COARSE_STRIDE]
        kinds: dict[str, tuple[float, _Division]] = {}
        for division in self._divisions():
            value = float(division.values(division.priced(bytes_, decodes), deadline_s).min())
            if division.kind not in kinds or value < kinds[division.kind][0]:
                kinds[division.kind] = value, division
        spare_s = float(self.frontier.decodes.max())
        plans: dict[PlannedPlay, None] = {}
        for _, division in kinds.values():
            for spare in _SPARES:
                plan, ends_s = division.best(deadline_s - spare * spare_s)
                plans[plan] = None
                if ends_s <= deadline_s - _SPARES[-1] * spare_s:
                    break  # there is enough time without spare time
        return min(plans, key=self._tried) if len(plans) > 1 else next(iter(plans))

    def schedule(self, sizes: Array, decodes: Array, before: float = 0.0) -> tuple[Picks, Array]:
        """Return the request order of several plans, and when each plan is decoded, in seconds.

        ``sizes`` (bytes) and ``decodes`` (seconds) are [plan, request]; ``before`` is bytes requested earlier.
        """
        decoders = self.view.decoders
        link, work = sizes / self._rate, decodes / decoders
        order = np.where(link < work, link, 1e9 - work).argsort(axis=1, kind="stable")
        sizes, work = np.take_along_axis(sizes, order, axis=1), np.take_along_axis(work, order, axis=1)
        nbytes, done = before + sizes.cumsum(axis=1), work.cumsum(axis=1)
        arrives = np.maximum(self._first_byte_s, np.interp(nbytes, self._carried, self._times))
        arrives = np.where(nbytes > self._carried[-1], _NEVER_S + nbytes, arrives)
        # The last group uses one decoder while the others are idle.
        ends = (arrives - done + work).max(axis=1) + done[:, -1] + (decoders - 1) * work.max(axis=1)
        return order, ends

    def _divisions(self) -> Iterator[_Division]:
        """Yield divisions of the groups between network and engine; the first uses only the network."""
        view, cost = self.view, self.view.cost
        yield _Division(self, range(view.groups))
        if cost is None:
            return
        size, catalog = view.catalog.spec.group_tokens, view.catalog
        tokens = catalog.tokens
        for count in sorted({*np.linspace(1, view.groups, min(view.groups, _MAX_DIVISIONS)).astype(int).tolist()}):
            if not view.front_first:
                whole_s = cost.seconds(0, min(count * size, tokens))
                alone_s = sum(cost.seconds(one * size, view.catalog.group_tokens(one)) for one in range(count))
                # The engine computes one group at a time while there is time.
                engine_s = alone_s if alone_s <= view.deadline_s else whole_s
                yield _Division(self, range(count, view.groups), range(count), engine_s, "beside")
                continue
            cut = catalog.cut(view.groups - count)
            for kind in ("after the base", "after all") if cut else ("beside",):
                engine_s = cost.seconds(catalog.tokens_before(cut), tokens - catalog.tokens_before(cut))
                yield _Division(self, range(cut), range(cut, view.groups), engine_s, kind)

    def tables(self, groups: range) -> tuple[Array, Array, Array]:
        """Return bytes, decode seconds and loss of the groups' options, each as [group, option]."""
        rows, frontier = slice(groups.start, groups.stop), self.frontier
        return frontier.sizes[rows], frontier.decodes[rows], frontier.losses[rows]


class _Division:
    def __init__(
        self, known: Foresight, groups: range, engine: range = _NOTHING, engine_s: float = 0.0, kind: str = "alone"
    ) -> None:
        """Prepare the options.

        ``kind`` is ``alone`` without an engine; ``beside``: engine and network in parallel; ``after the base``: the
        engine starts after the base of every group, before better tracks; or ``after all``.
        """
        self.kind, self._known, self._groups = kind, known, groups
        self._engine, self._engine_s = engine, engine_s
        self._sizes, self._decodes, self._losses = known.tables(groups)
        self._begins_s, self._before = 0.0, 0.0
        self._base: list[int] = []
        if kind == "after the base":
            cheapest, stacks = known.view.ladder.cheapest, known.view.ladder.stacks
            base = known.names.index(cheapest)
            sizes, decodes = self._sizes[:, base], self._decodes[:, base]
            order, ends = known.schedule(sizes[None], decodes[None])
            self._base, self._begins_s, self._before = order[0].tolist(), float(ends[0]), float(sizes.sum())
            built_on_it = np.array([cheapest in stacks[name] for name in known.names], float)
            self._sizes, self._decodes = self._sizes - np.outer(sizes, built_on_it), self._decodes.copy()
            self._decodes[:, base] = 0.0

    def priced(self, byte_prices: Array, decode_prices: Array) -> Picks:
        found = [
            (self._losses + price * self._decodes + byte_prices[:, None, None] * self._sizes).argmin(axis=2)
            for price in decode_prices
        ]
        return np.concatenate(found)

    def values(self, picks: Picks, deadline_s: float) -> Array:
        """Return the objective of several plans; a plan that ends after ``deadline_s`` misses the deadline."""
        view, ends = self._known.view, self._ends(picks)
        missed = MISS_PENALTY + np.maximum(0.0, ends - view.deadline_s) / view.deadline_s
        engine = view.gpu_price * self._engine_s if math.isfinite(view.gpu_price) else 0.0
        loss = self._losses[np.arange(picks.shape[1]), picks].sum(axis=1)
        values: Array = loss + view.time_price * ends + engine + np.where(ends > deadline_s, missed, 0.0)
        return values

    def _ends(self, picks: Picks) -> Array:
        ends: Array = np.zeros(len(picks))
        if picks.shape[1]:
            rows = np.arange(picks.shape[1])
            _, ends = self._known.schedule(self._sizes[rows, picks], self._decodes[rows, picks], self._before)
        begins_s = ends if self.kind == "after all" else self._begins_s
        later: Array = np.maximum(ends, begins_s + self._engine_s)
        return later

    def best(self, deadline_s: float) -> tuple[PlannedPlay, float]:
        groups, options = self._sizes.shape
        if options**groups <= _MAX_EXHAUSTIVE:
            picks = np.array([*product(range(options), repeat=groups)], dtype=np.intp).reshape(options**groups, groups)
        else:
            picks = self._near_best(deadline_s)
        values = self.values(picks, deadline_s)
        best = int(values.argmin())
        found, value = picks[best], float(values[best])
        group, option = np.divmod(np.arange(groups * options), options)
        for _ in range(_MAX_ROUNDS if 0 < len(group) <= _MAX_MOVES else 0):
            changed = np.repeat(found[None], len(group), axis=0)
            changed[np.arange(len(group)), group] = option
            values = self.values(changed, deadline_s)
            best = int(values.argmin())
            if not values[best] < value:
                break
            found, value = changed[best], float(values[best])
        return self._plan(found), float(self._ends(found[None])[0])

    def _near_best(self, deadline_s: float) -> Picks:
        """Return the best plan over all prices, and plans between it and its neighbours: prices affect many groups."""
        byte_prices, decode_prices = self._known.byte_prices, self._known.decode_prices
        picks = self.priced(byte_prices, decode_prices)
        best = int(self.values(picks, deadline_s).argmin())
        first = best - best % len(byte_prices)
        column = picks[first : first + len(byte_prices)]
        new = np.concatenate([[True], (column[1:] != column[:-1]).any(axis=1)])
        place = int(new[: best - first + 1].sum()) - 1
        near = column[new][max(0, place - 1) : place + 2]
        return np.concatenate([near, *(self._way(*pair) for pair in pairwise(near))])

    def _way(self, start: Picks, end: Picks) -> Picks:
        """Return the plans between two plans; each changes one more group, in order of saving per byte."""
        groups = np.nonzero(start != end)[0]
        more, saved = (
            sign * (table[groups, end[groups]] - table[groups, start[groups]])
            for sign, table in ((1.0, self._sizes), (-1.0, self._losses))
        )
        found = np.repeat(start[None], len(groups), axis=0)
        for number, group in enumerate(groups[np.argsort(-saved / np.maximum(more, 1.0), kind="stable")]):
            found[number:, group] = end[group]
        return found

    def _plan(self, picks: Picks) -> PlannedPlay:
        first, known, rows = self._groups.start, self._known, np.arange(len(picks))
        base = [(first + group, known.view.ladder.cheapest) for group in self._base]
        requests: list[tuple[int, str]] = []
        if len(picks):
            sizes, decodes = self._sizes[rows, picks], self._decodes[rows, picks]
            order, _ = known.schedule(sizes[None], decodes[None], self._before)
            requests = [(first + group, known.names[picks[group]]) for group in order[0].tolist()]
        return PlannedPlay((*base, *(one for one in requests if one not in base)), self._engine)
