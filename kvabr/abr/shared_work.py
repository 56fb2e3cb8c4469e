"""Cost and duration of divisions of a play's work between network and engine.

All divisions are computed together, as arrays by choice and stop: for each group at which the engine may stop, several
choices of tracks for the network. Players change their plans during a play, so mixtures of two choices that just meet
the deadline count as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvabr.abr.view import View, excess
from kvabr.types.cost import MISS_PENALTY

Array = npt.NDArray[np.float64]

_EQUAL_TIME_S = 1e-9
"""Seconds of lateness that still count as in time."""


class Divisions(NamedTuple):
    """Cost and duration of several divisions."""

    objective: Array
    """Loss, priced time, and penalties, nats per generated token; without the price of engine time."""
    network_s: Array
    """Seconds until the network has delivered its groups."""
    late: npt.NDArray[np.bool_]
    """True if the deadline is missed."""


class SharedWork:
    """The work of one play, for several divisions."""

    def __init__(
        self,
        view: View,
        rate: float,
        ramp: tuple[float, float] | None,
        stops: npt.NDArray[np.intp],
        engine_s: Array,
        inherited: Array,
        edges: npt.NDArray[np.intp],
        after_s: float,
    ) -> None:
        """Prepare; see `TimePlanner.divide`.

        ``edges``: parts at which the engine continues, and stops; ``after_s``: see `TimePlanner.after_s`.
        """
        self._view, self.rate, self._ramp = view, rate, ramp
        self._engine_s, self._inherited = engine_s, inherited
        self._begins, self._ends = edges
        self._left_s = view.time_left - after_s
        self._columns, left_s = np.arange(len(stops)), np.full(len(stops), self._left_s)
        self._limit_s = left_s - engine_s if view.front_first else left_s
        """Latest end of the network's work that meets the deadline, by stop."""
        self.lacking: npt.NDArray[np.bool_] = stops > view.solid if view.front_first else stops < view.groups
        """True if the network must deliver groups, by stop."""
        self._wait_s = max(0.0, view.ttfb_s - view.outstanding_bytes / rate)
        self._decode_s = view.decode_s(view.ladder.cheapest) / view.decoders
        self.first_s = self._wait_s + self._decode_s
        """Seconds until the first group is in place, excluding the transfer of its bytes."""

    def brought(self, each: Array) -> Array:
        """Return the sums of ``each`` over the parts that the network delivers, by price and stop."""
        sums: Array = np.zeros((*each.shape[:-1], each.shape[-1] + 1))
        each.cumsum(axis=-1, out=sums[..., 1:])
        at_stop = sums[..., self._ends]
        if self._view.front_first:
            return at_stop
        return sums[..., -1:] - at_stop + sums[..., self._begins]

    def carried_s(self, nbytes: Array) -> Array:
        """Return the seconds that the link takes for some bytes."""
        if self._ramp is None or self.rate <= self._ramp[0]:
            return nbytes / self.rate
        begins, doubles_s = self._ramp[0], self._ramp[1] / math.log(2.0)
        grown_s, grown = doubles_s * math.log(self.rate / begins), doubles_s * (self.rate - begins)
        early_s = doubles_s * np.log1p(np.minimum(nbytes, grown) / (doubles_s * begins))
        return np.where(nbytes <= grown, early_s, grown_s + (nbytes - grown) / self.rate)

    def network_s(self, works: Array, nbytes: Array, flying: Array, queue_s: Array, batch_s: float) -> Array:
        """Return the seconds until everything has arrived and is decoded."""
        view = self._view
        wait_s = (nbytes > 0) * self._wait_s
        last_s = self.carried_s(nbytes + flying) + wait_s
        last_s += works if view.decodes_last else self._decode_s * (nbytes > 0)
        found: Array = np.maximum(last_s, np.maximum(wait_s, queue_s) + works) + batch_s * (works > 0)
        return found

    def least(self, lost: Array, network_s: Array, begun: tuple[Array, Array] | None) -> Divisions:
        """Return the division of least cost for each stop, over choices of tracks and mixtures of them.

        Args:
            lost: loss of the groups that the network delivers, by choice and stop.
            network_s: seconds until they are delivered, by choice and stop.
            begun: during a play, the seconds until the engine can begin after groups on their base tracks, and the
                additional loss that its tokens then inherit. None: it begins after the network (suffix mode) or at once
                (hole mode).
        """

        def costs(lost: Array, network_s: Array) -> Divisions:
            after = network_s + self._engine_s if self._view.front_first else np.maximum(network_s, self._engine_s)
            found = self._costs(lost, after, network_s)
            if begun is None:
                return found
            begins_s, on_base = begun
            beside_s = np.maximum(network_s, begins_s + self._engine_s)
            return better(self._costs(lost + on_base, beside_s, np.broadcast_to(begins_s, network_s.shape)), found)

        found = costs(lost, network_s)
        best = found.objective.argmin(axis=0), self._columns
        least = Divisions(*(each[best] for each in found))
        if found.late.any():
            just_s = self._limit_s
            least = better(costs(_lost_at(just_s, network_s, lost, found.objective), just_s), least)
        return least

    def _costs(self, lost: Array, ends_s: Array, network_s: Array) -> Divisions:
        late_s = ends_s - self._left_s
        late = late_s > _EQUAL_TIME_S
        missed = late * (MISS_PENALTY + late_s / self._view.deadline_s)
        lost = lost + self._inherited
        paid = self._view.time_price * ends_s + missed + excess(lost, self._view)
        return Divisions(lost + paid, network_s, late)


def better(one: Divisions, other: Divisions) -> Divisions:
    """Return the cheaper of two divisions, element by element."""
    cheaper = one.objective < other.objective
    return Divisions(*(np.where(cheaper, *pair) for pair in zip(one, other, strict=True)))


def _lost_at(limit_s: Array, ends_s: Array, lost: Array, objective: Array) -> Array:
    """Return the least loss of mixtures that end at a limit, by stop; infinite if no choice ends by the limit.

    Each mixes the best choice within the limit with a later one. The other arrays are by choice and stop.
    """
    inside, columns = ends_s <= limit_s, np.arange(len(limit_s))
    best = np.where(inside, objective, np.inf).argmin(axis=0)
    from_s, from_lost, some = ends_s[best, columns], lost[best, columns], inside[best, columns]
    part = np.divide(limit_s - from_s, ends_s - from_s, out=np.zeros_like(ends_s), where=some & ~inside)
    mixed: Array = (from_lost + part * (lost - from_lost)).min(axis=0)
    return np.where(some, mixed, np.inf)
