"""``bola-e``: BOLA with its authors' additions for real players (Spiteri, Sitaraman and Sparacio, MMSys 2018).

BOLA knows only the buffer: it starts at the lowest rate regardless of the network, and oscillates between two rates
around the network's. BOLA-E, the rule of dash.js, fixes both, and never requests more than the buffer allows:

- Until one segment is buffered the throughput decides. BOLA is given a virtual buffer (a placeholder) that makes it
  continue from there; it fades by 1 % per segment.
- A rate above both the last one and the throughput is not chosen.
- InsufficientBuffer: no rate whose segment would take longer than the buffer lasts, at 0.7 of the throughput; the
  lowest rate if the buffer is empty. The first two segments are exempt.

Adapted to caches: the buffer is the time that the play is ahead of the timeline of `kvabr.abr.view.Timeline`. The
players' 10 s and 30 s become shares of the deadline. BOLA never pauses, since a cache is finite: where it would pause,
only the placeholder shrinks. Abandoning is left to the player.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvabr.abr.policy import Decision, Parameter, Policy
from kvabr.abr.view import Timeline, View

_FADE = 0.99
"""Share of the placeholder that is left after a segment."""
_INSUFFICIENT = 0.7
"""Share of the throughput that InsufficientBuffer assumes."""
_FREE = 2
"""Number of segments exempt from InsufficientBuffer."""


class BolaScores:
    """BOLA's choice among tracks as a function of the buffer level."""

    def __init__(self, rates: Sequence[float], minimum_s: float, target_s: float) -> None:
        """Derive V and gamma p from two buffer levels.

        Args:
            rates: of the tracks, ascending.
            minimum_s: buffer level up to which the lowest rate is chosen.
            target_s: buffer level from which the highest rate is chosen.
        """
        self._rates = rates
        self._utilities = [math.log(rate / rates[0]) + 1.0 for rate in rates]
        self._gp = max(1e-9, (self._utilities[-1] - 1.0) / (target_s / minimum_s - 1.0))
        self._vp = minimum_s / self._gp

    def scores(self, level_s: float) -> list[float]:
        """Return every track's utility per byte at a buffer level; the highest wins."""
        pairs = zip(self._utilities, self._rates, strict=True)
        return [(self._vp * (utility + self._gp) - level_s) / rate for utility, rate in pairs]

    def choose(self, level_s: float) -> int:
        """Return the index of BOLA's choice; the higher of two equal scores."""
        scores = self.scores(level_s)
        return max(range(len(scores)), key=lambda index: (scores[index], index))

    def least_level(self, index: int) -> float:
        """Return the buffer level in seconds from which a track scores no less than those below it."""
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
        """Return the buffer level in seconds above which a track's score is negative, so that BOLA would pause."""
        return self._vp * (self._utilities[index] + self._gp)


class BolaE(Policy):
    """BOLA as in dash.js: starts by throughput, does not oscillate, does not outrun its buffer."""

    name: ClassVar[str] = "bola-e"
    parameters: ClassVar[Mapping[str, Parameter]] = {
        "minimum": Parameter(0.01, 0.2, 0.05, log=True),
        "target": Parameter(0.05, 1.0, 0.25, log=True),
        "safety": Parameter(0.5, 1.0, 0.9),
    }

    def __init__(self, *, minimum: float = 0.05, target: float = 0.25, safety: float = 0.9) -> None:
        """Set the two buffer levels.

        Args:
            minimum: share of the deadline ahead of the timeline up to which BOLA chooses the cheapest track,
            target: and from which it chooses the best; at least twice the former.
            safety: share of the expected rate that counts as throughput.
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

    def decide(self, view: View) -> Decision:
        """Choose a track within what the buffer allows."""
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
        """Return BOLA's choice with the placeholder, without oscillation."""
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
        """Return the best track that InsufficientBuffer allows."""
        if self._line.arrived(view) < _FREE:
            return len(self._line.rates) - 1
        return self._line.carried(_INSUFFICIENT * view.rate * level_s / self._line.segment_s)
