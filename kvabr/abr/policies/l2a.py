"""``l2a``: Learn2Adapt, online convex optimisation (Karagkioules, Mekuria, Griffioen and Wagenaar, MMSys 2020).

The choice is a probability distribution over the tracks. After each segment it takes a gradient step along what each
track would have done to the buffer at the observed throughput, weighted by a multiplier Q that grows while segments
take longer to arrive than to play, and is projected back onto the simplex. The track whose rate is nearest to the mean
is chosen. As in dash.js, the choice rises one step at a time and only as far as the throughput carries, and Q doubles
where the choice exceeds the throughput. Until the buffer reaches its target the throughput decides.

Adapted to caches: the buffer is the time that the play is ahead of the timeline of `kvabr.abr.view.Timeline`, and the
unit of time is one group's share of the deadline, where L2A-LL has seconds and segments of about one second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

from kvabr.abr.policy import Decision, Parameter, Policy
from kvabr.abr.view import Timeline, View

_SAFE = 0.9
"""Share of the expected rate that counts as throughput while starting."""
_REACT = 2.0
"""Factor on Q when the choice exceeds the throughput."""


class L2A(Policy):
    """Learn a mix of tracks by gradient steps on each track's effect on the buffer."""

    name: ClassVar[str] = "l2a"
    estimator: ClassVar[str] = "last"
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "horizon": Parameter(2.0, 32.0, 4.0, log=True),
        "target": Parameter(0.5, 16.0, 1.5, log=True),
    }

    def __init__(self, *, horizon: float = 4.0, target: float = 1.5) -> None:
        """Set the speed of learning.

        Args:
            horizon: groups until learning settles; the longer, the smaller the steps.
            target: groups ahead of the timeline from which the learned weights decide.
        """
        self._target = target
        self._caution = horizon**0.99
        self._step = 1.0 / (2.0 * max(horizon, self._caution * horizon**0.5))

    def start(self, view: View) -> None:
        """Start by throughput."""
        self._line = Timeline(view)
        self._weights: list[float] | None = None
        self._q = 0.0
        self._last = self._seen = 0

    def decide(self, view: View) -> Decision:
        """Learn from what arrived since the last decision, then choose the track nearest to the mean."""
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        arrived = self._line.arrived(view)
        if self._weights is None:
            self._last = self._line.carried(_SAFE * view.rate)
            reason = f"starting, the throughput of {view.rate / 125e3:.1f} Mbit/s decides"
            if arrived and self._line.level_s(view) >= self._target * self._line.segment_s:
                self._q = self._caution
                self._weights = [float(index == self._last) for index in range(len(self._line.rates))]
        else:
            if arrived != self._seen and view.rate > 0:
                self._weights = self._learn(self._weights, [rate / view.rate for rate in self._line.rates])
            reason = f"learnt weights {', '.join(f'{weight:.2f}' for weight in self._weights)}, Q {self._q:.2f}"
        self._seen = arrived
        return Decision.fetch(group, self._line.names[self._last], reason)

    def _learn(self, before: list[float], costs: Sequence[float]) -> list[float]:
        """Take one step and return the new weights.

        Args:
            before: the weights so far.
            costs: seconds that a group takes on each track, over its share of the deadline.
        """
        force = self._step * (self._q + self._caution)
        moved = [weight + (force if cost <= 1.0 else -force) * cost for weight, cost in zip(before, costs, strict=True)]
        weights = project(moved)
        mean = _dot(weights, costs)
        # Twice the new weights less the old: where the step leads to, as in the paper's queue.
        self._q = max(0.0, self._q - 1.0 + 2.0 * mean - _dot(before, costs))
        chosen = min(range(len(costs)), key=lambda index: abs(costs[index] - mean))
        if chosen > self._last and costs[self._last + 1] <= 1.0:
            chosen = self._last + 1
        if costs[chosen] >= 1.0:
            self._q = _REACT * max(self._caution, self._q)
        self._last = chosen
        return weights


def project(values: Sequence[float]) -> list[float]:
    """Return the point of the probability simplex that is nearest to ``values`` (Chen and Ye, arXiv:1101.6081)."""
    ordered = sorted(values, reverse=True)
    level = 0.0
    for count, (total, value) in enumerate(zip(accumulate(ordered), ordered, strict=True), 1):
        candidate = (total - 1.0) / count
        if candidate >= value:
            break
        level = candidate
    return [max(0.0, value - level) for value in values]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
