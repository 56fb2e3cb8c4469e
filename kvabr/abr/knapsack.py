"""The multiple-choice knapsack: one choice for every group, so that all fit a number of bytes and lose the least.

Two ways, and the better of their results: greedily, the step that saves most per byte of those that still fit; and by
dynamic programming over the bytes, rounded up to a grid, with what the rounding left spent greedily. The second finds
what the first cannot, combinations that fill the last bytes; on small cases it is exact but for the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

_CELLS = 1 << 17
"""Cells of the grid over all groups together: the finer the fewer they are."""
_MOST_CELLS, _LEAST_CELLS = 8192, 1024


class Choice(NamedTuple):
    """One way to have one group."""

    bytes: int
    loss: float
    """Nats per generated token, or whatever is to be the least in sum."""


def knapsack(groups: Sequence[Sequence[Choice]], budget: float, *, exact: bool = True) -> list[int] | None:
    """Which choice to take of each group; None if not even the smallest of all fit.

    Args:
        groups: the choices of each group, in any order; at least one each.
        budget: bytes.
        exact: False for the greedy way alone, several times as fast.
    """
    least = [choices.index(min(choices)) for choices in groups]
    if sum(choices[index].bytes for choices, index in zip(groups, least, strict=True)) > budget:
        return None
    found = _filled(groups, list(least), budget)
    other = _programmed(groups, budget) if exact else None
    if other is not None:
        other = _filled(groups, other, budget)
        if _loss(groups, other) < _loss(groups, found):
            return other
    return found


def _loss(groups: Sequence[Sequence[Choice]], picks: Sequence[int]) -> float:
    return sum(choices[index].loss for choices, index in zip(groups, picks, strict=True))


def _filled(groups: Sequence[Sequence[Choice]], picks: list[int], budget: float) -> list[int]:
    """Take the step that saves most per byte, again and again, as long as one fits."""
    left = budget - sum(choices[index].bytes for choices, index in zip(groups, picks, strict=True))
    heap: list[tuple[float, int, int]] = []

    def offer(group: int) -> tuple[float, int, int] | None:
        now = groups[group][picks[group]]
        best: tuple[float, int, int] | None = None
        for index, choice in enumerate(groups[group]):
            more, saving = choice.bytes - now.bytes, now.loss - choice.loss
            if saving > 0 and more <= left:
                worth = (-saving / more if more > 0 else float("-inf"), group, index)
                best = worth if best is None or worth < best else best
        return best

    heap.extend(found for group in range(len(groups)) if (found := offer(group)) is not None)
    heapify(heap)
    while heap:
        _, group, index = heappop(heap)
        more = groups[group][index].bytes - groups[group][picks[group]].bytes
        if more <= left:
            left -= more
            picks[group] = index
        if (found := offer(group)) is not None:
            heappush(heap, found)
    return picks


def _programmed(groups: Sequence[Sequence[Choice]], budget: float) -> list[int] | None:
    """The best choices if every one is rounded up to the grid; None if rounding makes even the smallest too large."""
    import numpy as np  # noqa: PLC0415  # slow to load, and most plays never need it

    cells = max(_LEAST_CELLS, min(_MOST_CELLS, _CELLS // max(1, len(groups))))
    if budget < 1:
        return None  # it holds nothing that has a size, and so small a grid could not be reckoned with
    unit = budget / cells
    value = np.zeros(cells + 1)
    picked = np.zeros((len(groups), cells + 1), dtype=np.int16)
    for group, choices in enumerate(groups):
        best = np.full(cells + 1, np.inf)
        for index, choice in enumerate(choices):
            size = int(np.ceil(choice.bytes / unit))
            if size > cells:
                continue
            with_it = value[: cells + 1 - size] + choice.loss
            better = with_it < best[size:]
            best[size:][better] = with_it[better]
            picked[group, size:][better] = index
        value = best
    if not np.isfinite(value[cells]):
        return None
    picks, cell = [0] * len(groups), cells
    for group in range(len(groups) - 1, -1, -1):
        picks[group] = int(picked[group, cell])
        cell -= int(np.ceil(groups[group][picks[group]].bytes / unit))
    return picks
