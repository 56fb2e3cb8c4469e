"""A play as a video player would see it, for the rules that come from video.

There is no playback and no playback buffer here: what counts is that all is in place by the deadline. The rules are
given a timeline on which every group has an equal share of the deadline, as a segment has its duration. A track then
has a bit rate, and the buffer is how far the play is ahead of that timeline: it is empty for who falls behind, and who
never falls behind meets the deadline.
"""

from __future__ import annotations

from kvabr.abr.view import View


class Timeline:
    """The timeline of one play. Rates are bytes per second, times are seconds."""

    def __init__(self, view: View) -> None:
        self.names = view.ladder.names
        """The tracks that are worth playing, cheapest first."""
        self.rates = tuple(track.total_bytes / view.deadline_s for track in view.ladder.tracks)
        """The rate of each, bytes per second."""
        self.segment_s = view.deadline_s / view.groups
        """A group's share of the deadline."""

    def arrived(self, view: View) -> int:
        """Groups that have arrived, or that the engine takes."""
        return view.groups - len(view.missing_groups) - len(view.in_flight)

    def level_s(self, view: View) -> float:
        """How far the play is ahead, seconds: what the players call the buffer level; never below 0."""
        return max(0.0, self.arrived(view) * self.segment_s - view.now)

    def carried(self, rate: float) -> int:
        """Index of the best track that a rate carries; 0 if it carries none."""
        return max((index for index, needed in enumerate(self.rates) if needed <= rate), default=0)
