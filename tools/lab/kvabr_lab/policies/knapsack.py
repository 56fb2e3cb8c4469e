"""``budget`` and ``robustmpc`` spend the link's remaining capacity where it saves most loss.

Every missing group starts on the cheapest track; steps to better tracks are taken in order of loss saved per byte until
the budget is spent. On each group's convex hull, this greedy order is within one step of the optimum of the
multiple-choice knapsack. `robustmpc` is RobustMPC with a deadline (Yin et al., SIGCOMM 2015), like
`kvabr.abr.policies.mpc`, with layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import islice
from typing import ClassVar

from kvabr.abr.ladder import LadderStep, spend
from kvabr.abr.policy import Decision, FrontToBack, Policy
from kvabr.abr.view import View
from kvabr.types.parameters import Parameter


class Budget(FrontToBack):
    """Distributes the lower bound of the remaining capacity over all missing groups; no upgrades."""

    name: ClassVar[str] = "budget"

    def start(self, view: View) -> None:
        """Begin without a plan."""
        del view
        self._planned: dict[int, str] = {}
        self._planned_for = 0
        """Number of further decisions for which the plan is valid, see `View.keeps`."""

    def choose(self, view: View, group: int) -> Decision:
        """Choose the group's track in the knapsack."""
        missing = view.missing_groups
        budget = view.budget_bytes(view.lower_bound, view.last_decode_s(view.ladder.cheapest))
        self._planned_for -= 1
        if self._planned_for <= 0 or group not in self._planned:
            planned = spend(view.ladder.options, view.ladder.steps, missing, budget)
            self._planned, self._planned_for = planned, view.keeps
        track = self._planned[group]
        reason = f"{budget / 1e6:.2f} MB can still arrive for {len(missing)} groups"
        return Decision.fetch(group, track, reason, {name: view.bytes(group, name) for name in view.ladder.names})


class RobustMpc(Policy):
    """Like mpc, but a plan may give a group a base and further layers.

    The options are the lower convex hull of all tracks. A base is requested at once. Each enhancement is requested when
    the layer below is in place, if it would still arrive in time at the lower bound of the rate. Once every group has
    its planned layers, the remaining capacity at the bound is spent on further layers, most loss saved per byte first.
    """

    name: ClassVar[str] = "robustmpc"
    estimator: ClassVar[str] = "harmonic"
    parameters: ClassVar[Mapping[str, Parameter]] = {"horizon": Parameter(1.0, 64.0, 5.0, log=True)}

    def __init__(self, *, horizon: float = 5.0) -> None:
        self._horizon = round(horizon)

    def start(self, view: View) -> None:
        """Sort the steps by group."""
        self._steps = _by_group(view.ladder.layered_steps)
        self._owed: dict[int, tuple[int, tuple[str, ...]]] = {}
        """For each group, the number of its plan, and planned layers that were not requested yet, lowest first."""
        self._owed_bytes = self._plans = self._seen_settled = 0
        self._ready: list[tuple[int, int]] = []
        """Heap of plan numbers and groups that were settled in the meantime."""
        self._ranked: list[tuple[float, int, int, str]] = []
        """Available layers: saving per byte, order, group and layer; the best is last."""
        self._ranked_for = 0
        """Number of further decisions for which `_ranked` is valid, see `View.keeps`."""

    def decide(self, view: View) -> Decision:
        """Request layers that are due, then the next group, then further layers."""
        budget = view.budget_bytes(view.lower_bound, view.decode_backlog_s + view.last_decode_s(view.ladder.cheapest))
        if (decision := self._due(view, budget - view.floor_bytes())) is not None:
            return decision
        first = view.first_missing()
        if first is None:
            return self._more(view, budget)
        ahead = list(islice(view.missing_groups, self._horizon))
        share = (budget - self._owed_bytes) * len(ahead) / len(view.missing_groups)
        planned = spend(view.ladder.layered, _steps_of(self._steps, ahead), ahead, share)
        base, *layers = view.ladder.stacks[planned[first]]
        self._owe(view, first, tuple(layers))
        return Decision.fetch(
            first, base, f"{share / 1e6:.2f} MB for {len(ahead)} groups: {len(layers)} further layers"
        )

    def _due(self, view: View, budget: float) -> Decision | None:
        """Request the next planned layer of a settled group, if the missing groups leave capacity for it."""
        for group in view.settled.history[self._seen_settled :]:
            if group in self._owed:
                heappush(self._ready, (self._owed[group][0], group))
        self._seen_settled = len(view.settled.history)
        while self._ready:
            number, group = heappop(self._ready)
            if group not in view.settled or self._owed.get(group, (0, ()))[0] != number:
                continue
            layers = self._owed[group][1]
            self._owe(view, group, ())
            current = view.track_of[group]
            if not layers or view.catalog.by_name[layers[0]].refines != current:
                continue
            if view.bytes(group, layers[0]) <= budget:
                self._owe(view, group, layers[1:])
                return Decision.upgrade(group, layers[0], "a planned layer of this group")
        return None

    def _owe(self, view: View, group: int, layers: tuple[str, ...]) -> None:
        _, before = self._owed.pop(group, (0, ()))
        self._owed_bytes += sum(view.bytes(group, layer) for layer in layers)
        self._owed_bytes -= sum(view.bytes(group, layer) for layer in before)
        if layers:
            self._plans += 1
            self._owed[group] = self._plans, layers

    def _more(self, view: View, budget: float) -> Decision:
        """Request the layer that saves most loss per byte, among those that arrive in time at the bound."""
        self._ranked_for -= 1
        if self._ranked_for <= 0:
            self._rank(view)
        while self._ranked:
            _, _, group, layer = self._ranked.pop()
            lower = view.catalog.by_name[layer].refines
            if group in view.settled and view.track_of[group] == lower and view.bytes(group, layer) <= budget:
                return Decision.upgrade(group, layer, "spare bytes at the bound go into further layers")
        return Decision.wait("no further layer would arrive at the bound")

    def _rank(self, view: View) -> None:
        self._ranked, self._ranked_for = [], view.keeps
        for order, group in enumerate(view.settled):
            current = view.track_of[group] or ""
            for layer in view.ladder.above.get(current, ()):
                worth = (view.loss(group, current) - layer.loss[group]) / layer.bytes[group]
                if worth > 0:
                    self._ranked.append((worth, -order, group, layer.name))
        self._ranked.sort()


def _by_group(steps: Iterable[LadderStep]) -> dict[int, list[LadderStep]]:
    found: dict[int, list[LadderStep]] = {}
    for step in steps:
        found.setdefault(step.group, []).append(step)
    return found


def _steps_of(steps: Mapping[int, list[LadderStep]], groups: Iterable[int]) -> list[LadderStep]:
    return sorted((step for group in groups for step in steps.get(group, ())), key=lambda step: -step.worth)
