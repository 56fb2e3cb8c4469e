"""The engine's queue: the groups assigned to it, and when it starts to compute them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, pairwise

from kvabr.abr.recompute_planner import Plan, Rest
from kvabr.abr.view import GroupSet, View
from kvabr.types.cost import MIN_CALL, PrefillCost
from kvabr.types.engine import EngineMode

_MAX_LATE_FACTOR = 1.25
"""Multiple of the deadline after which a tail ends far too late."""
_MIN_START_SHARE = 0.5
"""Fraction of the deadline before which such a tail never starts."""


_MAX_CORRECTION = 10.0
"""Maximum factor by which the engine may be slower than its cost says."""


class ComputeQueue:
    """The groups that the engine is computing, and those assigned to it.

    If the calls so far took longer than the cost says, by more than a tick, further ones are expected to take as much
    longer.
    """

    def __init__(self, cost: PrefillCost, mode: EngineMode, view: View, tick_s: float) -> None:
        self._told = cost
        self._mode, self._view, self.tick_s = mode, view, tick_s
        self._took_s = self._expected_s = 0.0
        """Seconds that the calls took so far, and that they should have taken."""
        self.planned: range = range(0)
        """Groups assigned to the engine until the next plan."""
        self.chosen = GroupSet(view.groups, ())
        """Groups assigned to the engine permanently."""
        self.left = GroupSet(view.groups)
        """Groups that have not arrived, are not being computed, and are not in `chosen`."""
        self.computing: tuple[int, int] | None = None
        """First group being computed, and the one after the last; None if idle."""
        self.started_s = 0.0
        self._free_s = 0.0
        self._by_policy = False
        self._waiting, self._waiting_s = 0, 0.0
        """Number of `chosen` groups not started, and the seconds that they take."""
        self._found: Plan | None = None
        self._reuses, self._reuse_until_s = 0, 0.0
        """Number of events for which the plan is reused (`View.keeps`), and the time after which it is not."""
        self._each: list[int] = []
        """Nanoseconds that each group takes alone; integers, so that sums are exact."""
        self._sums: list[int] = []

    @property
    def _cost(self) -> PrefillCost:
        return self._view.cost or self._told

    def backlog_s(self, now: float) -> float:
        """Return the seconds until the engine has finished its current groups and all of `chosen`."""
        # A call that takes longer than expected may take as much longer again.
        running = abs(self._free_s - now) if self.computing is not None else 0.0
        if self.tail < self._view.groups and not self._view.catalog.every_token:
            return running + (0.0 if self.computing else self._seconds(self.tail, self._view.groups))
        return running + (self._waiting_s if self._waiting else 0.0)

    def _here(self) -> range:
        return range(*(self.computing or (0, 0)))

    @property
    def busy(self) -> bool:
        """True if the engine is computing, or has groups assigned."""
        return self.computing is not None or self.waiting()

    def waiting(self) -> bool:
        """Return True if assigned groups have not started."""
        return bool(self.planned) or bool(self.chosen)

    def computes(self, group: int) -> bool:
        """Return True if the engine is computing a group now."""
        return self.computing is not None and self.computing[0] <= group < self.computing[1]

    def takes(self, group: int) -> bool:
        """Return True if an absent group is assigned to the engine, and so hidden from the policy."""
        return group in self.planned or group in self.chosen or group in self._here() or group >= self.tail

    @property
    def tail(self) -> int:
        """First group of the tail assigned to the engine permanently; the number of groups if there is none."""
        first = self.chosen.first() if self._mode == "suffix" else None
        return self._view.groups if first is None else self._view.catalog.cut(first)

    def absent(self, group: int, *, absent: bool) -> None:
        """Record whether a group has neither arrived nor is being computed."""
        if absent and group not in self.chosen:
            self.left.add(group)
        else:
            self.left.discard(group)

    def choose(self, groups: Iterable[int], *, by_policy: bool = False) -> None:
        """Assign groups to the engine permanently; ``by_policy``: the policy did it, so a tail need not wait."""
        self._by_policy = self._by_policy or by_policy
        for group in groups:
            if group not in self.chosen:
                self.chosen.add(group)
                self.left.discard(group)
                self._wait(group, 1)

    def _wait(self, group: int, by: int) -> None:
        if group not in self._here():
            self._waiting += by
            self._waiting_s += by * self._seconds(group, group + 1)

    def replan(self, now: float, *, dead: bool = False) -> tuple[list[int], Plan | None]:
        """Plan again which groups the network will not deliver in time.

        Return the groups added to or removed from `planned`, and the plan; ``dead``: assume a dead link.
        """
        if self.computing is not None and self._mode == "suffix":
            return [], None
        rest = Rest(self._view, self._cost, self.left, self._free_s, dead=dead)
        if rest.in_time:
            self._found, self._reuses = None, 0
        elif dead or not self._reuses or now >= self._reuse_until_s:
            self._found = rest.plan(self._mode)
            self._reuses, self._reuse_until_s = self._view.keeps, now + self.tick_s
        else:
            self._reuses -= 1
        found, before = self._found, self.planned
        self.planned = range(0) if found is None else range(found.first, found.last)
        return [*_without(before, self.planned), *_without(self.planned, before)], found

    def overdue(self, now: float, absent: GroupSet) -> bool:
        """Return True if the play is late by more than the engine would take; lost bytes always look imminent."""
        late_s, first = now - self._view.deadline_s, absent.first()
        if first is None or late_s < 0:
            return False  # the usual case, without computing the engine's times
        if self._mode == "suffix":
            return late_s >= self._seconds(self._view.catalog.cut(first), self._view.groups)
        self._add_up()
        return 1e9 * late_s >= absent.total("seconds", self._each)

    def ready(self, now: float, absent: GroupSet, *, at_once: bool = False) -> tuple[int, int] | None:
        """Return the groups that the engine should start now, or None; ``at_once``: even a tail that may shorten."""
        if self.computing is not None or not self.waiting():
            return None
        first, planned = self.chosen.first(), absent.first(self.planned.start)
        if planned is not None and planned in self.planned and (first is None or planned < first):
            first = planned
        if first is None:
            return None
        if self._mode == "suffix":
            first = self._view.catalog.cut(first)
        if self._view.solid < first:
            return None
        if self._mode == "hole":
            if first in self.chosen:
                return first, self.chosen.gap(first)  # chosen by a policy for one call
            return first, self._run_end(first, now, absent)
        at_once = at_once or (self._by_policy and first == self.tail)
        return (first, self._view.groups) if at_once or self._last_call(first, now) else None

    def start(self, first: int, last: int, now: float) -> None:
        """Record the start of groups ``first`` to ``last`` - 1."""
        for group in range(first, last):
            if group in self.chosen:
                self._wait(group, -1)
        self.computing, self.started_s, self._reuses = (first, last), now, 0
        self._free_s = now + self._seconds(first, last)

    def finish(self, now: float, *, failed: bool = False) -> float:
        """Record the end of a computation; return when it started."""
        first, last = self.computing or (0, 0)
        for group in self._here():
            self.chosen.discard(group)
        self.computing, self._reuses = None, 0
        if not failed:
            begin, end = map(self._view.catalog.tokens_before, (first, last))
            self._expected_s += self._told.seconds(begin, end - begin)
            self._took_s += now - self.started_s
            self._correct()
        return self.started_s

    def _correct(self) -> None:
        # A short call may be late only by its handover; a fast one may have found tokens in the engine's own cache.
        late = self._took_s > self._expected_s + self.tick_s and self._expected_s > 0
        factor = min(self._took_s / self._expected_s, _MAX_CORRECTION) if late else 1.0
        if (cost := self._told if factor == 1.0 else self._told.scaled(factor)) != self._cost:
            self._view.cost = cost
            self._each = []
            self._waiting_s = sum(self._seconds(group, group + 1) for group in self.chosen)

    def _seconds(self, first: int, last: int) -> float:
        begin, end = map(self._view.catalog.tokens_before, (first, last))
        return self._cost.seconds(begin, end - begin)

    def _run_end(self, first: int, now: float, absent: GroupSet) -> int:
        """Return the end of the next run: short if there is time to plan again, everything if only that is in time."""
        last, end = first + 1, absent.gap(first)
        while last < end and (last in self.planned or last in self.chosen):
            last = min(end, self.planned.stop if last in self.planned else self.chosen.gap(last))
        self._add_up()
        one_by_one, in_time = 1e-9 * (self._sums[last] - self._sums[first]), self._view.deadline_s - now
        return last if self._seconds(first, last) <= in_time < one_by_one else self._least_run(first, last, in_time)

    def _least_run(self, first: int, last: int, in_time: float) -> int:
        """Return the end of the shortest run whose cost is not mostly constant, or of a shorter one to be in time."""
        if last - first < 2:
            return last
        constant_s = 2 * self._seconds(first, first + 1) - self._seconds(first, first + 2)
        if constant_s <= 0:
            return first + 1
        # Search for it, since calls of one and two groups may take equally long.
        seconds, ends = partial(self._seconds, first), range(first + 1, last + 1)
        count = 1 + bisect_left(ends[:-1], MIN_CALL * constant_s, key=seconds)
        return first + (bisect_right(ends[:count], in_time, key=seconds) or count)

    def _add_up(self) -> None:
        if not self._each:
            ends = map(self._view.catalog.tokens_before, range(self._view.groups + 1))
            self._each = [round(1e9 * self._cost.seconds(begin, end - begin)) for begin, end in pairwise(ends)]
            self._sums = list(accumulate(self._each, initial=0))

    def _last_call(self, first: int, now: float) -> bool:
        deadline_s, seconds = self._view.deadline_s, self._seconds(first, self._view.groups)
        if now + seconds > _MAX_LATE_FACTOR * deadline_s and first != self.tail:
            # A tail cannot be shortened once started. If the link has delivered any bytes, waiting is the better bet.
            view = self._view
            alive = view.rate > 0 or view.settled or any(one.received for one in view.in_flight.values())
            return now >= (deadline_s if alive else _MIN_START_SHARE * deadline_s)
        return now + self._view.margin_s >= deadline_s - seconds


def _without(groups: range, others: range) -> Iterable[int]:
    if not groups or not others:
        return groups
    return (*range(groups.start, min(groups.stop, others.start)), *range(max(groups.start, others.stop), groups.stop))
