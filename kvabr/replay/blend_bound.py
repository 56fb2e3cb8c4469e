"""The clairvoyant bound of a prompt joined from passages: the least over all numbers of tokens to compute again.

Computing tokens takes the end of a play, in which nothing else counts. So a schedule that computes a share of them
costs at least what the bound of a play costs whose time is shorter by theirs, and whose passages lose what they lose
at that share. Choosing the tokens is free: it may happen while the cache still comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvabr.abr.ladder import Ladder
from kvabr.player.blend_plan import BlendOption, BlendPlan
from kvabr.player.session_types import BlendGoal, PlayerConfig
from kvabr.replay.clairvoyant import INFEASIBLE, Bound, Clairvoyant
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.joined import at_share


@dataclass(frozen=True, slots=True)
class BlendClairvoyant:
    """What a player could do that knew the link."""

    options: tuple[tuple[BlendOption, Clairvoyant], ...]
    gpu_price: float
    """Of a second of engine time, nats per generated token."""

    @classmethod
    def of(
        cls,
        ladder: Ladder,
        goal: BlendGoal,
        cost: PrefillCost | None,
        config: PlayerConfig,
        new: Callable[[Catalog], Clairvoyant],
    ) -> BlendClairvoyant:
        """Prepare the bounds of all options of a play; ``new`` returns that of a catalog."""
        plan = BlendPlan(ladder, cost, goal, time_price=config.time_price, gpu_price=config.gpu_price)
        made = tuple((option, new(at_share(ladder.catalog, option.share))) for option in plan.options)
        return cls(made, config.gpu_price if math.isfinite(config.gpu_price) else 0.0)

    def best(self, bound: Callable[[Clairvoyant, float], Bound]) -> Bound:
        """Return the bound of one play.

        Args:
            bound: returns what a clairvoyant makes of a play, given the seconds by which it is shorter.
        """
        found = INFEASIBLE
        for option, clairvoyant in self.options:
            one = bound(clairvoyant, option.seconds)
            value = one.objective + self.gpu_price * option.seconds
            if one.feasible and value < found.objective:
                engine_s = one.engine_s + option.seconds
                least = min(found.least_loss, one.least_loss)
                found = replace(one, objective=value, engine_s=engine_s, least_loss=least)
            elif one.feasible:
                found = replace(found, least_loss=min(found.least_loss, one.least_loss))
        return found
