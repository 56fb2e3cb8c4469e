"""The least loss that so many bytes can buy, for the whole cache or for some of its groups."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from kvabr.abr.ladder import Options, Step, every_option, rank
from kvabr.types.catalog import Catalog


class Curve:
    """Least loss of a set of groups as a function of bytes: convex, falling, piecewise linear.

    It is the linear relaxation of the multiple-choice knapsack over every option of every group, layers included: no
    whole-group choice of so many bytes loses less.
    """

    def __init__(self, options: Options, steps: Collection[Step], groups: Collection[int]) -> None:
        """Lay the curve.

        Args:
            options: every group's hull, cheapest first.
            steps: the steps of all hulls, most loss saved per byte first.
            groups: those that count.
        """
        self.least_bytes = sum(options[group][0].bytes for group in groups)
        """Bytes of every group at its cheapest: with fewer there is no cache."""
        self._bytes = [self.least_bytes]
        self._loss = [sum(options[group][0].loss for group in groups)]
        for step in steps:
            if step.group in groups:
                self._bytes.append(self._bytes[-1] + step.bytes)
                self._loss.append(self._loss[-1] - step.saving)

    def at(self, nbytes: float) -> float:
        """Least loss within ``nbytes``, nats per token; with fewer than `least_bytes`, the loss at those."""
        index = bisect_right(self._bytes, nbytes) - 1
        if index < 0:
            return self._loss[0]
        if index + 1 == len(self._bytes):
            return max(0.0, self._loss[-1])
        share = (nbytes - self._bytes[index]) / (self._bytes[index + 1] - self._bytes[index])
        return max(0.0, self._loss[index] - share * (self._loss[index] - self._loss[index + 1]))


class Curves:
    """The curves of one catalog, worked out when they are asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._options = every_option(catalog)
        self._steps = rank(self._options)
        self._whole = Curve(self._options, self._steps, range(catalog.groups))

    def of(self, groups: Collection[int]) -> Curve:
        """The curve of these groups."""
        if len(groups) == len(self._options):
            return self._whole
        return Curve(self._options, self._steps, frozenset(groups))
