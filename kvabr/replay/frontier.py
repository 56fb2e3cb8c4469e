"""The minimum loss for given bytes and decoder seconds, for any set of groups.

This is the linear relaxation of a multiple-choice knapsack with two resources: one option per group, with its bytes,
decode seconds and loss. With a price q on decoder seconds, one resource remains, and the greedy order along the convex
hulls of all groups is exact: the result is a *curve*, a convex, falling, piecewise linear function of bytes. By
Lagrangian duality, the minimum loss for B bytes and R seconds is the maximum of curve_q(B) - q R over q >= 0. Every q
gives a valid lower bound, so a fixed grid of prices suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvabr.abr.ladder import stack
from kvabr.types.catalog import Catalog

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_PRICE_COUNT, _PRICE_RANGE = 1024, 1e11
"""Number of positive prices of a decoder second, and ratio of the largest to the smallest. Curves are computed on
demand.
"""
_STRIDES, _HINT_RANGE = (64, 16, 4, 1), 64
"""Strides of the search for the best price. With a hint, only this range around it is searched, with the last three
strides.
"""
_WEIGHTINGS = 96
_MAX_BYTE_PRICES = 256


@dataclass(frozen=True, slots=True)
class Curve:
    """A convex, falling, piecewise linear function of bytes."""

    bytes: Array
    """Breakpoints, ascending; the first is the size of the smallest cache."""
    loss: Array
    """Loss at the breakpoints, nats per token, plus the price of decoding."""
    decode_s: Array | None = None

    def at(self, nbytes: Array) -> Array:
        """Return the curve's values at byte counts; infinite if the cheapest options do not fit."""
        return np.where(nbytes < self.bytes[0], np.inf, np.interp(nbytes, self.bytes, self.loss))


@dataclass(frozen=True, slots=True)
class GroupSubset:
    """The groups of a cache that are fetched."""

    first: int | None = None
    """Group after the last; None: to the end."""
    skip: int = 0
    free: int = 0
    """Number of groups that an engine computes instead: the most expensive ones."""


WHOLE = GroupSubset()


class Frontier:
    """The curves of one catalog."""

    def __init__(self, catalog: Catalog, decode_scale: float = 1.0) -> None:
        """Prepare the options of every group; a stack of layers is one option, decoded once."""
        stacks = [stack(catalog, track) for track in catalog.tracks]
        share = np.array(catalog.shares)
        self.groups = catalog.groups
        self.losses: Array = np.array([track.loss for track in catalog.tracks], float).T
        """Losses, [group, option]; other tables have the same axes."""
        self.sizes: Array = np.array([np.sum([layer.bytes for layer in layers], axis=0) for layers in stacks], float).T
        self.decodes: Array = share[:, None] * decode_scale * np.array([track.decode_s for track in catalog.tracks])
        self.least_bytes: Array = self.sizes.min(axis=1)
        self.per_byte = float((self.decodes / self.sizes).max())
        self.prices: Array = np.concatenate([[0.0], _grid(self._dearest_second(), _PRICE_COUNT, _PRICE_RANGE)])
        """Prices of a decoder second, nats per token; the first price is zero."""
        scale = self.sizes.sum() / max(float(self.decodes.sum()), 1e-12)
        angles = np.linspace(0.0, math.pi / 2, _WEIGHTINGS)
        self._mixes: Array = np.stack([np.cos(angles), scale * np.sin(angles)], axis=1)
        self._mixed: Array = np.array([(a * self.sizes + b * self.decodes).min(axis=1) for a, b in self._mixes])
        self._needs: dict[GroupSubset, Array] = {}
        self._steps: dict[int, tuple[Whole, Array]] = {}
        self._lines: dict[int, tuple[Array, Array]] = {}
        self._curves: dict[tuple[GroupSubset, int], Curve] = {}

    def loss(
        self,
        part: GroupSubset,
        nbytes: Array,
        decode_s: Array,
        *,
        care: int = len(_STRIDES),
        hint: int = 0,
    ) -> Array:
        """Return lower bounds of the loss for pairs of bytes and seconds; infinite if no option fits.

        ``care`` is the number of strides, 0 to 4, in the search for the best price of decoding; ``hint`` is the index
        of a price that is probably near the best one, or 0.
        """
        found, places = self._short(part, nbytes, decode_s)
        if len(places) and (care or hint):
            nbytes, decode_s = nbytes[places], decode_s[places]
            known = self._dual(part, nbytes, decode_s, found[places], care, hint)
            best = np.max(list(known.values()), axis=0)
            if care:
                have = np.outer(self._mixes[:, 0], nbytes) + np.outer(self._mixes[:, 1], decode_s)
                best[(self._need(part)[:, None] > have * (1 + 1e-12)).any(axis=0)] = np.inf
            found[places] = best
        return found

    def price(self, part: GroupSubset, nbytes: Array, decode_s: Array) -> int:
        """Return the index of the decode price with the tightest bound for one pair of bytes and seconds."""
        found, places = self._short(part, nbytes, decode_s)
        if not len(places):
            return 0
        known = self._dual(part, nbytes, decode_s, found, 2, 0)
        return max(known, key=lambda index: float(known[index][0]))

    def _short(self, part: GroupSubset, nbytes: Array, decode_s: Array) -> tuple[Array, Whole]:
        curve = self.curve(part, 0)
        found = curve.at(nbytes)
        found[decode_s < 0] = np.inf
        short = np.isfinite(found)
        if curve.decode_s is not None:
            short &= np.interp(nbytes, curve.bytes, curve.decode_s) > decode_s
        return found, np.nonzero(short)[0]

    def _dual(
        self,
        part: GroupSubset,
        nbytes: Array,
        decode_s: Array,
        free: Array,
        care: int,
        hint: int,
    ) -> dict[int, Array]:
        """Return curve(B) - price x R by price index, searched for the maximum.

        The function is concave in the price. ``free`` is its value at price zero; see `loss` for ``care`` and ``hint``.
        """
        known = {0: free}
        top = len(self.prices)

        def add(indices: Iterable[int]) -> None:
            for index in indices:
                if 0 < index < top and index not in known:
                    curve = self.curve(part, index)
                    least = np.interp(nbytes, curve.bytes, curve.loss)
                    known[index] = least - self.prices[index] * decode_s

        if hint:
            add(range(hint - _HINT_RANGE, hint + _HINT_RANGE + 1, _STRIDES[1]) if care > 1 else [hint])
        else:
            add(range(_STRIDES[0], top, _STRIDES[0]))
        for stride in _STRIDES[2 if hint else 1 : care]:
            listed = sorted(known)
            for peak in {int(peak) for peak in np.array([known[index] for index in listed]).argmax(axis=0)}:
                add(range(listed[max(0, peak - 1)] + stride, listed[min(len(listed) - 1, peak + 1)], stride))
        return known

    def curve(self, part: GroupSubset, price: int) -> Curve:
        """Return the minimum of loss + price x decoder seconds of some groups, as a function of bytes.

        ``price`` is an index into `prices`.
        """
        key = (part, price)
        if key not in self._curves:
            self._curves[key] = self._envelope(part.free, price) if part.free else self._greedy(part, price)
        return self._curves[key]

    def _dearest_second(self) -> float:
        saved = self.losses[:, :, None] - self.losses[:, None, :]
        longer = self.decodes[:, None, :] - self.decodes[:, :, None]
        ratio = np.divide(saved, longer, out=np.zeros_like(saved), where=(saved > 0) & (longer > 0))
        return 4.0 * float(ratio.max(initial=0.0))

    def _greedy(self, part: GroupSubset, price: int) -> Curve:
        if price not in self._steps:
            self._steps[price] = _hull_steps(self.sizes, self.losses + self.prices[price] * self.decodes, self.decodes)
        groups, points = self._steps[price]
        last = self.groups if part.first is None else part.first
        if last - part.skip < self.groups:
            points = points[(groups >= part.skip) & (groups < last)]
        sums = np.cumsum(points, axis=0)[last - part.skip - 1 :]
        return Curve(sums[:, 0], sums[:, 1], sums[:, 2])

    def _envelope(self, free: int, price: int) -> Curve:
        """Return the curve without the ``free`` most expensive groups, as an envelope of one line per byte price."""
        if price not in self._lines:
            self._lines[price] = self._ranked(price)
        byte_prices, sums = self._lines[price]
        keep = self.groups - free
        least = float(np.sort(self.least_bytes)[:keep].sum())
        values = sums[:, keep - 1]
        meet = np.diff(values) / np.diff(byte_prices)
        meet = np.minimum.accumulate(meet)
        inside = meet > least
        last = int(inside.sum())
        at = np.concatenate([[least], meet[:last][::-1]])
        line = np.concatenate([[last], np.arange(last)[::-1]])
        return Curve(at, values[line] - byte_prices[line] * at)

    def _ranked(self, price: int) -> tuple[Array, Array]:
        cost = self.losses + self.prices[price] * self.decodes
        _, points = _hull_steps(self.sizes, cost, self.decodes)
        steps = points[points[:, 1] < 0]
        worth = np.unique(-steps[:, 1] / np.maximum(steps[:, 0], 1.0))
        if len(worth) > _MAX_BYTE_PRICES:
            worth = np.unique(worth[np.linspace(0, len(worth) - 1, _MAX_BYTE_PRICES).astype(int)])
        top = float(worth[-1]) if len(worth) else 1.0
        byte_prices = np.unique(np.concatenate([[0.0], worth, top * np.array([1.5, 2.0, 4.0])]))
        least = np.array([np.sort((cost + p * self.sizes).min(axis=1)) for p in byte_prices])
        return byte_prices, np.cumsum(least, axis=1)

    def _need(self, part: GroupSubset) -> Array:
        if part not in self._needs:
            mixed = self._mixed[:, part.skip : part.first]
            self._needs[part] = np.sort(mixed, axis=1)[:, : mixed.shape[1] - part.free].sum(axis=1)
        return self._needs[part]


def _grid(top: float, count: int, ratio: float) -> Array:
    return top * np.geomspace(1.0 / ratio, 1.0, count) if top > 0 else np.zeros(0)


def _hull_steps(sizes: Array, cost: Array, decodes: Array) -> tuple[Whole, Array]:
    """Return the steps along the lower convex hulls of cost against bytes, largest saving per byte first.

    Arguments are [group, option]. Return the group of each step, and its (bytes, cost, seconds) as [step, 3]. The first
    steps are the starting points of all groups.
    """
    rows = np.arange(len(sizes))
    smallest = sizes == sizes.min(axis=1, keepdims=True)
    at = np.where(smallest, cost, np.inf).argmin(axis=1)
    groups, points = [rows], [np.stack([sizes[rows, at], cost[rows, at], decodes[rows, at]], axis=1)]
    worths = [np.full(len(rows), np.inf)]
    while len(rows):
        more = sizes[rows] - sizes[rows, at][:, None]
        saved = cost[rows, at][:, None] - cost[rows]
        worth = np.divide(saved, more, out=np.zeros_like(saved), where=(more > 0) & (saved > 0))
        best = worth.argmax(axis=1)
        going = worth[np.arange(len(rows)), best] > 0
        rows, at, best, worth = rows[going], at[going], best[going], worth[going]
        points.append(np.stack([table[rows, best] - table[rows, at] for table in (sizes, cost, decodes)], axis=1))
        groups.append(rows)
        worths.append(worth[np.arange(len(rows)), best])
        at = best
    order = np.argsort(-np.concatenate(worths), kind="stable")
    return np.concatenate(groups)[order], np.concatenate(points)[order]
