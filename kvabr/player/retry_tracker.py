"""Failed requests of a play, and which tracks are still worth requesting."""

from __future__ import annotations

from collections import Counter

from kvabr.abr.ladder import Ladder
from kvabr.types.catalog import Track

_TRACKS = 2
"""Tracks on which a group may fail before its upgrades end."""


class RetryTracker:
    """The failures of one play.

    No group is requested more than ``attempts`` times in vain on the same track. Its upgrades end once that happened on
    two tracks: one damaged track must not rule out the others, nor may a hostile origin have every track fetched.
    """

    def __init__(self, ladder: Ladder, attempts: int) -> None:
        self._ladder, self._attempts = ladder, attempts
        self._failures: Counter[tuple[int, str]] = Counter()
        self._of_group: Counter[int] = Counter()
        """Failures of each group on all tracks together."""
        self._dropped: Counter[tuple[int, str]] = Counter()
        self._faults: dict[str, str] = {}
        self._abandoned: set[int] = set()
        self.unavailable: set[tuple[int, str]] = set()
        """See `View.unavailable`."""

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last faults of a transfer and of the engine, for a play that is given up."""
        return tuple(self._faults.values())

    def failed(self, group: int, track: str, reason: str, *, upgrade: bool, counts: bool = True) -> None:
        """Note that a request failed; ``upgrade``: the group is in place on another track.

        ``counts``: it counts as an attempt.
        """
        self._failures[group, track] += counts
        self._of_group[group] += counts
        if self._failures[group, track] >= self._attempts:
            self.unavailable.add((group, track))
            every = [(group, one.name) for one in self._ladder.catalog.tracks]
            if upgrade and sum(one in self.unavailable for one in every) >= _TRACKS:
                self.unavailable.update(every)
        self._faults["transfer"] = f"last fault: {reason}"

    def added(self, group: int, track: str) -> None:
        """Note that a track of a group exists now that did not before."""
        if self._failures[group, track] < self._attempts:
            self.unavailable.discard((group, track))

    def engine_failed(self, reason: str) -> None:
        """Note that the engine failed."""
        self._faults["engine"] = f"the engine failed: {reason}"

    def abandoned(self, group: int) -> None:
        """Note that a required transfer was abandoned because it would have been late."""
        self._abandoned.add(group)

    def dropped(self, group: int, track: str) -> None:
        """Note that an upgrade was cancelled because it could not end in time."""
        self._dropped[group, track] += 1
        if self._dropped[group, track] >= self._attempts:  # the policy insists
            self.unavailable.add((group, track))

    def cheapest_left(self, group: int) -> Track | None:
        """Return the cheapest track on which a group has not failed too often; None if there is none."""
        return next((track for track in self._ladder.tracks if (group, track.name) not in self.unavailable), None)

    def usable(self, group: int, track: str, *, engine: bool) -> str | None:
        """Return the track on which to request a missing group: ``track`` if possible, else the cheapest one left.

        None if none is left, or if there is an engine and the group has failed ``attempts`` times on all tracks
        together: then the engine gets it, and no more time is lost.
        """
        if group in self._abandoned:
            track = self._ladder.cheapest  # the same request would only be abandoned again
        if engine and self._of_group[group] >= self._attempts:
            return None
        if (group, track) not in self.unavailable:
            return track
        left = self.cheapest_left(group)
        return None if left is None else left.name
