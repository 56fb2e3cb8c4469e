"""``bola-e``: BOLA with what its authors added for real players (Spiteri, Sitaraman and Sparacio, MMSys 2018).

BOLA knows only the buffer, so it begins at the lowest rate whatever the network does, and it swings between two rates
that the network lies between. BOLA-E, the rule of dash.js, mends both, and never asks for more than what the buffer
lasts for:

- Until one segment is buffered the throughput decides, and BOLA is told of as much buffer more (a placeholder) as
  makes it go on from there; that fades by a hundredth with every segment.
- A rate above the last one and above the throughput is not taken.
- InsufficientBuffer: no rate whose segment would take longer than the buffer lasts, at 0.7 of the throughput; the
  lowest one if the buffer is empty. The first two segments are free of that.

What was changed for a cache: the buffer is the time that the play is ahead of the timeline of
`kvabr.abr.view`. The players' 10 s and 30 s are shares of the deadline. BOLA never pauses, for a cache is
finite: where it would pause only the placeholder shrinks. Abandoning is the player's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvabr.abr.policy import Decision, Parameter, Policy
from kvabr.abr.view import Timeline, View

_FADE = 0.99
"""What is left of the placeholder after a segment."""
_INSUFFICIENT = 0.7
"""Share of the throughput that InsufficientBuffer reckons with."""
_FREE = 2
"""Segments that InsufficientBuffer lets pass."""


class BolaScores:
    """BOLA's choice among tracks, as a function of the buffer level."""

    def __init__(self, rates: Sequence[float], minimum_s: float, target_s: float) -> None:
        """Derive V and gamma p, so that the lowest rate is taken up to one buffer level and the highest from another.

        Args:
            rates: of the tracks, ascending.
            minimum_s: buffer level up to which the lowest is taken.
            target_s: buffer level from which on the highest is taken.
        """
        self._rates = rates
        self._utilities = [math.log(rate / rates[0]) + 1.0 for rate in rates]
        self._gp = max(1e-9, (self._utilities[-1] - 1.0) / (target_s / minimum_s - 1.0))
        self._vp = minimum_s / self._gp

    def scores(self, level_s: float) -> list[float]:
        """Utility per byte of every track at a buffer level; the highest is taken."""
        pairs = zip(self._utilities, self._rates, strict=True)
        return [(self._vp * (utility + self._gp) - level_s) / rate for utility, rate in pairs]

    def choose(self, level_s: float) -> int:
        """The track that BOLA takes; the higher one of two that score alike."""
        scores = self.scores(level_s)
        return max(range(len(scores)), key=lambda index: (scores[index], index))

    def least_level(self, index: int) -> float:
        """The buffer level from which on a track scores no less than those below it, seconds."""
        rate, utility = self._rates[index], self._utilities[index]
        return max(
            (
                self._vp * (self._gp + (rate * other - below * utility) / (rate - below))
                for other, below in zip(self._utilities[:index], self._rates[:index], strict=True)
                if below < rate
            ),
            default=0.0,
        )

    def most_level(self, index: int) -> float:
        """The buffer level above which a track's score is negative: there BOLA would rather pause, seconds."""
        return self._vp * (self._utilities[index] + self._gp)


class BolaE(Policy):
    """BOLA as in dash.js: starts by throughput, does not swing, does not outrun its buffer."""

    name: ClassVar[str] = "bola-e"
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "minimum": Parameter(0.01, 0.2, 0.05, log=True),
        "target": Parameter(0.05, 1.0, 0.25, log=True),
        "safety": Parameter(0.5, 1.0, 0.9),
    }

    def __init__(self, *, minimum: float = 0.05, target: float = 0.25, safety: float = 0.9) -> None:
        """Set the two buffer levels.

        Args:
            minimum: share of the deadline that the play is ahead, up to which BOLA takes the cheapest track,
            target: and from which on the best; at least twice the former.
            safety: share of the expected rate that counts as throughput.
        """
        self._minimum, self._target, self._safety = minimum, target, safety

    def start(self, view: View) -> None:
        """Lay the timeline."""
        self._line = Timeline(view)
        minimum_s = max(self._line.segment_s, self._minimum * view.deadline_s)
        self._target_s = max(2.0 * minimum_s, self._target * view.deadline_s)
        self._bola = BolaScores(self._line.rates, minimum_s, self._target_s)
        self._steady = False
        self._placeholder_s = 0.0
        self._last = 0

    def decide(self, view: View) -> Decision:
        """Choose, but no more than the buffer lasts for."""
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        level_s = self._line.level_s(view)
        chosen, reason = self._choose(view, level_s)
        most = self._affordable(view, level_s)
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
        """BOLA's choice with the placeholder, and without swinging."""
        self._placeholder_s = self._placeholder_s * _FADE if level_s > 0 else 0.0
        level_s += self._placeholder_s
        chosen = self._bola.choose(level_s)
        reason = f"BOLA: {level_s:.2f} s ahead, {self._placeholder_s:.2f} s of it placeholder"
        if chosen > self._last and chosen > throughput:
            chosen = max(throughput, self._last)
            reason = f"BOLA-E: no more than the throughput, {level_s:.2f} s ahead"
        excess_s = max(0.0, level_s - self._bola.most_level(chosen))
        self._placeholder_s -= min(excess_s, self._placeholder_s)
        return chosen, reason

    def _affordable(self, view: View, level_s: float) -> int:
        """The best track that InsufficientBuffer allows."""
        if self._line.arrived(view) < _FREE:
            return len(self._line.rates) - 1
        return self._line.carried(_INSUFFICIENT * view.rate * level_s / self._line.segment_s)
