"""The live edge: how much of a cache exists that is still being prefilled while it is played."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvabr.types.errors import UsageError

_MOST_PACE = 4.0
"""The pace of the groups so far may differ from what was expected by this factor, to be believed of the rest."""
_LATE, _LATE_S = 4.0, 0.25
"""Layers that are later than this multiple of what was announced, and this many seconds, are not waited for."""


@dataclass(frozen=True, slots=True)
class EdgeChanges:
    """What news say besides how many groups are published."""

    left_out: Collection[tuple[int, str]] = ()
    """Of the new groups, those and their tracks that do not exist, or not yet."""
    added: Collection[tuple[int, str]] = ()
    """Groups and tracks that exist now and did not before, although the group did."""
    coming: Mapping[int, float | None] = field(default_factory=dict)
    """Groups with news of further tracks: in how many seconds these should follow; None: none follow any more."""
    pushed: Container[int] | None = None
    """The groups whose base was asked for before they were published; None: all."""


NO_CHANGES = EdgeChanges()


class LiveEdge:
    """Learns a producer's pace from when its groups appear."""

    def __init__(self, expected_s: Sequence[float]) -> None:
        """Begin with no group published.

        ``expected_s``: when each group should be published, ascending, seconds since the play began.
        """
        finite = all(math.isfinite(time_s) for time_s in expected_s)
        if not expected_s or not finite or any(later < sooner for sooner, later in pairwise(expected_s)):
            raise UsageError("the times at which groups are expected must be finite, and ascend; there must be some")
        self._expected_s = expected_s
        self.edge = 0
        """Groups that are published: the first ones."""
        self._first_s = self._last_s = 0.0
        self._firsts = 0
        """Groups that were published when the first were seen: they may have been there for long."""
        self.ended: str | None = None
        """Why the producer stopped before the last group; None if it has not."""
        self.coming: dict[int, tuple[float, float]] = {}
        """Groups of which further tracks are to follow: when, and after how many seconds."""

    def reach(self, edge: int, now: float) -> None:
        """Note that the first ``edge`` groups are published now; those before `edge` were published earlier."""
        if not self.edge:
            self._first_s, self._firsts = now, edge
        self.edge, self._last_s = edge, now

    def expect(self, coming: Mapping[int, float | None], now: float) -> None:
        """Note news of which groups further tracks are to follow, and in how many seconds; see `EdgeChanges.coming`."""
        for group, rest_s in coming.items():
            if rest_s is None:
                self.coming.pop(group, None)
            elif group not in self.coming or self.coming[group][1] != rest_s:
                self.coming[group] = now + rest_s, rest_s

    def rest_s(self, group: int, now: float) -> float | None:
        """Return the seconds until further tracks of a group should follow; None if they are not to be waited for.

        What is late is expected to take as long again.
        """
        due_s, announced_s = self.coming[group]
        last_s = due_s + _LATE * announced_s + _LATE_S
        return None if now >= last_s else min(abs(now - due_s), last_s - now)

    def ends_s(self, now: float) -> float:
        """Return when the last group should be published, or was, seconds since the play began."""
        return self.ready_s(len(self._expected_s) - 1, now)

    def late_s(self, now: float) -> float:
        """Return by how much the next group is late, seconds; 0.0 as long as that is no more than a group takes."""
        if self.edge == len(self._expected_s):
            return 0.0
        before = self._expected_s[self.edge - 1] if self.edge else 0.0
        took_s = max(0.0, self._expected_s[self.edge] - before)
        late_s = self.ready_s(self.edge, now) - (self._last_s + took_s if self.edge else self._expected_s[0])
        return late_s if late_s > took_s else 0.0

    def ready_s(self, group: int, now: float) -> float:
        """Return when a group should be published; of one that is, when the last one was."""
        expected = self._expected_s
        if group < self.edge:
            return self._last_s
        if not self.edge:
            return expected[group] + max(0.0, now - expected[0])
        pace, since_s = 1.0, expected[self.edge - 1]
        if (planned_s := since_s - expected[self._firsts - 1]) > 0:
            pace = min(max((self._last_s - self._first_s) / planned_s, 1.0 / _MOST_PACE), _MOST_PACE)
        late_s = max(0.0, now - self._last_s - pace * (expected[self.edge] - since_s))
        return self._last_s + pace * (expected[group] - since_s) + late_s
