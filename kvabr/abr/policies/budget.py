"""``budget``, ``mpc`` and ``robustmpc``: spend what the link can still carry where it saves most loss.

Every missing group starts on the cheapest track. Steps up are taken in the order of loss saved per byte until the
budget is spent. On each group's convex hull this greedy order is within one step of the optimum of the multiple-choice
knapsack. The MPC policies are RobustMPC on the deadline (Yin et al., SIGCOMM 2015; Puffer's and Pensieve's form of the
bound): where a video player plans five chunks ahead against its buffer, they plan five groups ahead against their share
of the remaining time, at the harmonic mean of the recent rates over one plus the largest recent error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvabr.abr.ladder import LadderStep, spend
from kvabr.abr.policy import Decision, FrontToBack, Parameter, Policy
from kvabr.abr.view import View


class Budget(FrontToBack):
    """Spends the lower bound of the rate over all missing groups; no upgrades."""

    name: ClassVar[str] = "budget"
    horizon: ClassVar[int | None] = None
    """Number of missing groups in the knapsack; None for all."""

    def choose(self, view: View, group: int) -> Decision:
        """Choose the track that the knapsack gives the group."""
        missing = list(view.missing)
        budget = view.budget_bytes(view.lower_bound, view.decode_s(view.ladder.cheapest))
        within = set(missing[: self.horizon])
        budget *= len(within) / len(missing)
        track = spend(view.ladder.options, view.ladder.steps, within, group, budget)
        reason = f"{budget / 1e6:.2f} MB can still arrive for {len(within)} groups"
        return Decision.fetch(group, track, reason, {name: view.bytes(group, name) for name in view.ladder.names})


class Mpc(Budget):
    """Plan five groups ahead, one track for each, as video players do (RobustMPC); a group is never refined."""

    name: ClassVar[str] = "mpc"
    estimator: ClassVar[str] = "harmonic"
    horizon: ClassVar[int | None] = 5


class RobustMpc(Policy):
    """As mpc, but a plan may give a group a base and further layers, which are requested one after the other.

    The options are the lower convex hull of everything in the asset.

    If the plan gives a group several layers, the base is requested at once and each enhancement as soon as the layer
    below is in place, unless it would no longer arrive at the bound. Once every group has its planned layers, the
    reserve of the bound is spent on further layers, most loss saved per byte first.
    """

    name: ClassVar[str] = "robustmpc"
    estimator: ClassVar[str] = "harmonic"
    parameters: ClassVar[Mapping[str, Parameter]] = {"horizon": Parameter(1.0, 64.0, 5.0, log=True)}

    def __init__(self, *, horizon: float = 5.0) -> None:
        """Set the number of groups planned ahead."""
        self._horizon = round(horizon)

    def start(self, view: View) -> None:
        """Sort the steps by group."""
        self._steps: dict[int, list[LadderStep]] = {}
        for step in view.ladder.layered_steps:
            self._steps.setdefault(step.group, []).append(step)
        self._owed: dict[int, tuple[str, ...]] = {}
        """Planned layers of each group that have not been requested, lowest first."""

    def decide(self, view: View) -> Decision:
        """Request layers that are due, then the next group, then further layers."""
        budget = view.budget_bytes(view.lower_bound, view.decode_backlog_s + view.decode_s(view.ladder.cheapest))
        if (decision := self._due(view, budget - view.floor_bytes())) is not None:
            return decision
        first = view.first_missing()
        if first is None:
            return self._more(view, budget)
        missing = list(view.missing_groups)
        ahead = missing[: self._horizon]
        owed = sum(view.bytes(group, layer) for group, layers in self._owed.items() for layer in layers)
        share = (budget - owed) * len(ahead) / len(missing)
        steps = sorted((step for group in ahead for step in self._steps.get(group, ())), key=lambda step: -step.worth)
        base, *layers = view.ladder.stacks[spend(view.ladder.layered, steps, ahead, first, share)]
        self._owed[first] = tuple(layers)
        return Decision.fetch(
            first, base, f"{share / 1e6:.2f} MB for {len(ahead)} groups: {len(layers)} further layers"
        )

    def _due(self, view: View, budget: float) -> Decision | None:
        """Request the next planned layer of a settled group, if the missing groups leave room for it."""
        for group in [group for group in self._owed if group in view.settled]:
            layers = self._owed.pop(group)
            current = view.track_of[group]
            if not layers or view.catalog.by_name[layers[0]].refines != current:
                continue
            if view.bytes(group, layers[0]) <= budget:
                if layers[1:]:
                    self._owed[group] = layers[1:]
                return Decision.upgrade(group, layers[0], "a planned layer of this group")
        return None

    def _more(self, view: View, budget: float) -> Decision:
        """Request the layer that saves most per byte among those that arrive at the bound."""
        best: tuple[float, int, str] | None = None
        for group in view.settled:
            current = view.track_of[group] or ""
            for layer in view.ladder.above.get(current, ()):
                size = layer.bytes[group]
                worth = (view.loss(group, current) - layer.loss[group]) / size
                if size <= budget and worth > 0 and (best is None or worth > best[0]):
                    best = (worth, group, layer.name)
        if best is None:
            return Decision.wait("no further layer would arrive at the bound")
        return Decision.upgrade(best[1], best[2], "spare bytes at the bound go into further layers")
