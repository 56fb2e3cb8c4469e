"""``rate``: the bandwidth rule of video players.

Every group plays for an equal share of the deadline, like a segment of a video, so that a track has a bit rate.
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policy import Decision, FrontToBack
from kvabr.abr.view import View


class Rate(FrontToBack):
    """Choose the track that the estimated bandwidth carries, with Shaka's hysteresis (0.95 to stay, 0.85 to rise)."""

    name: ClassVar[str] = "rate"

    def start(self, view: View) -> None:
        """Compute the rate of every track, bytes per second."""
        self._rates = tuple(track.total_bytes / view.deadline_s for track in view.ladder.tracks)

    def choose(self, view: View, group: int) -> Decision:
        """Choose the largest track that the estimate carries."""
        chosen, rates, names = 0, self._rates, view.ladder.names
        for index, band in enumerate(rates):
            above = rates[index + 1] / 0.85 if index + 1 < len(rates) else float("inf")
            if band / 0.95 <= view.rate <= above:
                chosen = index
        reason = f"estimate {view.rate / 125e3:.1f} Mbit/s, track needs {rates[chosen] / 125e3:.1f}"
        return Decision.fetch(group, names[chosen], reason, dict(zip(names, rates, strict=True)))
