"""Chooses how many of a prompt's last tokens the engine computes with the question instead of fetching them.

An engine computes the tokens after the cached prefix anyway. The same call can compute the last tokens of the prefix on
the coded cache, which removes most of the loss (`kvabr.types.tails`). That is cheap, or free if calls have a minimum
duration, and saves bytes. The planner estimates the cost of each choice before a play (`kvabr.abr.tail_costs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.joined import joined_with_tail, last_groups

DEFAULT_MAX_TAIL = 512
"""Default maximum tokens of a tail; a longer one hardly reduces the loss further."""
MAX_TAIL = 1 << 20
"""Largest accepted number of tokens of a tail or a question."""
_MAX_OFFERS = 8


@dataclass(frozen=True, slots=True)
class TailOffer:
    """One way to divide a prefix between the network and the engine's call for the question."""

    catalog: Catalog
    """The part to fetch, after skipped groups, with the losses that remain after the tail."""
    tokens: int
    """Number of tokens to compute; 0: the whole prefix is fetched."""
    engine_s: float
    """Seconds that these tokens add to the engine's call."""
    last_resort: bool = False
    """True if the tail is only worth it if the deadline would be missed otherwise."""


def tail_offers(
    catalog: Catalog,
    cost: PrefillCost | None,
    *,
    following: int,
    limit: int = DEFAULT_MAX_TAIL,
    skip: int = 0,
    block: int = 1,
    last_resorts: bool = False,
) -> list[TailOffer]:
    """Return the ways to divide a prefix, from no tail to the longest.

    A tail has whole groups, since a partial group would be fetched whole. It leaves at least one group to fetch; in
    joined passages, at least one of the last passage. If there are many ways, a few are offered, including the longest
    tail.

    Args:
        catalog: the cached prefix, as a play needs it (`Catalog.to_play`).
        cost: prefill cost from the first token of the prompt; None: unknown, or free.
        following: number of tokens computed after the prefix anyway, such as a question.
        limit: maximum tokens of a tail, which must fit into a step of the engine.
        skip: number of leading groups that need not be fetched.
        block: block size of the engine in tokens; a tail begins at a block.
        last_resorts: if the engine cannot continue after every group, also offer tails that are longer, or that no
            tokens follow, in case the deadline would be missed otherwise: the play cannot be cut later.

    Raises:
        UsageError: a number of tokens is negative or absurd, or everything is skipped.
    """
    for what, tokens in (("the question", following), ("the tail", limit)):
        if not 0 <= tokens <= MAX_TAIL:
            raise UsageError(f"{what} must have 0 to {MAX_TAIL:,} tokens, got {tokens:,}")
    groups = len(catalog.chunks)
    with_tail = partial(joined_with_tail if catalog.sources else Catalog.with_tail, catalog)
    if not 0 <= skip < groups:
        return [TailOffer(catalog.suffix(skip), 0, 0.0)]
    first, size = catalog.first_token, catalog.spec.group_tokens
    shortest = max(skip, (last_groups(catalog) or range(groups, groups)).start) if catalog.sources else skip
    anywhere = {only.kind for only in catalog.spec.classes} <= {"full", "latent"}
    last_resorts = last_resorts and cost is not None and not anywhere
    ends: dict[int, int] = {}
    for kept in range(groups - 1, shortest, -1):
        end = catalog.tokens_before(kept) if catalog.sources else kept * size
        if catalog.tokens - end > limit and not last_resorts:
            break
        if not (first + end) % block:
            ends[kept] = end
    possible = list(ends) if following or last_resorts else []
    step = max(1, math.ceil(len(possible) / _MAX_OFFERS))
    alone_s = 0.0 if cost is None else cost.seconds(first + catalog.tokens, following)
    offers = [TailOffer(with_tail(groups, following).suffix(skip), 0, 0.0)]
    for kept in reversed(possible[::-1][::step]):
        tokens = catalog.tokens - ends[kept]
        try:
            fetched = with_tail(kept, following + tokens).suffix(skip)
        except UsageError:  # a state has no snapshot there
            continue
        engine_s = 0.0
        if cost is not None:
            engine_s = max(0.0, cost.seconds(first + ends[kept], tokens + following) - alone_s)
        offers.append(TailOffer(fetched, tokens, engine_s, last_resort=tokens > limit or not following))
    return offers
