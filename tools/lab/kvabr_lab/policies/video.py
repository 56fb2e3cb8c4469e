"""Rules of video players: ``bola``, ``bola-e``, ``dynamic`` and ``l2a``.

A KV cache has no playback buffer: everything must be in place by the deadline. These policies use a timeline instead,
on which every group plays for an equal share of the deadline. A track then has a bit rate, and the buffer level is the
play's lead over the timeline. Levels in seconds are converted to fractions of the deadline. The player decides when to
abandon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

from kvabr.abr.policy import Decision, FrontToBack
from kvabr.abr.view import View
from kvabr.types.parameters import Parameter


class Timeline:
    """A play as a video player sees it. Rates are bytes/s."""

    def __init__(self, view: View) -> None:
        self.names = view.ladder.names
        """Tracks worth playing, cheapest first."""
        self.rates = tuple(track.total_bytes / view.deadline_s for track in view.ladder.tracks)
        self.segment_s = view.deadline_s / view.groups

    def arrived(self, view: View) -> int:
        """Return the number of groups received or assigned to the engine."""
        return view.groups - len(view.missing_groups) - len(view.in_flight)

    def level_s(self, view: View) -> float:
        """Return the play's lead over the timeline, at least 0."""
        return max(0.0, self.arrived(view) * self.segment_s - view.now)

    def carried(self, rate: float) -> int:
        """Return the index of the best track within ``rate``, or 0."""
        return max((index for index, needed in enumerate(self.rates) if needed <= rate), default=0)


class BolaScores:
    """BOLA's choice among tracks by buffer level (Spiteri et al., INFOCOM 2016)."""

    def __init__(self, rates: Sequence[float], minimum: float, target: float) -> None:
        """Derive V and gamma p from the buffer levels (any unit) for the lowest and the highest rate."""
        self._rates = rates
        self._utilities = [math.log(rate / rates[0]) + 1.0 for rate in rates]
        self._gp = max(1e-9, (self._utilities[-1] - 1.0) / (target / minimum - 1.0))
        self._vp = minimum / self._gp

    def scores(self, level: float) -> list[float]:
        """Return every track's utility per byte at a buffer level; the highest is chosen."""
        pairs = zip(self._utilities, self._rates, strict=True)
        return [(self._vp * (utility + self._gp) - level) / rate for utility, rate in pairs]

    def choose(self, level: float) -> int:
        """Return the index of the highest score; if scores are equal, the higher index."""
        scores = self.scores(level)
        return max(range(len(scores)), key=lambda index: (scores[index], index))

    def least_level(self, index: int) -> float:
        """Return the buffer level from which on a track scores at least as much as the tracks below it."""
        rate, utility = self._rates[index], self._utilities[index]
        return max(
            (
                self._vp * (self._gp + (rate * other - below * utility) / (rate - below))
                for other, below in zip(self._utilities[:index], self._rates[:index], strict=True)
                if below < rate
            ),
            default=0.0,
        )

    def max_level(self, index: int) -> float:
        """Return the buffer level above which a track's score is negative and BOLA would pause."""
        return self._vp * (self._utilities[index] + self._gp)


class Bola(FrontToBack):
    """Maximises utility per byte by buffer level in groups, without a bandwidth estimate; constants as in dash.js."""

    name: ClassVar[str] = "bola"

    def start(self, view: View) -> None:
        """Derive the scores: the cheapest track below 5 % of all groups, the best track above 25 %."""
        minimum = max(1.0, 0.05 * view.groups)
        sizes = [track.total_bytes / view.groups for track in view.ladder.tracks]
        self._bola = BolaScores(sizes, minimum, max(2.0 * minimum, 0.25 * view.groups))

    def choose(self, view: View, group: int) -> Decision:
        """Choose the track with the highest score."""
        arrived = view.groups - len(view.missing) - len(view.in_flight)
        level = max(0.0, arrived - view.now / view.deadline_s * view.groups)
        scores = dict(zip(view.ladder.names, self._bola.scores(level), strict=True))
        return Decision.fetch(
            group, max(scores, key=scores.__getitem__), f"{level:.1f} groups ahead of the timeline", scores
        )


_FADE = 0.99
"""Fraction of BOLA-E's placeholder that remains after a segment."""
_INSUFFICIENT = 0.7
"""Fraction of the throughput that InsufficientBuffer assumes."""
_FREE = 2
"""Number of first segments to which InsufficientBuffer does not apply."""


class BolaE(FrontToBack):
    """BOLA with its authors' additions, as in dash.js (Spiteri, Sitaraman and Sparacio, MMSys 2018).

    Plain BOLA starts at the lowest rate and oscillates between two rates around the network's rate. Here the throughput
    decides until one segment is buffered; then BOLA continues with a virtual buffer (a placeholder) that shrinks by 1 %
    per segment. Rates above both the last rate and the throughput are excluded. So are rates at which a segment would
    take longer than the buffer lasts, at 0.7 of the throughput (InsufficientBuffer). If BOLA would pause, only the
    placeholder is reduced, since a cache is finite.
    """

    name: ClassVar[str] = "bola-e"
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "minimum": Parameter(0.01, 0.2, 0.05, log=True),
        "target": Parameter(0.05, 1.0, 0.25, log=True),
        "safety": Parameter(0.5, 1.0, 0.9),
    }

    def __init__(self, *, minimum: float = 0.05, target: float = 0.25, safety: float = 0.9) -> None:
        """Set the two buffer levels.

        Args:
            minimum: Lead over the timeline, as a fraction of the deadline, up to which BOLA chooses the cheapest track.
            target: Lead from which on it chooses the best track; at least twice the minimum.
            safety: Fraction of the expected rate that counts as throughput.
        """
        self._minimum, self._target, self._safety = minimum, target, safety

    def start(self, view: View) -> None:
        """Set up the timeline."""
        self._line = Timeline(view)
        minimum_s = max(self._line.segment_s, self._minimum * view.deadline_s)
        self._target_s = max(2.0 * minimum_s, self._target * view.deadline_s)
        self._bola = BolaScores(self._line.rates, minimum_s, self._target_s)
        self._steady = False
        self._placeholder_s = 0.0
        self._last = 0

    def choose(self, view: View, group: int) -> Decision:
        """Choose a track within the buffer's limits."""
        level_s = self._line.level_s(view)
        chosen, reason = self._choose(view, level_s)
        most = len(self._line.rates) - 1
        if self._line.arrived(view) >= _FREE:
            most = self._line.carried(_INSUFFICIENT * view.rate * level_s / self._line.segment_s)
        if most < chosen:
            chosen, reason = most, f"InsufficientBuffer: only {level_s:.2f} s ahead"
        self._last = chosen
        return Decision.fetch(group, self._line.names[chosen], reason)

    def _choose(self, view: View, level_s: float) -> tuple[int, str]:
        throughput = self._line.carried(self._safety * view.rate)
        if not self._steady:
            self._placeholder_s = max(0.0, self._bola.least_level(throughput) - level_s)
            self._steady = level_s >= self._line.segment_s
            return throughput, f"starting, the throughput of {view.rate / 125e3:.1f} Mbit/s decides"
        return self._by_buffer(level_s, throughput)

    def _by_buffer(self, level_s: float, throughput: int) -> tuple[int, str]:
        self._placeholder_s = self._placeholder_s * _FADE if level_s > 0 else 0.0
        level_s += self._placeholder_s
        chosen = self._bola.choose(level_s)
        reason = f"BOLA: {level_s:.2f} s ahead, {self._placeholder_s:.2f} s of it placeholder"
        if chosen > self._last and chosen > throughput:
            chosen = max(throughput, self._last)
            reason = f"BOLA-E: no more than the throughput allows, {level_s:.2f} s ahead"
        excess_s = max(0.0, level_s - self._bola.max_level(chosen))
        self._placeholder_s -= min(excess_s, self._placeholder_s)
        return chosen, reason


_STABLE = 0.8
"""Fraction of BOLA's target level at which ``dynamic`` switches to BOLA (dash.js with six tracks: 18 s of 22 s)."""


class Dynamic(BolaE):
    """The default rule of dash.js: throughput at a low buffer, BOLA at a high buffer, InsufficientBuffer for both.

    It switches to BOLA at the stable buffer time, and back below half of it.
    """

    name: ClassVar[str] = "dynamic"

    def start(self, view: View) -> None:
        """Start with the throughput rule."""
        super().start(view)
        self._on = False

    def _choose(self, view: View, level_s: float) -> tuple[int, str]:
        self._on = level_s >= _STABLE * self._target_s * (0.5 if self._on else 1.0)
        throughput = self._line.carried(self._safety * view.rate)
        if self._on:
            return self._by_buffer(level_s, throughput)
        return throughput, f"throughput: {view.rate / 125e3:.1f} Mbit/s, {level_s:.2f} s ahead"


_SAFE = 0.9
"""Fraction of the expected rate that counts as throughput while L2A starts."""
_REACT = 2.0
"""Factor of Q if the choice exceeds the throughput."""


class L2A(FrontToBack):
    """Learn2Adapt, online convex optimisation (Karagkioules, Mekuria, Griffioen and Wagenaar, MMSys 2020).

    After each segment, a distribution over the tracks makes a gradient step along each track's effect on the buffer at
    the observed throughput, and is projected onto the simplex. The step is weighted by a multiplier Q, which grows
    while segments arrive more slowly than they play. The track nearest to the mean rate is chosen. As in dash.js, the
    choice rises one step at a time within the throughput, and Q doubles if the choice exceeds it. The unit of time is
    one group's share of the deadline; L2A-LL has segments of about one second.
    """

    name: ClassVar[str] = "l2a"
    estimator: ClassVar[str] = "last"
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "horizon": Parameter(2.0, 32.0, 4.0, log=True),
        "target": Parameter(0.5, 16.0, 1.5, log=True),
    }

    def __init__(self, *, horizon: float = 4.0, target: float = 1.5) -> None:
        """Set the number of groups until learning settles, and the lead in groups from which learned weights decide."""
        self._target = target
        self._caution = horizon**0.99
        self._step = 1.0 / (2.0 * max(horizon, self._caution * horizon**0.5))

    def start(self, view: View) -> None:
        """Start with the throughput rule."""
        self._line = Timeline(view)
        self._weights: list[float] | None = None
        self._q = 0.0
        self._last = self._seen = 0

    def choose(self, view: View, group: int) -> Decision:
        """Learn from the groups received since the last decision; choose the track nearest to the mean."""
        line, arrived = self._line, self._line.arrived(view)
        if self._weights is None:
            self._last = line.carried(_SAFE * view.rate)
            reason = f"starting, the throughput of {view.rate / 125e3:.1f} Mbit/s decides"
            if arrived and line.level_s(view) >= self._target * line.segment_s:
                self._q = self._caution
                self._weights = [float(index == self._last) for index in range(len(line.rates))]
        else:
            if arrived != self._seen and view.rate > 0:
                self._weights = self._learn(self._weights, [rate / view.rate for rate in line.rates])
            reason = f"learnt weights {', '.join(f'{weight:.2f}' for weight in self._weights)}, Q {self._q:.2f}"
        self._seen = arrived
        return Decision.fetch(group, line.names[self._last], reason)

    def _learn(self, before: list[float], costs: Sequence[float]) -> list[float]:
        """Make one step and return the new weights; ``costs`` are tracks' seconds per group over the group's share."""
        force = self._step * (self._q + self._caution)
        moved = [weight + (force if cost <= 1.0 else -force) * cost for weight, cost in zip(before, costs, strict=True)]
        weights = project(moved)
        mean = _dot(weights, costs)
        # The direction of the step, as in the paper's queue: twice the new weights minus the old ones.
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
