"""Replays of a prompt joined from passages, and their bound. Only the length of the text before the passages matters.

The bound is the minimum over all shares of tokens that a play may recompute at its end. A schedule that recomputes a
share costs at least the bound of a play that is shorter by the time of recomputing, with the passages' losses at that
share. Choosing the tokens takes no time, as it can be done during the transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvabr.abr.ladder import Ladder
from kvabr.player.blend_plan import BlendOption, BlendPlan
from kvabr.player.session_types import BlendGoal, PlayerConfig
from kvabr.replay.clairvoyant import INFEASIBLE, Bound, Clairvoyant
from kvabr.types.catalog import Catalog
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.joined import at_share, join, joinable
from kvabr.types.passage import Exact, Passage

EXACT, QUESTION = 32, 24
_ID_DISTANCE = 1 << 20


def prompt_of(
    catalogs: Sequence[Catalog],
    exact: int,
    max_loss: float = MISS_PENALTY,
    refused: Callable[[int, str], None] = lambda *_: None,
) -> Catalog:
    """Return the catalog of a prompt made of passages, in order; the engine computes passages that do not join.

    ``exact`` is the number of tokens before the first passage, at least one; ``max_loss`` is the maximum loss of the
    joined cache, nats per generated token; ``refused`` is called with the index of each passage that is not joined, and
    the reason.

    Raises:
        UsageError: a catalog is not a passage or is of another model; there is no text before the passages; or no
            passage can be joined.
    """
    if exact < 1:
        raise UsageError(
            f"--exact must be at least 1, because a prompt of passages begins with other text; got {exact}"
        )
    if not catalogs:
        raise UsageError("give at least one passage")
    found: dict[Passage, Catalog] = {}
    for number, catalog in enumerate(catalogs, 1):
        if catalog.passage is None:
            title = f"{catalog.namespace.model}/{catalog.namespace.prompt[:12]}..."
            raise UsageError(f"{title} is not a passage; `kvabr encode --passage` publishes one")
        if catalog.spec.digest() != catalogs[0].spec.digest():
            raise UsageError(
                f"passages of one prompt must be of one model, got {catalogs[0].spec.model} and {catalog.spec.model}"
            )
        found[Passage(tuple(range(number * _ID_DISTANCE, number * _ID_DISTANCE + catalog.tokens)))] = catalog
    order = list(found)
    reasons: dict[str, None] = {}

    def reject(passage: Passage, reason: str) -> None:
        reasons[reason] = None
        refused(order.index(passage), reason)

    usable = joinable(found, max_loss, reject)
    try:
        joined = join((Exact(tuple(range(exact))), *found), usable, catalogs[0].spec)
    except FormatError as error:
        raise UsageError(str(error)) from error
    if joined is None:
        raise UsageError(f"none of these passages can be joined: {'; '.join(reasons)}")
    return joined


@dataclass(frozen=True, slots=True)
class BlendClairvoyant:
    """Lower bound for players that know the link."""

    options: tuple[tuple[BlendOption, Clairvoyant], ...]
    gpu_price: float
    """Price of a second of engine time, nats per generated token."""

    @classmethod
    def of(
        cls,
        ladder: Ladder,
        goal: BlendGoal,
        cost: PrefillCost | None,
        config: PlayerConfig,
        new: Callable[[Catalog], Clairvoyant],
    ) -> BlendClairvoyant:
        """Prepare the bounds for all options of a play; ``new`` creates the clairvoyant of a catalog."""
        plan = BlendPlan(ladder, cost, goal, time_price=config.time_price, gpu_price=config.gpu_price)
        made = tuple((option, new(at_share(ladder.catalog, option.share))) for option in plan.options)
        return cls(made, config.gpu_price if math.isfinite(config.gpu_price) else 0.0)

    def best(self, bound: Callable[[Clairvoyant, float], Bound]) -> Bound:
        """Return the bound of a play; ``bound`` computes that of a clairvoyant for a play shortened by some seconds."""
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
