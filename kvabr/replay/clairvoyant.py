"""The clairvoyant bound: the lowest objective of any schedule that knows the whole trace.

For a fixed end T of the play, the order of transfers does not matter. The best cache is the solution of a
multiple-choice knapsack, with one option per group and two resources (`frontier`):

- Bytes: those that the link carries until T less the decode time of the last transfer (the option that decodes fastest
  among those that the link could carry instead of a cheaper option).
- Decoding time on n decoders; a group's layers are decoded together. The C(t) bytes received by time t need at most r
  C(t) seconds of decoding, where r is the largest ratio of seconds to bytes of any option. After t, n (T - t) decoder
  seconds remain. Total decoding is therefore at most the minimum over t of r C(t) + n (T - t).

The bound is the linear relaxation of the knapsack. T itself is free: over an interval of ends, the objective is at
least the loss at its end plus the price of time at its start. The interval with the lowest such value is subdivided
until it is close to the best end found; this value is the bound.

An engine that recomputes reduces the network's part:

- ``suffix``: for every cut, the tail is computed after the groups before the cut have arrived, at least on the cheapest
  tracks; better tracks may arrive until T.
- ``hole``: k groups are computed while the network loads the others. Either these are the first k groups, computed from
  the start. Or they include groups that follow a group from the network; these can be computed only once that group is
  in place. The last group, which may be short, waits for all others. The bound removes the k groups that are most
  expensive for the network, but counts the engine time of the k cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvabr.replay.frontier import WHOLE, Array, Frontier, GroupSubset
from kvabr.replay.link import Capacity
from kvabr.types.catalog import Catalog
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.engine import EngineMode

_INTERVALS, _SUBINTERVALS = 64, 8
_MAX_ROUNDS = 12
_MAX_LATE_DEADLINES = 64.0
_ABSOLUTE_GAP, _RELATIVE_GAP = 1e-7, 2e-3
ROUNDING_LOSS = 1e-12
"""Loss above a maximum that rounding errors of sums explain, nats per generated token."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds for the plays of any clairvoyant player."""

    feasible: bool
    least_loss: float
    """Lowest loss by the deadline at any price, nats per generated token; infinite if not feasible."""
    objective: float
    """Lowest objective of any schedule; infinite if not feasible."""
    loss: float
    """Loss at the lowest objective, plus the price of its bytes."""
    end_s: float
    engine_s: float


INFEASIBLE = Bound(feasible=False, least_loss=math.inf, objective=math.inf, loss=math.inf, end_s=math.inf, engine_s=0.0)


@dataclass(frozen=True, slots=True)
class _Way:
    part: GroupSubset | None
    engine_s: float = 0.0
    earliest_s: float = 0.0


@dataclass(slots=True)
class _Found:
    floor: float = math.inf
    objective: float = math.inf
    loss: float = math.inf
    end_s: float = math.inf
    engine_s: float = 0.0


class Clairvoyant:
    """Computes the bound for plays of one catalog."""

    def __init__(
        self,
        catalog: Catalog,
        cost: PrefillCost | None,
        mode: EngineMode,
        *,
        decode_scale: float = 1.0,
        decoders: int = 1,
        decode_latency_s: float = 0.0,
        max_loss: float = math.inf,
    ) -> None:
        """Prepare the bound.

        ``cost`` is None without an engine; ``decode_latency_s`` is added for the last batch; no cache may lose more
        than ``max_loss``, in nats per generated token.
        """
        self._catalog, self._cost, self.max_loss = catalog, cost, max_loss
        self._mode: EngineMode = mode if catalog.every_token else "suffix"
        self.decoders = decoders
        self.frontier = frontier = Frontier(catalog, decode_scale)
        tails_s = frontier.decodes.min(axis=0) + decode_latency_s
        self.tail_s = float(tails_s.min())
        more = (frontier.sizes - frontier.least_bytes[:, None]).min(axis=0)
        self.lasts: list[tuple[float, float]] = []
        """Options of the last transfer: shortest decode time in seconds, and bytes beyond the cheapest cache."""
        for decode_s, extra in sorted(zip(tails_s.tolist(), more.tolist(), strict=True)):
            if not self.lasts or extra < self.lasts[-1][1]:
                self.lasts.append((decode_s, extra))

    def best(
        self,
        capacity: Capacity,
        deadline_s: float,
        *,
        time_price: float,
        gpu_price: float,
        begun_s: float = 0.0,
        first_byte_s: float = 0.0,
    ) -> Bound:
        """Return the bound of one play.

        ``time_price`` is the price of a second before the first token, ``gpu_price`` that of a second of engine time,
        in nats per token; infinite counts as 0. ``begun_s`` is how many seconds of the deadline passed before the play,
        ``first_byte_s`` the time until the first byte.
        """
        left_s = deadline_s - begun_s
        if left_s <= 0:
            return INFEASIBLE
        gpu_price = gpu_price if math.isfinite(gpu_price) else 0.0
        link = _Link(self, capacity, left_s, first_byte_s)
        ways = self._ways(link)
        least_loss = _least_at_last(link, ways, 0.0)
        if not math.isfinite(least_loss):
            return INFEASIBLE
        found = _Search(link, (0.0, left_s), time_price, gpu_price).over(ways)
        self._late(found, capacity, deadline_s, left_s, first_byte_s, time_price, gpu_price)
        begun = time_price * begun_s
        return Bound(
            feasible=True,
            least_loss=least_loss,
            objective=found.floor + begun,
            loss=found.loss,
            end_s=found.end_s + begun_s,
            engine_s=found.engine_s,
        )

    def _late(
        self,
        found: _Found,
        capacity: Capacity,
        deadline_s: float,
        left_s: float,
        first_byte_s: float,
        time_price: float,
        gpu_price: float,
    ) -> None:
        base, slope = MISS_PENALTY + time_price * left_s, time_price + 1.0 / deadline_s
        since_s, until_s = left_s, left_s + deadline_s
        while found.floor > base + slope * (since_s - left_s):
            if since_s - left_s > _MAX_LATE_DEADLINES * deadline_s:
                found.floor = base + slope * (since_s - left_s)  # a later end cannot be better
                return
            link = _Link(self, capacity, until_s, first_byte_s)
            late = _Search(link, (since_s, until_s), slope, gpu_price).over(self._ways(link))
            shift = base - slope * left_s
            found.floor = min(found.floor, late.floor + shift)
            if late.objective + shift < found.objective:
                found.objective, found.loss = late.objective + shift, late.loss
                found.end_s, found.engine_s = late.end_s, late.engine_s
            since_s, until_s = until_s, left_s + 2.0 * (until_s - left_s)

    def least_at(self, capacity: Capacity, end_s: float, *, gpu_price: float, first_byte_s: float = 0.0) -> float:
        """Return the lowest sum of loss and price of engine time of any schedule that ends at ``end_s``; see `best`."""
        link = _Link(self, capacity, max(0.0, end_s), first_byte_s)
        return _least_at_last(link, self._ways(link), gpu_price if math.isfinite(gpu_price) else 0.0)

    def _ways(self, link: _Link) -> list[_Way]:
        catalog, cost, frontier = self._catalog, self._cost, self.frontier
        ways = [_Way(WHOLE, 0.0, link.when(float(frontier.least_bytes.sum())) + self.tail_s)]
        size, tokens, groups = catalog.spec.group_tokens, catalog.tokens, catalog.groups
        if cost is None:
            return ways
        if self._mode == "suffix":
            ways.append(_Way(None, whole_s := cost.seconds(0, tokens), whole_s))
            begins_s = link.when(float(frontier.least_bytes.min()))
            work_s = np.cumsum(frontier.decodes.min(axis=1)) / self.decoders
            for cut in range(1, groups):
                if catalog.cut(cut) != cut:
                    continue
                begin = catalog.tokens_before(cut)
                takes_s = cost.seconds(begin, tokens - begin)
                base_s = link.when(float(frontier.least_bytes[:cut].sum())) + self.tail_s
                base_s = max(base_s, begins_s + float(work_s[cut - 1]))
                ways.append(_Way(GroupSubset(first=cut), takes_s, base_s + takes_s))
            return ways
        front_s: Array = np.array([cost.seconds(0, min(count * size, tokens)) for count in range(groups + 1)])
        for count in range(1, groups + 1):
            takes_s = float(front_s[count])
            ways.append(_Way(GroupSubset(skip=count) if count < groups else None, takes_s, takes_s))
        come_s = np.array([link.when(float(nbytes)) for nbytes in frontier.least_bytes]) + self.tail_s
        sums = np.cumsum(np.sort(frontier.least_bytes[:-1]))
        last_s = cost.seconds((groups - 1) * size, tokens - (groups - 1) * size) + self.tail_s
        for count in range(1, groups):
            earliest_s = (link.when(float(sums[groups - 1 - count])) + last_s, 0.0)
            front_done_s = np.maximum(front_s[:count], come_s[:count])
            for behind_s, from_s in zip(_rest_seconds(catalog, cost, count), earliest_s, strict=True):
                takes_s, ends_s = float((front_s[:count] + behind_s).min()), float((front_done_s + behind_s).min())
                if takes_s < math.inf:
                    ways.append(_Way(GroupSubset(free=count), takes_s, max(from_s, ends_s)))
        return ways


def _rest_seconds(catalog: Catalog, cost: PrefillCost, count: int) -> tuple[Array, Array]:
    """Return lower bounds of the second call's seconds, if two engine calls together compute ``count`` groups.

    At index p, the first call computes the first p groups of the prompt, and the second call computes groups after
    group p. In the first array, these include the cache's last group; in the second, they do not. Infinite if
    impossible.
    """
    size, last = catalog.spec.group_tokens, catalog.group_tokens(catalog.groups - 1)
    last_s = cost.added_s(catalog.tokens - last, last)
    before: Array = np.arange(1, count + 1, dtype=float) * size
    tokens: Array = np.arange(count, 0, -1, dtype=float) * size

    def seconds(tokens: Array, more_s: float = 0.0) -> Array:
        pairs = 2.0 * before * tokens + tokens * tokens
        added_s = cost.per_token_s * tokens + cost.attention_s * pairs + more_s
        return np.maximum(cost.floor_s, cost.constant_s + cost.before_s * before + added_s)

    with_last = seconds(tokens - size, last_s)
    without = seconds(tokens) if count < catalog.groups - 1 else np.full(count, np.inf)
    return with_last, without


class _Link:
    def __init__(self, clairvoyant: Clairvoyant, capacity: Capacity, until_s: float, first_byte_s: float) -> None:
        self.frontier, self._decoders = clairvoyant.frontier, clairvoyant.decoders
        self._tail_s, self._lasts, self._max_loss = clairvoyant.tail_s, clairvoyant.lasts, clairvoyant.max_loss
        self.until_s = until_s
        self._times, self._carried = _opened(capacity, until_s, first_byte_s)
        self._least: Array = np.minimum.accumulate(
            self.frontier.per_byte * self._carried - self._decoders * self._times
        )

    def when(self, nbytes: float) -> float:
        """Return the arrival time of ``nbytes``; infinite if after ``until_s``."""
        index = int(np.searchsorted(self._carried, nbytes))
        if index == 0:
            return 0.0
        if index == len(self._times):
            return math.inf
        (t0, t1), (c0, c1) = self._times[index - 1 : index + 1], self._carried[index - 1 : index + 1]
        return float(t0 + (t1 - t0) * (nbytes - c0) / (c1 - c0))

    def loss(self, part: GroupSubset | None, ends: Array, *, care: int, hint: int = 0) -> Array:
        """Return lower bounds of the loss of plays that end at the times ``ends``, see `Frontier.loss`.

        Infinite where even the bound is above the maximum loss.
        """
        if part is None:
            return np.zeros(len(ends))
        nbytes = self._whole(ends) if part is WHOLE else self._carried_by(ends - self._tail_s)
        found = self.frontier.loss(part, nbytes, self._decoding(ends), care=care, hint=hint)
        found[found > self._max_loss + ROUNDING_LOSS] = np.inf
        return found

    def price(self, end_s: float) -> int:
        """Return the index of the decode price with the tightest bound for plays that end at ``end_s``."""
        ends = np.array([end_s])
        return self.frontier.price(WHOLE, self._whole(ends), self._decoding(ends))

    def _carried_by(self, times: Array) -> Array:
        return np.interp(times, self._times, self._carried)

    def _whole(self, ends: Array) -> Array:
        least = float(self.frontier.least_bytes.sum())
        found = np.full(len(ends), -1.0)
        for decode_s, more in reversed(self._lasts):
            nbytes = self._carried_by(ends - decode_s)
            found = np.where(nbytes >= least + more, nbytes, found)
        return found

    def _decoding(self, ends: Array) -> Array:
        before = self._least[np.searchsorted(self._times, ends, side="right") - 1]
        return np.minimum(before + self._decoders * ends, self.frontier.per_byte * self._carried_by(ends))


def _opened(capacity: Capacity, until_s: float, first_byte_s: float) -> tuple[Array, Array]:
    times, carried = capacity.points(until_s)
    opened = float(np.interp(first_byte_s, times, carried))
    place = int(np.searchsorted(times, first_byte_s))
    return np.insert(times, place, first_byte_s), np.maximum(0.0, np.insert(carried, place, opened) - opened)


def _least_at_last(link: _Link, ways: Sequence[_Way], gpu_price: float) -> float:
    end = np.array([link.until_s])
    ways = [way for way in ways if way.earliest_s <= link.until_s]
    if not gpu_price:
        # If engine time is free, computing more groups is never worse.
        parts = [WHOLE, *(way.part for way in ways if way.part is not None)]
        most = {GroupSubset(skip=max(part.skip for part in parts)), GroupSubset(free=max(part.free for part in parts))}
        ways = [way for way in ways if way.part is None or way.part.first is not None or way.part in {WHOLE, *most}]

    def at(way: _Way, care: int) -> float:
        return float(link.loss(way.part, end, care=care)[0]) + gpu_price * way.engine_s

    best = math.inf
    for floor, way in sorted(((at(way, 0), way) for way in ways), key=lambda one: one[0]):
        if floor >= best:
            break
        best = min(best, at(way, 4))
    return best


class _Search:
    def __init__(self, link: _Link, span: tuple[float, float], time_price: float, gpu_price: float) -> None:
        self._link, self._span = link, span
        self._time_price, self._gpu_price = time_price, gpu_price
        self._found = _Found()

    def over(self, ways: Sequence[_Way]) -> _Found:
        """Return the lowest objective over all ways to divide the work; ``ways[0]`` uses only the network."""
        first, last = self._span
        first = max(first, min(way.earliest_s for way in ways))
        if first > last:
            return self._found
        # If time is free, the latest end is best.
        ends = np.linspace(first, last, _INTERVALS + 1) if self._time_price > 0 else np.array([last])
        network, others = ways[0], [way for way in ways[1:] if way.earliest_s <= last]
        self._divide(network, ends, self._link.loss(network.part, ends, care=1))
        found = self._found
        hint = self._link.price(found.end_s) if others and math.isfinite(found.end_s) else 0
        rest = []
        for way in others:
            losses = self._link.loss(way.part, ends, care=0, hint=hint)
            rest.append((self._least(way, ends, losses), way, losses))
        for _, way, losses in sorted(rest, key=lambda one: one[0]):
            self._divide(way, ends, losses, hint)
        found.floor = min(found.floor, found.objective)
        return found

    def _divide(self, way: _Way, ends: Array, losses: Array, hint: int = 0) -> None:
        """Find the lowest objective of a way, subdividing the intervals between the ascending times ``ends``.

        ``losses`` are lower bounds at these times, not necessarily tight; for ``hint`` see `Frontier.loss`.
        """
        found = self._found
        starts, stops, losses = _intervals(way, ends, losses)
        for _ in range(_MAX_ROUNDS):
            floors = self._floors(way, starts, losses)
            near = (
                found.objective - max(_ABSOLUTE_GAP, _RELATIVE_GAP * found.objective)
                if math.isfinite(found.objective)
                else math.inf
            )
            going = floors < near
            found.floor = min(found.floor, float(floors[~going].min(initial=math.inf)))
            if not going.any():
                return
            steps = np.linspace(starts[going], stops[going], _SUBINTERVALS + 1, axis=1)
            starts, stops = steps[:, :-1].ravel(), steps[:, 1:].ravel()
            losses = self._link.loss(way.part, stops, care=4, hint=hint)
            self._note(way, stops, losses)
        found.floor = min(found.floor, float(self._floors(way, starts, losses).min()))

    def _least(self, way: _Way, ends: Array, losses: Array) -> float:
        starts, _, losses = _intervals(way, ends, losses)
        return float(self._floors(way, starts, losses).min())

    def _floors(self, way: _Way, starts: Array, losses: Array) -> Array:
        return losses + self._time_price * starts + self._gpu_price * way.engine_s

    def _note(self, way: _Way, ends: Array, losses: Array) -> None:
        values, found = self._floors(way, ends, losses), self._found
        index = int(values.argmin())
        if values[index] < found.objective:
            found.objective, found.loss = float(values[index]), float(losses[index])
            found.end_s, found.engine_s = float(ends[index]), way.engine_s


def _intervals(way: _Way, ends: Array, losses: Array) -> tuple[Array, Array, Array]:
    keep = ends >= way.earliest_s
    starts = np.concatenate([ends[:1], ends[:-1]])[keep]
    return np.maximum(starts, way.earliest_s), ends[keep], losses[keep]
