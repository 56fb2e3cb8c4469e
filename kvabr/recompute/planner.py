"""Decides, while there is still time, which groups the engine must compute because the network will not bring them.

Recomputing costs the engine time but no quality. The planner reckons with the lower bound of the rate and with every
missing group at the cheapest track: only what does not even fit then is left to the engine.

Two engine modes differ in what can be computed:

- ``hole``: any group whose left side is complete. The planner takes a run right behind the groups that are in flight,
  as short as will do; the network goes on with what lies behind the run. If what is in flight has stalled, the run
  starts at the first group that is not in place.
- ``suffix``: the engine throws away everything after the first missing group, and computes from there to the end. The
  planner cuts as short a tail as will do; it is computed once all groups before the cut are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvabr.abr.view import View
from kvabr.recompute.cost import PrefillCost

EngineMode = Literal["hole", "suffix"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups ``first`` to ``last`` - 1 are left to the engine."""

    first: int
    last: int
    reason: str


def plan(view: View, cost: PrefillCost, mode: EngineMode, absent: Sequence[int], lane_free_s: float) -> Plan | None:
    """Say which groups to leave to the engine, or None while the network should bring them all in time.

    Args:
        view: the play.
        cost: what the engine takes.
        mode: what the engine can compute.
        absent: groups that are neither in place nor arrived, ascending; those in flight included.
        lane_free_s: when the engine is done with what it computes now.
    """
    sizes = view.ladder.tracks[0].bytes
    flying = {transfer.group: transfer for transfer in view.in_flight.values() if not transfer.upgrade}
    need = {group: flying[group].remaining if group in flying else sizes[group] for group in absent}
    wait = 0.0 if flying else view.ttfb_s
    tail_s = max(view.decode_backlog_s, view.decode_s(view.ladder.cheapest))
    total = sum(need.values())
    rate = view.lower_bound

    def network_s(nbytes: float) -> float:
        if nbytes <= 0:
            return view.now + view.decode_backlog_s
        return view.now + wait + nbytes / rate + tail_s if rate > 0 else float("inf")

    eta = network_s(total)
    if not absent or eta <= view.deadline_s:
        return None
    start = max(view.now, lane_free_s)
    if mode == "suffix":
        return _cut_tail(view, cost, absent, need, network_s, start, eta)
    behind = next((i for i, group in enumerate(absent) if group not in flying), len(absent))
    best = _run(view, cost, absent, need, network_s, start, behind)
    if best is None or (best[0] > view.deadline_s and behind):
        stalled = _run(view, cost, absent, need, network_s, start, 0)
        if stalled is not None and (best is None or stalled[0] < best[0]):
            best = stalled
    if best is None or best[0] >= eta or _gamble(view, best[0], total, wait + tail_s):
        return None
    finish, found = best
    return Plan(found[0], found[1], _words(view, eta, finish))


def _gamble(view: View, finish: float, nbytes: int, other_s: float) -> bool:
    """Whether a plan that is late itself should yield to a network that would make it at its expected rate."""
    on_time = view.rate > 0 and view.now + other_s + nbytes / view.rate <= view.deadline_s
    return finish > view.deadline_s and on_time


def _words(view: View, eta: float, finish: float) -> str:
    late = "never arrives" if eta == float("inf") else f"arrives {eta - view.deadline_s:.2f} s late"
    return f"at the lower bound the rest {late}; with recompute it is in place at {finish:.2f} s"


def _run(
    view: View,
    cost: PrefillCost,
    absent: Sequence[int],
    need: dict[int, int],
    network_s: Callable[[float], float],
    start: float,
    index: int,
) -> tuple[float, tuple[int, int]] | None:
    """Shortest run of consecutive groups from ``absent[index]`` on that meets the deadline, else the soonest one."""
    if index >= len(absent):
        return None
    spec = view.catalog.spec
    before = sum(need[group] for group in absent[:index])
    begin = max(start, network_s(before))
    tokens = view.catalog.group_tokens(absent[index])
    left = sum(need.values())
    best: tuple[float, tuple[int, int]] | None = None
    first = absent[index]
    for offset, group in enumerate(absent[index:]):
        if group != first + offset:
            break  # a group in between is in place: a longer run would compute it again
        left -= need[group]
        computed = begin + cost.seconds(first * spec.group_tokens, tokens)
        tokens += view.catalog.group_tokens(min(group + 1, view.groups - 1))
        finish = max(computed, network_s(left))
        if best is None or finish < best[0]:
            best = (finish, (first, group + 1))
        if finish <= view.deadline_s:
            break
    return best


def _cut_tail(
    view: View,
    cost: PrefillCost,
    absent: Sequence[int],
    need: dict[int, int],
    network_s: Callable[[float], float],
    start: float,
    eta: float,
) -> Plan | None:
    spec, tokens = view.catalog.spec, view.catalog.tokens
    left = sum(need.values())
    best: tuple[float, int] | None = None
    for group in reversed(absent):
        left -= need[group]
        first = group * spec.group_tokens
        finish = max(start, network_s(left)) + cost.seconds(first, tokens - first)
        if best is None or finish < best[0]:
            best = (finish, group)
        if finish <= view.deadline_s:
            break
    if best is None or best[0] >= eta or _gamble(view, best[0], sum(need.values()), view.decode_backlog_s):
        return None
    return Plan(best[1], view.groups, _words(view, eta, best[0]))
