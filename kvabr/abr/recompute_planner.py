"""Decides in time which groups the engine must compute because the network will not deliver them.

Recomputing costs engine time but no quality. The planner assumes the lower bound of the rate and the cheapest track for
every missing group; only what does not fit even then is left to the engine. Two engine modes differ in what can be
computed:

- ``hole``: any group with everything before it in place. The planner picks the shortest sufficient run right behind the
  groups in flight, and the network continues behind the run. If the transfers in flight have stalled, the run starts at
  the first group that is not in place.
- ``suffix``: the engine discards everything after the first missing group and computes from there to the end. The
  planner cuts off the shortest sufficient tail, which is computed once all groups before the cut are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvabr.abr.view import View
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups ``first`` to ``last`` - 1 are left to the engine."""

    first: int
    last: int
    reason: str


class _Candidate(NamedTuple):
    """A run of groups for the engine, and the time at which everything would be in place."""

    finish: float
    first: int
    last: int


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
    sizes = view.ladder.tracks[0].bytes
    flying = {transfer.group: transfer for transfer in view.in_flight.values() if not transfer.upgrade}
    need = {group: flying[group].remaining if group in flying else sizes[group] for group in absent}
    wait = 0.0 if flying else view.ttfb_s
    tail_s = max(view.decode_backlog_s, view.decode_s(view.ladder.cheapest))
    total = sum(need.values())
    rate = 0.0 if dead else view.lower_bound

    def network_s(nbytes: float) -> float:
        if nbytes <= 0:
            return view.now + view.decode_backlog_s
        return view.now + wait + nbytes / rate + tail_s if rate > 0 else float("inf")

    eta = network_s(total)
    if not absent or eta <= view.deadline_s:
        return None
    start = max(view.now, lane_free_s)
    if mode == "hole" and (dead or view.rate <= 0):
        # No single run fills several holes: take the first one and plan again.
        last = next((group + 1 for group in absent if group + 1 not in need), absent[0] + 1)
        return Plan(absent[0], last, "the network brings nothing; what is left is recompute")
    if mode == "suffix":
        best = _soonest(_tails(view, cost, absent, need, network_s, start), view.deadline_s)
        other_s = view.decode_backlog_s
    else:
        behind = next((i for i, group in enumerate(absent) if group not in flying), len(absent))
        best = _soonest(_runs(view, cost, absent[behind:], need, network_s, start), view.deadline_s)
        if best is None or (best.finish > view.deadline_s and behind):
            stalled = _soonest(_runs(view, cost, absent, need, network_s, start), view.deadline_s)
            if stalled is not None and (best is None or stalled.finish < best.finish):
                best = stalled
        other_s = wait + tail_s
    if best is None or best.finish >= eta or (not dead and _gamble(view, best.finish, total, other_s)):
        return None
    return Plan(best.first, best.last, _words(view, eta, best.finish))


def _gamble(view: View, finish: float, nbytes: int, other_s: float) -> bool:
    """Return whether a late plan should yield to a network that would make it at its expected rate."""
    on_time = view.rate > 0 and view.now + other_s + nbytes / view.rate <= view.deadline_s
    return finish > view.deadline_s and on_time


def _words(view: View, eta: float, finish: float) -> str:
    late = "never arrives" if eta == float("inf") else f"arrives {eta - view.deadline_s:.2f} s late"
    return f"at the lower bound the rest {late}; with recompute it is in place at {finish:.2f} s"


def _soonest(candidates: Iterable[_Candidate], deadline_s: float) -> _Candidate | None:
    """Return the first candidate that meets the deadline, or else the earliest."""
    best: _Candidate | None = None
    for found in candidates:
        if best is None or found.finish < best.finish:
            best = found
        if found.finish <= deadline_s:
            break
    return best


def _runs(
    view: View,
    cost: PrefillCost,
    absent: Sequence[int],
    need: dict[int, int],
    network_s: Callable[[float], float],
    start: float,
) -> Iterator[_Candidate]:
    """Yield ever longer runs of consecutive groups from the first of ``absent``.

    Args:
        view: the play.
        cost: prefill cost of the engine.
        absent: as for `plan`, starting where the runs start.
        need: bytes that each absent group needs, including groups before the runs.
        network_s: time at which the network has delivered a number of bytes.
        start: when the engine is free.
    """
    if not absent:
        return
    spec, first = view.catalog.spec, absent[0]
    begin = max(start, network_s(sum(size for group, size in need.items() if group < first)))
    size, whole = spec.group_tokens, view.catalog.tokens
    left = sum(need.values())
    for offset, group in enumerate(absent):
        if group != first + offset:
            break  # a group in between is in place; a longer run would compute it again
        left -= need[group]
        computed = begin + cost.seconds(first * size, min((group + 1) * size, whole) - first * size)
        yield _Candidate(max(computed, network_s(left)), first, group + 1)


def _tails(
    view: View,
    cost: PrefillCost,
    absent: Sequence[int],
    need: dict[int, int],
    network_s: Callable[[float], float],
    start: float,
) -> Iterator[_Candidate]:
    """Yield ever longer tails, each from an absent group to the end; arguments as for `_runs`."""
    spec, tokens = view.catalog.spec, view.catalog.tokens
    left = sum(need.values())
    for group in reversed(absent):
        left -= need[group]
        first = group * spec.group_tokens
        yield _Candidate(max(start, network_s(left)) + cost.seconds(first, tokens - first), group, view.groups)
