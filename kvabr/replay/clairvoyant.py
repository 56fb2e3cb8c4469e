"""The clairvoyant bound: with the whole trace known, the least loss that any schedule could reach by the deadline.

If only "all in place by D" counts, the order of transfers does not matter: the best cache is a multiple-choice
knapsack, one option per group, over the bytes that the link carries by D less the time to decode what comes last. The
bound is the knapsack's linear relaxation, which the greedy order on the convex hulls solves exactly; it is at most one
step below the best whole-group cache, so it is a bound that a play can approach but not pass.

With an engine that can recompute, the network's part shrinks:

- ``suffix``: for every cut, the tail is computed after the network has brought what lies before the cut.
- ``hole``: with k groups computed while the network loads the others, where k is as many as a prefix (the cheapest
  groups to compute) allows by D. Which k, the bound leaves open: it takes the k that help the network most, by
  Lagrangian duality, so it cannot be passed by computing cleverly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvabr.abr.ladder import Options, Step, every_option, rank
from kvabr.catalog import Catalog
from kvabr.recompute.cost import PrefillCost
from kvabr.recompute.planner import EngineMode
from kvabr.replay.link import Capacity


@dataclass(frozen=True, slots=True)
class Bound:
    """What a clairvoyant player could do."""

    feasible: bool
    """Whether any schedule meets the deadline at all."""
    loss: float
    """The least expected loss by the deadline, nats per generated token; infinite if not feasible."""


class _Curve:
    """Least loss of the groups before a cut as a function of bytes: convex, piecewise linear."""

    def __init__(self, options: Options, steps: Sequence[Step], groups: int) -> None:
        self.least_bytes = sum(hull[0].bytes for hull in options[:groups])
        self.bytes = [0]
        self.loss = [sum(hull[0].loss for hull in options[:groups])]
        for step in steps:
            if step.group < groups:
                self.bytes.append(self.bytes[-1] + step.bytes)
                self.loss.append(self.loss[-1] - step.saving)

    def at(self, nbytes: float) -> float:
        """Least loss within ``nbytes``; infinite if even the cheapest options do not fit."""
        spare = nbytes - self.least_bytes
        if spare < 0:
            return float("inf")
        index = bisect_right(self.bytes, spare) - 1
        loss = self.loss[index]
        if index + 1 < len(self.bytes):
            share = (spare - self.bytes[index]) / (self.bytes[index + 1] - self.bytes[index])
            loss -= share * (loss - self.loss[index + 1])
        return max(0.0, loss)


class Clairvoyant:
    """Computes the bound for plays of one catalog."""

    def __init__(
        self, catalog: Catalog, cost: PrefillCost | None, mode: EngineMode, *, decode_scale: float = 1.0
    ) -> None:
        self._catalog, self._cost, self._mode = catalog, cost, mode
        self._options = every_option(catalog)
        self._steps = rank(self._options)
        # The hulls as [group, option] arrays, short ones filled up with their last option.
        widest = max(map(len, self._options))
        filled = [(*hull, *[hull[-1]] * (widest - len(hull))) for hull in self._options]
        self._losses = np.array([[option.loss for option in hull] for hull in filled])
        self._sizes = np.array([[float(option.bytes) for option in hull] for hull in filled])
        self._decode_tail_s = decode_scale * min(track.decode_s for track in self._catalog.tracks)
        self._curves: dict[int, _Curve] = {}

    def bound(self, capacity: Capacity, deadline_s: float) -> Bound:
        """The bound for one play."""
        catalog = self._catalog
        arrive_s = max(0.0, deadline_s - self._decode_tail_s)
        loss = self._curve(catalog.groups).at(capacity.between(0.0, arrive_s))
        if self._cost is not None:
            if self._mode == "suffix":
                loss = min(loss, self._cut(capacity, deadline_s))
            else:
                loss = min(loss, self._holes(capacity.between(0.0, arrive_s), deadline_s))
        return Bound(loss < float("inf"), loss)

    def _curve(self, groups: int) -> _Curve:
        if groups not in self._curves:
            self._curves[groups] = _Curve(self._options, self._steps, groups)
        return self._curves[groups]

    def _cut(self, capacity: Capacity, deadline_s: float) -> float:
        catalog, cost = self._catalog, self._cost
        assert cost is not None  # noqa: S101
        best = float("inf")
        for cut in range(catalog.groups):
            first = cut * catalog.spec.group_tokens
            left_s = deadline_s - cost.seconds(first, catalog.tokens - first)
            if left_s < 0:
                continue
            arrive_s = max(0.0, left_s - (self._decode_tail_s if cut else 0.0))
            best = min(best, self._curve(cut).at(capacity.between(0.0, arrive_s)))
        return best

    def _computable(self, deadline_s: float) -> int:
        """How many groups an engine can compute by the deadline: a prefix in one call is the most."""
        catalog, cost = self._catalog, self._cost
        assert cost is not None  # noqa: S101
        count = 0
        while count < catalog.groups:
            tokens = min((count + 1) * catalog.spec.group_tokens, catalog.tokens)
            if cost.seconds(0, tokens) > deadline_s:
                break
            count += 1
        return count

    def _holes(self, nbytes: float, deadline_s: float) -> float:
        count = self._computable(deadline_s)
        options = self._options
        if count >= len(options):
            return 0.0
        if count == 0:
            return float("inf")
        least = sorted(hull[0].bytes for hull in options)
        if sum(least[: len(options) - count]) > nbytes:
            return float("inf")
        # max over prices p >= 0 of  sum_g min_o (loss + p bytes) - (the `count` largest of these) - p nbytes:
        # concave in p, so narrowing by thirds finds it.
        worths = [step.worth for step in self._steps]
        if not worths:
            return max(0.0, sum(sorted(hull[0].loss for hull in options)[: len(options) - count]))

        def dual(price: float) -> float:
            costs = np.sort((self._losses + price * self._sizes).min(axis=1))
            return float(costs[: len(options) - count].sum()) - price * nbytes

        low, high = 0.0, 4.0 * worths[0]
        best = dual(0.0)
        for _ in range(40):
            third = (high - low) / 3
            left, right = dual(low + third), dual(high - third)
            best = max(best, left, right)
            if left < right:
                low += third
            else:
                high -= third
        return max(0.0, best)
