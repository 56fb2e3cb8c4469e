"""Assigns groups to the engine early enough if the network will not deliver them in time.

The planner assumes the lower bound of the rate and the cheapest track, and assigns only groups that are late even then.

- ``hole``: the shortest sufficient run right after the groups in flight; if these stall, from the first group not in
  place. While the rate is unknown, no run starts that would end late.
- ``suffix``: the engine discards everything after the cut, so the planner cuts off the shortest sufficient tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvabr.abr.view import MAX_PARTS, GroupSet, View
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode


class Plan(NamedTuple):
    """Groups ``first`` to ``last`` - 1 are assigned to the engine."""

    first: int
    last: int
    reason: str


class _Candidate(NamedTuple):
    """A run of groups for the engine, and the time at which everything would be in place."""

    finish: float
    first: int
    last: int


class Rest:
    """The groups that are not in place yet, and their expected delivery."""

    def __init__(
        self, view: View, cost: PrefillCost, absent: GroupSet, engine_free_s: float, *, dead: bool = False
    ) -> None:
        """Compute the remaining bytes, in constant time.

        ``absent``: groups neither in place nor arrived, including those in flight; ``engine_free_s``: when the engine
        finishes its current work; ``dead``: assume that the network delivers nothing more.
        """
        base, flying = view.ladder.tracks[0], view.in_flight
        self._view, self._cost, self._absent, self._dead = view, cost, absent, dead
        self._sizes, self._rate = base.bytes, 0.0 if dead else view.lower_bound
        self._total = absent.total(base.name, base.bytes) - flying.required_floor + flying.required_bytes
        self._wait_s = 0.0 if flying.required else view.ttfb_s
        self._last_decode_s = max(view.decode_backlog_s, view.last_decode_s(base.name))
        self._start_s = max(view.now, engine_free_s)
        self._edge = view.edge if self._last_call() else view.groups
        """First group that is not expected to be published."""
        self._eta_s = self._network_s(self._total, absent.last())

    @property
    def in_time(self) -> bool:
        """True if the network should deliver everything in time."""
        return not self._absent or self._eta_s <= self._view.deadline_s

    def _last_call(self) -> bool:
        """Return True if the producer is late, and the engine must begin now to meet the deadline without it."""
        view = self._view
        first = self._absent.first(view.edge)
        if first is None or view.late_s <= 0:
            return False
        begin = view.catalog.tokens_before(view.catalog.cut(first))
        seconds = self._cost.seconds(begin, view.catalog.tokens - begin)
        return self._start_s + seconds >= view.deadline_s - view.margin_s

    def _network_s(self, nbytes: float, last: int | None) -> float:
        """Return when the network has delivered ``nbytes`` bytes; group ``last`` arrives last."""
        view, now = self._view, self._view.now
        if nbytes <= 0:
            return now + view.decode_backlog_s
        if self._rate <= 0 or (last is not None and last >= self._edge):
            return float("inf")
        comes_s = now + self._wait_s + nbytes / self._rate
        if last is not None and last >= view.edge and view.ready_s is not None:
            comes_s = max(comes_s, view.ready_s(last) + view.ttfb_s / 2 + self._sizes[last] / self._rate)
        return comes_s + self._last_decode_s

    def _runs(self, absent: Sequence[int], sums: Sequence[int], begin: int) -> Iterator[_Candidate]:
        """Yield ever longer runs of groups from ``absent[begin]`` on."""
        if begin == len(absent):
            return
        catalog, first, before = self._view.catalog, absent[begin], absent[begin - 1] if begin else None
        begins_s, tokens = max(self._start_s, self._network_s(sums[begin], before)), catalog.tokens_before(first)
        longest = self._absent.gap(first) - first  # a longer run would recompute a group in place
        for count in (*range(1, longest, max(1, longest // MAX_PARTS)), longest):
            computed_s = begins_s + self._cost.seconds(tokens, catalog.tokens_before(first + count) - tokens)
            last = absent[-1] if first + count <= absent[-1] else before
            fetched_s = self._network_s(self._total - sums[begin + count] + sums[begin], last)
            yield _Candidate(max(computed_s, fetched_s), first, first + count)

    def _tails(self, absent: Sequence[int], sums: Sequence[int]) -> Iterator[_Candidate]:
        """Yield ever longer tails, each starting where an engine can begin."""
        catalog = self._view.catalog
        for index in reversed(range(len(absent))):
            first, earlier = catalog.cut(absent[index]), absent[index - 1] if index else -1
            if earlier < first:
                begin = catalog.tokens_before(first)
                seconds = self._cost.seconds(begin, catalog.tokens - begin)
                begins_s = max(self._start_s, self._network_s(sums[index], None if earlier < 0 else earlier))
                yield _Candidate(begins_s + seconds, first, self._view.groups)

    def plan(self, mode: EngineMode) -> Plan | None:
        """Return the groups to assign to the engine; None if the network should deliver all in time.

        Scans all remaining groups.
        """
        if self.in_time:
            return None
        view, cost, dead, deadline_s = self._view, self._cost, self._dead, self._view.deadline_s
        flying = {transfer.group: transfer.remaining for transfer in view.in_flight.required.values()}
        absent = list(self._absent)
        sums = list(accumulate(map(flying.get, absent, map(self._sizes.__getitem__, absent)), initial=0))
        if view.coming and mode == "hole" and not dead and view.rate <= 0:
            begin = view.catalog.tokens_before(absent[0])
            if self._start_s + cost.seconds(begin, view.catalog.tokens - begin) < deadline_s:
                return None  # no group is published yet, and the engine alone can still meet the deadline
        if mode == "hole" and (dead or view.rate <= 0):
            begin, end = map(view.catalog.tokens_before, (absent[0], absent[0] + 1))
            ends_s = self._start_s + cost.seconds(begin, end - begin)
            if not dead and view.now < deadline_s < ends_s:
                return None  # a call would make the play late; the link may still deliver everything in time
            # A run cannot fill several holes: take the first hole and plan again.
            last = self._absent.gap(absent[0])
            return Plan(absent[0], last, "no data arrives; the missing groups are recomputed")
        if mode == "suffix":
            best = _soonest(self._tails(absent, sums), deadline_s)
            other_s = view.decode_backlog_s
        else:
            after_flying = next((i for i, group in enumerate(absent) if group not in flying), len(absent))
            best = _soonest(self._runs(absent, sums, after_flying), deadline_s)
            if best is None or (best.finish > deadline_s and after_flying):
                stalled = _soonest(self._runs(absent, sums, 0), deadline_s)
                if stalled is not None and (best is None or stalled.finish < best.finish):
                    best = stalled
            other_s = self._wait_s + self._last_decode_s
        # A late plan yields to a network that is in time at its expected rate, or may recover.
        carried_s = self._total / view.rate if view.rate > 0 else 0.0 if view.settled else float("inf")
        on_time = view.now + other_s + carried_s <= deadline_s
        if best is None or best.finish >= self._eta_s or (not dead and best.finish > deadline_s and on_time):
            return None
        late = "never arrives" if self._eta_s == float("inf") else f"arrives {self._eta_s - deadline_s:.2f} s late"
        reason = f"at the lower bound of the rate the rest {late}; with recompute it is in place at {best.finish:.2f} s"
        return Plan(best.first, best.last, reason)


def _soonest(candidates: Iterable[_Candidate], deadline_s: float) -> _Candidate | None:
    best: _Candidate | None = None
    for found in candidates:
        if best is None or found.finish < best.finish:
            best = found
        if found.finish <= deadline_s:
            break
    return best
