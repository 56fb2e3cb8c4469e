"""``budget`` and ``mpc``: spend what the link can still carry where it saves most loss (a multiple-choice knapsack).

Every missing group starts on the cheapest track. Steps up are taken in the order of loss saved per byte until the
budget is spent. On each group's convex hull this greedy order is within one step of the optimum.

``budget`` spends the lower bound over all missing groups. ``mpc`` is RobustMPC on the deadline (Yin et al., SIGCOMM
2015; Puffer's and Pensieve's form of the bound): where a video player plans five chunks ahead against its buffer, it
plans five groups ahead against their share of the remaining time, at the harmonic mean of the recent rates over one
plus the largest recent error.
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.ladder import spend
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View


class Budget(Policy):
    """Knapsack of the remaining time against the lower bound of the rate; no upgrades."""

    name: ClassVar[str] = "budget"
    horizon: ClassVar[int | None] = None
    """Number of missing groups in the knapsack; None for all."""

    def decide(self, view: View) -> Decision:
        """Fetch the next missing group on the track that the knapsack gives it."""
        first = view.first_missing()
        if first is None:
            return Decision.finish("every group is in place or under way")
        missing = list(view.missing)
        budget = view.budget_bytes(view.lower_bound, view.decode_s(view.ladder.cheapest))
        within = set(missing if self.horizon is None else missing[: self.horizon])
        budget *= len(within) / len(missing)
        track = spend(view.ladder.options, view.ladder.steps, within, first, budget)
        reason = f"{budget / 1e6:.2f} MB can still arrive for {len(within)} groups"
        return Decision.fetch(first, track, reason, {name: view.bytes(first, name) for name in view.ladder.names})


class Mpc(Budget):
    """Plan five groups, send one, plan again."""

    name: ClassVar[str] = "mpc"
    estimator: ClassVar[str] = "harmonic"
    horizon: ClassVar[int | None] = 5
