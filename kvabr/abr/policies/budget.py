"""``budget``: spend what the lower bound can still carry where it saves most loss (a multiple-choice knapsack).

Every missing group starts at the cheapest track; steps up are taken in the order of loss saved per byte until the
budget is spent. On each group's convex hull this greedy order is within one step of the optimum.
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View


class Budget(Policy):
    """Knapsack of the time left against the lower bound of the rate; no second thoughts."""

    name: ClassVar[str] = "budget"
    horizon: ClassVar[int | None] = None
    """How many of the missing groups the knapsack looks at; None for all."""

    def decide(self, view: View) -> Decision:
        """Fetch the next missing group at the track that the knapsack gives it."""
        first = view.first_missing()
        if first is None:
            return Decision.finish("every group is in place or under way")
        missing = list(view.missing)
        budget = view.budget_bytes(view.lower_bound, view.decode_s(view.ladder.cheapest))
        within = set(missing if self.horizon is None else missing[: self.horizon])
        budget *= len(within) / len(missing)
        track, reason = spend(view, within, first, budget)
        return Decision.fetch(first, track, reason, {name: view.bytes(first, name) for name in view.ladder.names})


def spend(view: View, groups: set[int], first: int, budget: float) -> tuple[str, str]:
    """The track that the knapsack over ``groups`` gives to group ``first``, and the reason in words."""
    options = view.ladder.options
    left = budget - sum(options[group][0].bytes for group in groups)
    track = options[first][0].track
    stopped: set[int] = set()
    for step in view.ladder.steps:
        if step.group not in groups or step.group in stopped:
            continue
        if step.bytes <= left:
            left -= step.bytes
            if step.group == first:
                track = step.to
        else:
            stopped.add(step.group)
            if step.group == first or len(stopped) == len(groups):
                break
    return track, f"{budget / 1e6:.2f} MB can still arrive for {len(groups)} groups"
