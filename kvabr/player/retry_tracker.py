"""Failed requests of a play, and which tracks are still worth requesting."""

from __future__ import annotations

from kvabr.abr.ladder import Ladder
from kvabr.types.catalog import Track


class RetryTracker:
    """The failures of one play."""

    def __init__(self, ladder: Ladder, attempts: int) -> None:
        """Begin without failures.

        Args:
            ladder: the tracks.
            attempts: failures of one group on one track after which that track is unavailable for the group.
        """
        self._ladder, self._attempts = ladder, attempts
        self._failures: dict[tuple[int, str], int] = {}
        self._faults: dict[str, str] = {}
        self._abandoned: set[int] = set()

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last faults of a transfer and of the engine, for a play that is given up."""
        return tuple(self._faults.values())

    def failed(self, group: int, track: str, reason: str) -> None:
        """Note that a request failed."""
        self._failures[group, track] = self._failures.get((group, track), 0) + 1
        self._faults["transfer"] = f"last fault: {reason}"

    def engine_failed(self, reason: str) -> None:
        """Note that the engine failed."""
        self._faults["engine"] = f"the engine failed: {reason}"

    def abandoned(self, group: int) -> None:
        """Note that a required transfer was abandoned because it would have been late."""
        self._abandoned.add(group)

    def spent(self, group: int, track: str) -> bool:
        """Return whether a group has failed too often on a track."""
        return self._failures.get((group, track), 0) >= self._attempts

    def cheapest_left(self, group: int) -> Track | None:
        """Return the cheapest track on which a group has not failed too often; None if there is none."""
        return next((track for track in self._ladder.tracks if not self.spent(group, track.name)), None)

    def usable(self, group: int, track: str, *, upgrade: bool, engine: bool) -> str | None:
        """Return ``track``, or the cheapest one left if it has failed too often for the group; None if none is left.

        If there is an engine, it gets a group that has failed that often on all tracks together: no more time is lost.

        Args:
            group: the group to request.
            track: the track that the policy wants.
            upgrade: whether the group is in place already; then no other track will do.
            engine: whether the play has an engine.
        """
        if not upgrade and group in self._abandoned:
            track = self._ladder.cheapest  # the same request would only be abandoned again
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
