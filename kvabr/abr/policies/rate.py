"""``rate``: Shaka Player's rule on a timeline where every group has an equal share of the deadline.

A group plays for deadline / groups seconds, so a track has a bandwidth. A track is chosen when the estimate lies within
its band, with Shaka's hysteresis (0.95 to stay, 0.85 to go up).
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View

_DOWNGRADE = 0.95
_UPGRADE = 0.85


class Rate(Policy):
    """Choose the track whose bandwidth the estimate carries."""

    name: ClassVar[str] = "rate"

    def start(self, view: View) -> None:
        """Compute the bandwidth of every track."""
        self._bands = [track.total_bytes / view.deadline_s for track in view.ladder.tracks]

    def decide(self, view: View) -> Decision:
        """Scan the tracks by ascending bandwidth; the last whose band holds the estimate wins."""
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        chosen = 0
        for index, band in enumerate(self._bands):
            above = self._bands[index + 1] / _UPGRADE if index + 1 < len(self._bands) else float("inf")
            if band / _DOWNGRADE <= view.rate <= above:
                chosen = index
        reason = f"estimate {view.rate / 125e3:.1f} Mbit/s, track needs {self._bands[chosen] / 125e3:.1f}"
        names = view.ladder.names
        return Decision.fetch(group, names[chosen], reason, dict(zip(names, self._bands, strict=True)))
