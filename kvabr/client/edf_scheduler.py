"""Earliest deadline first, in the few priorities that a connection has.

MoQT has 256 priorities, and a play uses them all: those below 128 for what it needs, the others for upgrades. Here
both halves are divided into `LEVELS` levels, one for each of the plays whose deadlines come first; all further plays
share the last. So what any play needs goes before what would only be better, and within both the play that ends first
goes first: if the link can serve all plays in time, this order does.

A play that is late waits behind those that can still be on time, but only once: it is given one deadline more, and
whatever begins after that was due is behind it for good. So nobody starves.
"""

from __future__ import annotations

from bisect import insort
from typing import Generic, TypeVar

K = TypeVar("K")

LEVELS = 16
_NEEDED = 128
"""Priorities below are for what a play needs."""


def wire_priority(level: int, priority: int) -> int:
    """A priority among all plays.

    Args:
        level: of the play, 0 for the one whose deadline comes first.
        priority: among the play's own requests, 0 to 255.
    """
    span = _NEEDED // LEVELS
    if priority < _NEEDED:
        return level * span + priority * span // _NEEDED
    return _NEEDED + level * span + (priority - _NEEDED) * span // _NEEDED


class Order(Generic[K]):
    """Levels of plays. They change as seldom as can be, since each change is a message for every request under way."""

    def __init__(self) -> None:
        self._plays: list[tuple[float, int, K]] = []
        """Earliest first: when due, the how-manieth to come, and who."""
        self._levels: dict[K, int] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._plays)

    def level(self, play: K) -> int:
        """Of a play that was added."""
        return self._levels[play]

    def add(self, play: K, due_s: float) -> list[K]:
        """Let a play in that is due at ``due_s``; returns the other plays whose levels have changed."""
        entry = (due_s, self._came, play)
        self._came += 1
        insort(self._plays, entry)
        place = self._plays.index(entry)
        before = self._levels[self._plays[place - 1][2]] if place else -1
        last = place + 1 == len(self._plays)
        behind = LEVELS if last else self._levels[self._plays[place + 1][2]]
        if before + 1 < behind:
            # Most plays come in the order in which they are due: leave as much room behind as there is.
            self._levels[play] = before + 1 if last else (before + behind) // 2
            return []
        self._levels[play] = -1
        return [other for other in self._relevel() if other != play]

    def remove(self, play: K) -> list[K]:
        """A play has ended; returns those whose levels have changed."""
        self._plays = [entry for entry in self._plays if entry[2] != play]
        del self._levels[play]
        shared = len(set(self._levels.values())) < len(self._plays)
        return self._relevel() if shared else []

    def _relevel(self) -> list[K]:
        changed = []
        for place, (_, _, play) in enumerate(self._plays):
            level = min(place, LEVELS - 1)
            if self._levels[play] != level:
                self._levels[play] = level
                changed.append(play)
        return changed
