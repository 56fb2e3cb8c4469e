"""Decides in time which groups the engine must compute because the network will not deliver them.

Recomputing costs engine time but no quality. The planner assumes the lower bound of the rate and the cheapest track for
every missing group; only what does not fit even then is left to the engine. Two engine modes differ in what can be
computed:

- ``hole``: any group with everything before it in place. The planner picks the shortest sufficient run right behind the
  groups in flight, and the network continues behind the run. If the transfers in flight have stalled, the run starts at
  the first group that is not in place. While no rate is known, none is started that would end after the deadline.
- ``suffix``: the engine discards everything after the first missing group and computes from there to the end. The
  planner cuts off the shortest sufficient tail, which is computed once all groups before the cut are in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvabr.abr.view import View
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode

_LAST_CALL = 0.05
"""Share of the deadline before the last moment at which a producer that is late is given up."""


class Plan(NamedTuple):
    """Groups ``first`` to ``last`` - 1 are left to the engine."""

    first: int
    last: int
    reason: str


class _Candidate(NamedTuple):
    """A run of groups for the engine, and the time at which everything would be in place."""

    finish: float
    first: int
    last: int


class _Rest:
    """What is not in place yet, and when network and engine would bring it."""

    def __init__(self, view: View, cost: PrefillCost, absent: Sequence[int], lane_free_s: float, rate: float) -> None:
        sizes = view.ladder.tracks[0].bytes
        self.flying = {transfer.group: transfer for transfer in view.in_flight.values() if not transfer.upgrade}
        self.need = {group: self.flying[group].remaining if group in self.flying else sizes[group] for group in absent}
        """Bytes that each absent group needs."""
        self.total = sum(self.need.values())
        self.wait_s = 0.0 if self.flying else view.ttfb_s
        self.tail_s = max(view.decode_backlog_s, view.decode_s(view.ladder.cheapest))
        self._view, self._cost, self._rate = view, cost, rate
        self._start_s = max(view.now, lane_free_s)
        self._edge = view.edge if self._last_call() else view.groups
        """Groups from here on are not believed to be published."""

    def _last_call(self) -> bool:
        """Return whether the producer is late, and the engine must begin now to be in time without it."""
        view = self._view
        first = min((group for group in self.need if group >= view.edge), default=None)
        if first is None or view.late_s <= 0:
            return False
        begin = view.catalog.tokens_before(view.catalog.cut(first))
        seconds = self._cost.seconds(begin, view.catalog.tokens - begin)
        return self._start_s + seconds >= (1 - _LAST_CALL) * view.deadline_s

    def network_s(self, nbytes: float, last: int | None) -> float:
        """Return when the network has delivered a number of bytes, of which those of group ``last`` come last."""
        view, now = self._view, self._view.now
        if nbytes <= 0:
            return now + view.decode_backlog_s
        if self._rate <= 0 or (last is not None and last >= self._edge):
            return float("inf")
        comes_s = now + self.wait_s + nbytes / self._rate
        if last is not None and last >= view.edge and view.ready_s is not None:
            comes_s = max(comes_s, view.ready_s(last) + view.ttfb_s / 2 + self.need.get(last, 0) / self._rate)
        return comes_s + self.tail_s

    def runs(self, groups: Sequence[int]) -> Iterator[_Candidate]:
        """Yield ever longer runs of consecutive groups from the first of ``groups``, the last of those absent."""
        if not groups:
            return
        catalog = self._view.catalog
        first, left = groups[0], self.total
        earlier = sum(nbytes for group, nbytes in self.need.items() if group < first)
        before = max((group for group in self.need if group < first), default=None)
        end = max(self.need)
        begin = max(self._start_s, self.network_s(earlier, before))
        for offset, group in enumerate(groups):
            if group != first + offset:
                break  # a group in between is in place; a longer run would compute it again
            left -= self.need[group]
            tokens = catalog.tokens_before(group + 1) - catalog.tokens_before(first)
            computed = begin + self._cost.seconds(catalog.tokens_before(first), tokens)
            yield _Candidate(max(computed, self.network_s(left, end if group < end else before)), first, group + 1)

    def tails(self) -> Iterator[_Candidate]:
        """Yield ever longer tails to the end, each from the last group on at which an engine can begin for it."""
        catalog, left = self._view.catalog, self.total
        absent = list(self.need)
        for group, earlier in zip(reversed(absent), (*absent[-2::-1], -1), strict=True):
            left -= self.need[group]
            first = catalog.cut(group)
            if earlier < first:
                begin = catalog.tokens_before(first)
                seconds = self._cost.seconds(begin, catalog.tokens - begin)
                begins_s = max(self._start_s, self.network_s(left, None if earlier < 0 else earlier))
                yield _Candidate(begins_s + seconds, first, self._view.groups)


def plan(
    view: View, cost: PrefillCost, mode: EngineMode, absent: Sequence[int], lane_free_s: float, *, dead: bool = False
) -> Plan | None:
    """Return the groups to leave to the engine, or None while the network should deliver all in time.

    Args:
        view: the play.
        cost: prefill cost of the engine.
        mode: what the engine can compute.
        absent: groups that are neither in place nor arrived, ascending, including those in flight.
        lane_free_s: when the engine finishes its current work.
        dead: the network has been silent for so long that nothing more is expected.
    """
    rest = _Rest(view, cost, absent, lane_free_s, 0.0 if dead else view.lower_bound)
    eta, deadline_s = rest.network_s(rest.total, absent[-1] if absent else None), view.deadline_s
    if not absent or eta <= deadline_s:
        return None
    if view.coming and mode == "hole" and not dead and view.rate <= 0:
        begin = view.catalog.tokens_before(absent[0])
        if max(view.now, lane_free_s) + cost.seconds(begin, view.catalog.tokens - begin) < deadline_s:
            return None  # nothing is published yet, and the engine can still do without
    if mode == "hole" and (dead or view.rate <= 0):
        begin, end = map(view.catalog.tokens_before, (absent[0], absent[0] + 1))
        ends_s = max(view.now, lane_free_s) + cost.seconds(begin, end - begin)
        if not dead and view.now < deadline_s < ends_s:
            return None  # once begun, it would make the play late; the link may still carry everything in time
        # No single run fills several holes: take the first one and plan again.
        last = next((group + 1 for group in absent if group + 1 not in rest.need), absent[0] + 1)
        return Plan(absent[0], last, "the network brings nothing; what is left is recompute")
    if mode == "suffix":
        best = _soonest(rest.tails(), deadline_s)
        other_s = view.decode_backlog_s
    else:
        behind = next((i for i, group in enumerate(absent) if group not in rest.flying), len(absent))
        best = _soonest(rest.runs(absent[behind:]), deadline_s)
        if best is None or (best.finish > deadline_s and behind):
            stalled = _soonest(rest.runs(absent), deadline_s)
            if stalled is not None and (best is None or stalled.finish < best.finish):
                best = stalled
        other_s = rest.wait_s + rest.tail_s
    # A late plan yields to a network that would make it at its expected rate.
    on_time = view.rate > 0 and view.now + other_s + rest.total / view.rate <= deadline_s
    if best is None or best.finish >= eta or (not dead and best.finish > deadline_s and on_time):
        return None
    late = "never arrives" if eta == float("inf") else f"arrives {eta - deadline_s:.2f} s late"
    reason = f"at the lower bound the rest {late}; with recompute it is in place at {best.finish:.2f} s"
    return Plan(best.first, best.last, reason)


def _soonest(candidates: Iterable[_Candidate], deadline_s: float) -> _Candidate | None:
    """Return the first candidate that meets the deadline, or else the earliest."""
    best: _Candidate | None = None
    for found in candidates:
        if best is None or found.finish < best.finish:
            best = found
        if found.finish <= deadline_s:
            break
    return best
