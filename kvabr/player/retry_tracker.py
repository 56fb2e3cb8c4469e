"""What has been tried for each group and came to nothing, and what is therefore still worth asking for."""

from __future__ import annotations

from kvabr.abr.ladder import Ladder
from kvabr.types.catalog import Track


class RetryTracker:
    """The failures of one play."""

    def __init__(self, ladder: Ladder, attempts: int) -> None:
        """Nothing has failed.

        Args:
            ladder: the tracks.
            attempts: times that one group of one track is asked for before it counts as not to be had.
        """
        self._ladder, self._attempts = ladder, attempts
        self._failures: dict[tuple[int, str], int] = {}
        self._faults: dict[str, str] = {}
        self._abandoned: set[int] = set()

    @property
    def last_words(self) -> tuple[str, ...]:
        """What went wrong last with a transfer, and with the engine, for a play that is given up."""
        return tuple(self._faults.values())

    def failed(self, group: int, track: str, reason: str) -> None:
        """A group did not come."""
        self._failures[group, track] = self._failures.get((group, track), 0) + 1
        self._faults["transfer"] = f"last fault: {reason}"

    def engine_failed(self, reason: str) -> None:
        """The engine could not compute what it was to."""
        self._faults["engine"] = f"the engine failed: {reason}"

    def abandoned(self, group: int) -> None:
        """A transfer that a group needs was given up, since it would have come too late."""
        self._abandoned.add(group)

    def spent(self, group: int, track: str) -> bool:
        """Whether a group of a track has failed too often."""
        return self._failures.get((group, track), 0) >= self._attempts

    def cheapest_left(self, group: int) -> Track | None:
        """The cheapest track on which a group has not failed too often."""
        return next((track for track in self._ladder.tracks if not self.spent(group, track.name)), None)

    def usable(self, group: int, track: str, *, upgrade: bool, engine: bool) -> str | None:
        """The track asked for, or, if that group of it has failed too often, the cheapest one left; None if none is.

        If there is an engine, a group that has failed so often on all tracks together is its: no more time is lost.

        Args:
            group: which.
            track: what the policy asks for.
            upgrade: whether the group is in place already; then no other track will do.
            engine: whether there is one.
        """
        if not upgrade and group in self._abandoned:
            track = self._ladder.cheapest  # asking for the same again would only be given up again
        if not self._failures:
            return track
        if engine and not upgrade:
            failures = sum(count for (other, _), count in self._failures.items() if other == group)
            if failures >= self._attempts:
                return None
        if not self.spent(group, track):
            return track
        left = None if upgrade else self.cheapest_left(group)
        return None if left is None else left.name
