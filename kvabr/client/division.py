"""How to divide a prompt between network and engine before fetching."""

from __future__ import annotations

import math

from kvabr.abr.planner import computed_before_a_lookup, computed_on_any_link
from kvabr.abr.plugins import policy_class
from kvabr.abr.tail import DEFAULT_MAX_TAIL, TailOffer, tail_costs, tail_offers
from kvabr.client.options import PlayOptions, guard_s
from kvabr.client.runner import Clock
from kvabr.client.shared_bandwidth import KnownLink
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

_BLIND_S = 0.5
"""Longest computation, in seconds, to start with an unknown link."""
_MIN_LEFT_S = 1e-3
_LOOKUP_SHARE = 0.25
"""Least share of the deadline for a lookup, even if the engine could then not recompute everything in time."""
_MAX_PREFIXES = 16
"""Most prefixes to consider if the engine cannot continue at every group."""


def computes_at_once(options: PlayOptions, cost: PrefillCost | None, tokens: int, link: KnownLink) -> bool:
    """Return whether an engine finishes before a typical lookup, so that the play needs none."""
    if cost is None or not _computes_all(options):
        return False
    return computed_before_a_lookup(cost, tokens, link.ttfb_s)


def computes_blindly(
    options: PlayOptions, cost: PrefillCost | None, tokens: int, deadline_s: float, link: KnownLink
) -> bool:
    """Return whether the engine should start at once: the link is unknown, and computing everything pays on any link.

    Longer computations than `_BLIND_S` wait for a lookup, which takes some round trips.
    """
    if cost is None or link.rate > 0 or not _computes_all(options) or cost.seconds(0, tokens) > _BLIND_S:
        return False
    return computed_on_any_link(cost, tokens, deadline_s, time_price=options.time_price, gpu_price=options.gpu_price)


def _computes_all(options: PlayOptions) -> bool:
    """Return whether the engine may compute a cached prompt to save cost."""
    return policy_class(options.policy).divides and options.time_price > 0 and math.isfinite(options.gpu_price)


def lookup_time(clock: Clock, cost: PrefillCost | None, tokens: int) -> float:
    """Return the longest lookup, in seconds, that leaves the engine time to recompute everything."""
    left_s = max(_MIN_LEFT_S, clock.left())
    if cost is None:
        return left_s
    return max(left_s - guard_s(clock.deadline_s) - cost.seconds(0, tokens), _LOOKUP_SHARE * left_s)


def tail_choices(
    catalog: Catalog,
    cost: PrefillCost | None,
    options: PlayOptions,
    rate: float,
    left_s: float,
    *,
    following: int,
    skip: int = 0,
    block: int = 1,
    decoders: int = 1,
    divides: bool = False,
) -> tuple[list[TailOffer], list[float]]:
    """Return possible divisions of a prefix between network and engine, and the expected cost of a play with each.

    Args:
        catalog: the prefix, from `Found.to_play`.
        cost: cost of the engine's prefill; None: there is no engine, and a tail only if the options set one.
        options: of the play.
        rate: of the link, bytes per second; 0.0: unknown.
        left_s: seconds to the deadline.
        following: tokens after the prefix that the engine always computes.
        skip: leading groups that the engine has.
        block: the engine's block size in tokens.
        decoders: groups decoded in parallel.
        divides: the engine may compute everything if that costs less.
    """
    most = (0 if cost is None else DEFAULT_MAX_TAIL) if options.tail is None else options.tail
    offers = tail_offers(catalog, cost, following=following, most=most, skip=skip, block=block)
    computed_s = math.inf
    if cost is not None:
        left_s -= cost.seconds(catalog.first_token + catalog.tokens, following)
        if divides:
            before = catalog.tokens_before(skip)
            computed_s = cost.seconds(catalog.first_token + before, catalog.tokens - before)
    costs = tail_costs(
        offers, left_s, rate=rate, time_price=options.time_price, gpu_price=options.gpu_price, decoders=decoders,
        computed_s=computed_s,
    )  # fmt: skip
    return offers, costs


def shortened(
    catalog: Catalog, cost: PrefillCost, link: KnownLink, left_s: float, *, skip: int, behind: int, block: int = 1
) -> Catalog:
    """Return the prefix worth fetching: the longest that lets the engine finish in time, or else the fastest.

    It is the whole prefix if the engine can continue at every group, or the link is unknown.

    Args:
        catalog: the prefix, from `Found.to_play`.
        cost: cost of the engine's prefill.
        link: estimate of the link.
        left_s: seconds to the deadline.
        skip: leading groups that the engine has.
        behind: uncached tokens of the prompt.
        block: the engine's block size in tokens.
    """
    kinds = {only.kind for only in catalog.spec.classes}
    if kinds <= {"full", "latent"} or link.rate <= 0:
        return catalog
    groups, size = len(catalog.chunks), catalog.spec.group_tokens
    counts = {catalog.playable(skip + (groups - skip) * part // _MAX_PREFIXES)[0] for part in range(1, _MAX_PREFIXES)}
    best, soonest_s = catalog, _prefix_s(catalog, cost, link, skip, catalog.tokens + behind)
    for count in sorted(counts, reverse=True):
        end = count * size // block * block
        if soonest_s <= left_s:
            break
        if not skip < count < groups or end <= (count - 1) * size:
            continue
        try:
            shorter = catalog.prefix(count, end)
        except UsageError:  # no snapshot at the end of a block
            continue
        seconds = _prefix_s(shorter, cost, link, skip, catalog.tokens + behind)
        if seconds < soonest_s:
            best, soonest_s = shorter, seconds
    return best


def _prefix_s(catalog: Catalog, cost: PrefillCost, link: KnownLink, skip: int, tokens: int) -> float:
    """Return the seconds until a prompt of this many tokens is in place, with its prefix on the cheapest track."""
    left = catalog.suffix(skip)
    nbytes = min(track.total_bytes for track in left.tracks if track.refines is None)
    return link.ttfb_s + nbytes / link.rate + cost.seconds(catalog.tokens, tokens - catalog.tokens)
