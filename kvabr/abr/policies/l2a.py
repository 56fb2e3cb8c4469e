"""``l2a``: Learn2Adapt, online convex optimisation (Karagkioules, Mekuria, Griffioen and Wagenaar, MMSys 2020).

The choice is a probability for every track. After each segment the probabilities take a gradient step along what each
track would have done to the buffer at the throughput just seen, weighed by a multiplier Q that grows while segments
take longer to come than to play, and are projected back onto the simplex. The track whose rate is nearest to their
mean is taken. As in dash.js: one step up at a time where the throughput carries it, and Q is doubled where the choice
is beyond the throughput. Until the buffer reaches its target the throughput decides.

What was changed for a cache: the buffer is the time that the play is ahead of the timeline of
`kvabr.abr.view`, and the unit of time is one group's share of the deadline, where L2A-LL has seconds and
segments of about one second.
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
"""What Q is multiplied by when the choice is beyond the throughput."""


class L2A(Policy):
    """Learn a mix of tracks by gradient steps on what each does to the buffer."""

    name: ClassVar[str] = "l2a"
    estimator: ClassVar[str] = "last"
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "horizon": Parameter(2.0, 32.0, 4.0, log=True),
        "target": Parameter(0.5, 16.0, 1.5, log=True),
    }

    def __init__(self, *, horizon: float = 4.0, target: float = 1.5) -> None:
        """Set how fast it learns.

        Args:
            horizon: groups that learning takes to settle: the longer, the smaller the steps.
            target: groups ahead of the timeline from which on what was learnt decides.
        """
        self._target = target
        self._caution = horizon**0.99
        self._step = 1.0 / (2.0 * max(horizon, self._caution * horizon**0.5))

    def start(self, view: View) -> None:
        """Begin by throughput."""
        self._line = Timeline(view)
        self._weights: list[float] | None = None
        self._q = 0.0
        self._last = self._seen = 0

    def decide(self, view: View) -> Decision:
        """Learn from what has come since the last decision, then take the track nearest to the mean."""
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
        """One step, and the choice that it leads to.

        Args:
            before: the weights so far.
            costs: seconds that a group of each track takes, over its share of the deadline.
        """
        force = self._step * (self._q + self._caution)
        moved = [weight + (force if cost <= 1.0 else -force) * cost for weight, cost in zip(before, costs, strict=True)]
        weights = project(moved)
        mean = _dot(weights, costs)
        # Twice the new weights less the old: where the step leads to, as the paper's queue reckons.
        self._q = max(0.0, self._q - 1.0 + 2.0 * mean - _dot(before, costs))
        chosen = min(range(len(costs)), key=lambda index: abs(costs[index] - mean))
        if chosen > self._last and costs[self._last + 1] <= 1.0:
            chosen = self._last + 1
        if costs[chosen] >= 1.0:
            self._q = _REACT * max(self._caution, self._q)
        self._last = chosen
        return weights


def project(values: Sequence[float]) -> list[float]:
    """The point of the probability simplex that is nearest to ``values`` (Chen and Ye, arXiv:1101.6081)."""
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
