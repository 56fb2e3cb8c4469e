"""The clairvoyant bound: the least loss that any schedule could reach by the deadline if it knew the whole trace.

If only "everything in place by D" counts, the order of transfers does not matter. The best cache is a multiple-choice
knapsack, one option per group, over the bytes that the link carries by D minus the time to decode the last transfer
(the quickest to decode that the link could carry in place of a cheaper one). The bound is the knapsack's linear
relaxation, which the greedy order on the convex hulls solves exactly. It is at most one step below the best whole-group
cache, so a play can approach it but not beat it.

Decoding is a second resource, with one decoder. By any time t, at most C(t) bytes have arrived, which hold at most
r C(t) seconds of decoding (r is the largest ratio of seconds to bytes of any track), and D - t seconds are left for the
rest. So the decode times of all groups sum to at most R = min over t of r C(t) + D - t. Where the greedy solution needs
more than that, the relaxation with both resources is solved by Lagrangian duality.

An engine that recomputes shrinks the network's part:

- ``suffix``: for every cut, the tail is computed once the network has brought the groups before the cut, at least on
  the cheapest tracks; better ones may come by D.
- ``hole``: k groups are computed while the network loads the others, where k is what a prefix (the cheapest groups to
  compute) allows by D. The bound does not fix which k: it takes those that help the network most, by Lagrangian
  duality, so no choice of groups can beat it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvabr.abr.ladder import LadderStep, Options, every_option, rank, stack
from kvabr.replay.link import Capacity
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode

Array = npt.NDArray[np.float64]

_SAMPLES = 48
"""Points in time, and mixes of the two resources, to evaluate. Each alone gives a valid bound."""
_THIRDS = 32
"""Steps of the ternary search for a price: down to a millionth of the first interval."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a clairvoyant player could do."""

    feasible: bool
    """Whether any schedule meets the deadline at all."""
    loss: float
    """The least expected loss by the deadline, nats per generated token; infinite if not feasible."""


class _Curve:
    """Least loss of the groups before a cut as a function of bytes; convex and piecewise linear."""

    def __init__(
        self, options: Options, steps: Sequence[LadderStep], groups: int, decode_s: Mapping[str, float]
    ) -> None:
        self.least_bytes = sum(hull[0].bytes for hull in options[:groups])
        self.bytes = [0]
        self.loss = [sum(hull[0].loss for hull in options[:groups])]
        self.decode_s = [sum(decode_s[hull[0].track] for hull in options[:groups])]
        track = [hull[0].track for hull in options]
        for step in steps:
            if step.group < groups:
                self.decode_s.append(self.decode_s[-1] + decode_s[step.to] - decode_s[track[step.group]])
                track[step.group] = step.to
                self.bytes.append(self.bytes[-1] + step.bytes)
                self.loss.append(self.loss[-1] - step.saving)

    def at(self, nbytes: float) -> float:
        """Return the least loss within ``nbytes``; infinite if even the cheapest options do not fit."""
        spare = nbytes - self.least_bytes
        if spare < 0:
            return float("inf")
        index = self._index(spare)
        loss = self.loss[index]
        if index + 1 < len(self.bytes):
            share = (spare - self.bytes[index]) / (self.bytes[index + 1] - self.bytes[index])
            loss -= share * (loss - self.loss[index + 1])
        return max(0.0, loss)

    def decoding(self, nbytes: float) -> float:
        """Return the seconds of decoding that the best cache within ``nbytes`` takes."""
        return self.decode_s[self._index(nbytes - self.least_bytes)]

    def _index(self, spare: float) -> int:
        return max(0, bisect_right(self.bytes, spare) - 1)


class Clairvoyant:
    """Computes the bound for plays of one catalog."""

    def __init__(
        self, catalog: Catalog, cost: PrefillCost | None, mode: EngineMode, *, decode_scale: float = 1.0
    ) -> None:
        self._catalog, self._cost, self._mode = catalog, cost, mode
        self._options = every_option(catalog)
        self._steps = rank(self._options)
        self._decode_s: dict[str, float] = {
            track.name: decode_scale * sum(layer.decode_s for layer in stack(catalog, track))
            for track in catalog.tracks
        }
        least_share = catalog.group_tokens(catalog.groups - 1) / catalog.spec.group_tokens
        self._decode_tail_s = decode_scale * least_share * min(track.decode_s for track in catalog.tracks)
        # Candidates for the last transfer: least decode time, and bytes beyond those of the cheapest cache.
        self._lasts = sorted(
            (
                decode_scale * least_share * track.decode_s,
                min(
                    sum(layer.bytes[group] for layer in stack(catalog, track)) - hull[0].bytes
                    for group, hull in enumerate(self._options)
                ),
            )
            for track in catalog.tracks
        )
        self._decode_per_byte = max(
            decode_scale * track.decode_s / size for track in catalog.tracks for size in track.bytes
        )
        # Every option, as [group, option] arrays, including those off the hulls: a larger track may decode faster.
        stacks = [stack(catalog, track) for track in catalog.tracks]
        self._losses = np.array([track.loss for track in catalog.tracks]).T
        self._sizes = np.array([np.sum([layer.bytes for layer in layers], axis=0) for layers in stacks], float).T
        share = np.array([catalog.group_tokens(g) / catalog.spec.group_tokens for g in range(catalog.groups)])
        self._decodes = share[:, None] * np.array([self._decode_s[track.name] for track in catalog.tracks])
        self._curves: dict[int, _Curve] = {}

    def bound(self, capacity: Capacity, deadline_s: float) -> Bound:
        """Return the bound of one play."""
        catalog = self._catalog
        curve = self._curve(catalog.groups)
        loss = curve.at(nbytes := self._carried(capacity, deadline_s, curve.least_bytes))
        decode_s = self._decode_budget(capacity, deadline_s)
        if loss < float("inf") and curve.decoding(nbytes) > decode_s:
            loss = self._dual(nbytes, decode_s, 0)
        if self._cost is not None:
            if self._mode == "suffix":
                loss = min(loss, self._cut(capacity, deadline_s))
            else:
                most = capacity.between(0.0, max(0.0, deadline_s - self._decode_tail_s))
                loss = min(loss, self._holes(most, deadline_s))
        return Bound(loss < float("inf"), loss)

    def _carried(self, capacity: Capacity, deadline_s: float, least_bytes: int) -> float:
        """Return the bytes that can arrive in time if the option that decodes fastest comes last."""
        nbytes = 0.0
        for decode_s, more in self._lasts:
            nbytes = capacity.between(0.0, max(0.0, deadline_s - decode_s))
            if nbytes >= least_bytes + more:
                return nbytes
        return min(nbytes, least_bytes - 1.0)

    def _curve(self, groups: int) -> _Curve:
        if groups not in self._curves:
            self._curves[groups] = _Curve(self._options, self._steps, groups, self._decode_s)
        return self._curves[groups]

    def _cut(self, capacity: Capacity, deadline_s: float) -> float:
        return min(self._behind(capacity, deadline_s, cut)[0] for cut in range(self._catalog.groups))

    def _behind(self, capacity: Capacity, deadline_s: float, cut: int) -> tuple[float, float]:
        """Return the least loss if all groups from ``cut`` on are computed (infinite: impossible), and its seconds."""
        catalog, cost = self._catalog, self._cost
        assert cost is not None  # noqa: S101
        first = cut * catalog.spec.group_tokens
        takes_s = cost.seconds(first, catalog.tokens - first)
        if takes_s > deadline_s or cut == 0:
            return (0.0 if takes_s <= deadline_s else float("inf")), takes_s
        curve = self._curve(cut)
        arrive_s = deadline_s - self._decode_tail_s
        if capacity.between(0.0, max(0.0, arrive_s - takes_s)) < curve.least_bytes:
            return float("inf"), takes_s
        # While the engine computes, the groups before the cut may still be upgraded.
        return curve.at(capacity.between(0.0, max(0.0, arrive_s))), takes_s

    def _computable(self, deadline_s: float) -> int:
        """Return how many groups an engine can compute by the deadline: most as one prefix in one call."""
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
        groups = len(self._options)
        if count >= groups:
            return 0.0
        if count == 0:
            return float("inf")
        least = sorted(hull[0].bytes for hull in self._options)
        if sum(least[: groups - count]) > nbytes:
            return float("inf")
        # Computed groups are not decoded. Leaving decoding out only loosens the bound.
        return self._dual(nbytes, float("inf"), count)

    def priced(self, capacity: Capacity, deadline_s: float, gpu_price: float) -> float:
        """Return the least sum of expected loss and priced engine time by the deadline; infinite if none is feasible.

        Args:
            capacity: the link.
            deadline_s: seconds from the start of the play.
            gpu_price: price of a second of engine time, nats per token.
        """
        catalog, cost, mode = self._catalog, self._cost, self._mode
        self._cost = None
        best = self.bound(capacity, deadline_s).loss
        self._cost = cost
        if cost is None:
            return best
        size, tokens = catalog.spec.group_tokens, catalog.tokens
        if mode == "suffix":
            for cut in range(catalog.groups):
                loss, takes_s = self._behind(capacity, deadline_s, cut)
                best = min(best, loss + gpu_price * takes_s)
            return best
        nbytes = capacity.between(0.0, max(0.0, deadline_s - self._decode_tail_s))
        high, groups = self._computable(deadline_s), catalog.groups
        least = list(accumulate(sorted(hull[0].bytes for hull in self._options)))

        def at(count: int) -> float:
            network = 0.0 if count >= groups else self._dual(nbytes, float("inf"), count)
            return network + gpu_price * cost.seconds(0, min(count * size, tokens))

        low = max(1, groups - bisect_right(least, nbytes))
        while low < high:  # convex in the number of groups computed
            middle = (low + high) // 2
            if at(middle) <= at(middle + 1):
                high = middle
            else:
                low = middle + 1
        return min(best, at(low)) if low == high else best

    def _decode_budget(self, capacity: Capacity, deadline_s: float) -> float:
        """Return R of the module's docstring: the most seconds of decoding that can be done by the deadline."""
        times = [deadline_s * i / _SAMPLES for i in range(_SAMPLES + 1)]
        return min(self._decode_per_byte * capacity.between(0.0, t) + deadline_s - t for t in times)

    def _dual(self, nbytes: float, decode_s: float, free: int) -> float:
        """Return the least loss within both resources when ``free`` groups cost nothing; infinite if there is none.

        max over prices p, q >= 0 of  sum_g min_o (loss + p bytes + q decode) - (the ``free`` largest) - p B - q R,
        which is concave in both, so a ternary search finds it.
        """
        keep = len(self._options) - free

        def least(values: Array) -> float:
            return float(np.sort(values.min(axis=1))[:keep].sum())

        timed = decode_s < float("inf")
        if timed:
            if decode_s <= 0 or nbytes <= 0:
                return float("inf")
            weights = [i / _SAMPLES for i in range(_SAMPLES + 1)]
            if any(least(w * self._sizes / nbytes + (1 - w) * self._decodes / decode_s) > 1 for w in weights):
                return float("inf")
        worth = max((step.worth for step in self._steps), default=0.0)

        def at(price: float, second: float) -> float:
            spent = price * nbytes + (second * decode_s if timed else 0.0)
            return least(self._losses + price * self._sizes + second * self._decodes) - spent

        if not timed:
            return max(0.0, _peak(lambda price: at(price, 0.0), 4.0 * worth))
        top = 4.0 * worth * nbytes / decode_s
        return max(0.0, _peak(lambda q: _peak(lambda p: at(p, q), 4.0 * worth), top))


def _peak(function: Callable[[float], float], high: float) -> float:
    """Return the largest value of a concave function between 0 and ``high``."""
    low = 0.0
    best = max(function(low), function(high))
    for _ in range(_THIRDS):
        third = (high - low) / 3
        left, right = function(low + third), function(high - third)
        best = max(best, left, right)
        if left < right:
            low += third
        else:
            high -= third
    return best
