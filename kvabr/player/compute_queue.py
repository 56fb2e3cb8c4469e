"""The engine's queue: which groups are left to it, and when it starts to compute them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvabr.abr.recompute_planner import Plan, plan
from kvabr.abr.view import View
from kvabr.player.session_types import GroupRecord
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode

_LATE = 1.25
"""A tail that ends after this multiple of the deadline is far too late."""
_PATIENCE = 0.5
"""Share of the deadline before which such a tail is not started, even if the link has carried nothing."""


class ComputeQueue:
    """What the engine computes now, and what it will compute later."""

    def __init__(self, cost: PrefillCost, mode: EngineMode, view: View, tick_s: float) -> None:
        self._cost, self._mode, self._view, self._tick_s = cost, mode, view, tick_s
        self.planned: range = range(0)
        """Groups that the planner leaves to the engine for now; re-planned at every event."""
        self.chosen: set[int] = set()
        """Groups that are left to the engine for good, by the policy or because no request can bring them."""
        self.computing: tuple[int, int] | None = None
        """The groups that the engine computes now: the first, and the one after the last."""
        self.started_s = 0.0
        self._free_s = 0.0

    def backlog_s(self, now: float) -> float:
        """Return the seconds until the engine has computed what it computes now and all of `chosen`."""
        running = max(0.0, self._free_s - now) if self.computing is not None else 0.0
        here, tail = self._here(), self._chosen_tail()
        if tail is not None and not self._view.catalog.every_token:
            return running + (0.0 if here else self._seconds(tail, self._view.groups))
        return running + sum(self._seconds(group, group + 1) for group in self.chosen if group not in here)

    def _here(self) -> range:
        return range(*(self.computing or (0, 0)))

    def waiting(self) -> bool:
        """Return whether groups are left to the engine that it has not started."""
        return bool(self.planned) or bool(self.chosen)

    def takes(self, group: int) -> bool:
        """Return whether an absent group is left to the engine and hidden from the policy."""
        if group in self.planned or group in self.chosen or group in self._here():
            return True
        tail = self._chosen_tail()
        return tail is not None and group >= tail

    def _chosen_tail(self) -> int | None:
        """Return the first group of the tail that is left to the engine for good; None if there is none."""
        return self._view.catalog.cut(min(self.chosen)) if self._mode == "suffix" and self.chosen else None

    def replan(self, absent: Collection[int], *, dead: bool = False) -> tuple[bool, Plan | None]:
        """Re-plan what the network will not bring. Return whether `planned` changed, and the plan, if there is one."""
        if self.computing is not None and self._mode == "suffix":
            return False, None
        left = [group for group in absent if group not in self.chosen]
        found = plan(self._view, self._cost, self._mode, left, self._free_s, dead=dead)
        planned = range(0) if found is None else range(found.first, found.last)
        changed = planned != self.planned
        self.planned = planned
        return changed, found

    def overdue(self, now: float, absent: Collection[int]) -> bool:
        """Return whether the network is late by as long as the engine would take: to wait on is no better bet then.

        Bytes that are lost on the way keep looking as if they were about to arrive.
        """
        if not absent or now < self._view.deadline_s:
            return False  # as most often, without adding up what the engine takes
        first = min(absent)
        if self._mode == "suffix":
            seconds = self._seconds(self._view.catalog.cut(first), self._view.groups)
        else:
            seconds = sum(self._seconds(group, group + 1) for group in absent)
        return now - self._view.deadline_s >= seconds

    def ready(
        self, now: float, absent: Collection[int], records: Sequence[GroupRecord], *, at_once: bool = False
    ) -> tuple[int, int] | None:
        """Return the groups that the engine should start now: everything before them is in place. Or None.

        With ``at_once``, a tail that could still be shortened is not held back: the policy alone says what is computed.
        """
        if self.computing is not None or not self.waiting():
            return None
        wanted = (*self.chosen, *(group for group in self.planned if group in absent))
        first = min(wanted, default=len(records))
        if self._mode == "suffix" and first < len(records):
            first = self._view.catalog.cut(first)
        if first >= len(records) or any(record.ready_s is None for record in records[:first]):
            return None
        if self._mode == "hole":
            return first, self._run_end(first, now, absent)
        return (first, len(records)) if at_once or self._last_call(first, now) else None

    def start(self, first: int, last: int, now: float) -> None:
        """Note that the engine starts groups ``first`` to ``last`` - 1."""
        self.computing, self.started_s = (first, last), now
        self._free_s = now + self._seconds(first, last)

    def finish(self) -> float:
        """Note that the engine is done; return when it was started."""
        self.chosen.difference_update(self._here())
        self.computing = None
        return self.started_s

    def _seconds(self, first: int, last: int) -> float:
        begin, end = map(self._view.catalog.tokens_before, (first, last))
        return self._cost.seconds(begin, end - begin)

    def _run_end(self, first: int, now: float, absent: Collection[int]) -> int:
        """Return the end of the next run: one group if there is time to re-plan, all if only that is in time."""
        last = first + 1
        while last in absent and (last in self.planned or last in self.chosen):
            last += 1
        one_by_one = sum(self._seconds(group, group + 1) for group in range(first, last))
        in_time = self._view.deadline_s - now
        return last if self._seconds(first, last) <= in_time < one_by_one else first + 1

    def _last_call(self, first: int, now: float) -> bool:
        """Return whether a tail must be started now; until then the network may still shorten it."""
        deadline_s, seconds = self._view.deadline_s, self._seconds(first, self._view.groups)
        if now + seconds > _LATE * deadline_s and first != self._chosen_tail():
            # Once started it cannot be shortened. If the link has carried anything, waiting is the better bet.
            view = self._view
            alive = view.rate > 0 or view.settled or any(one.received for one in view.in_flight.values())
            return now >= (deadline_s if alive else _PATIENCE * deadline_s)
        return now + 1.5 * self._tick_s >= deadline_s - seconds
