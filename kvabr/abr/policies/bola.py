"""``bola``: buffer-based, without a bandwidth estimate (BOLA; Spiteri et al., INFOCOM 2016; constants as in dash.js).

The buffer is the number of groups that the play is ahead of a timeline with equal shares of the deadline.
"""

from __future__ import annotations

import math
from typing import ClassVar

from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View

_MINIMUM_SHARE = 0.05
"""Buffer level, as a share of all groups, below which the cheapest track is chosen."""
_TARGET_SHARE = 0.25
"""Buffer level, as a share of all groups, above which the best track is chosen."""


class Bola(Policy):
    """Maximise utility per byte against the buffer level."""

    name: ClassVar[str] = "bola"

    def start(self, view: View) -> None:
        """Derive V and gamma p from the utilities and the two buffer levels."""
        sizes = [track.total_bytes / view.groups for track in view.ladder.tracks]
        self._sizes = sizes
        self._utilities = [math.log(size / sizes[0]) + 1.0 for size in sizes]
        minimum = max(1.0, _MINIMUM_SHARE * view.groups)
        target = max(2.0 * minimum, _TARGET_SHARE * view.groups)
        self._gp = max(1e-9, (self._utilities[-1] - 1.0) / (target / minimum - 1.0))
        self._vp = minimum / self._gp

    def decide(self, view: View) -> Decision:
        """Choose the track with the highest score."""
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        arrived = view.groups - len(view.missing) - len(view.in_flight)
        level = max(0.0, arrived - view.now / view.deadline_s * view.groups)
        scores = [
            (self._vp * (utility + self._gp) - level) / size
            for utility, size in zip(self._utilities, self._sizes, strict=True)
        ]
        chosen = max(range(len(scores)), key=scores.__getitem__)
        names = view.ladder.names
        return Decision.fetch(
            group, names[chosen], f"{level:.1f} groups ahead of the timeline", dict(zip(names, scores, strict=True))
        )
