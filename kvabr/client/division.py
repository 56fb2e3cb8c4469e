"""How a prompt is divided between network and engine before anything of it is fetched."""

from __future__ import annotations

import math

from kvabr.abr.planner import computed_before_a_lookup, computed_on_any_link
from kvabr.abr.plugins import policy_class
from kvabr.abr.tail import MOST_TAIL, TailOffer, tail_costs, tail_offers
from kvabr.client.options import PlayOptions, guard_s
from kvabr.client.runner import Clock
from kvabr.client.shared_bandwidth import KnownLink
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

_BLIND_S = 0.5
"""Most seconds that an engine takes which begins before anything is known of the link."""
_MIN_LEFT_S = 1e-3
_LOOKUP_SHARE = 0.25
"""Share of the deadline that a lookup may take although the engine could then not recompute everything in time."""
_MOST_PREFIXES = 16
"""Most prefixes that are considered where an engine cannot take over anywhere."""


def computes_at_once(options: PlayOptions, cost: PrefillCost | None, tokens: int, link: KnownLink) -> bool:
    """Return whether an engine is done before a lookup usually brings anything, so that the play needs none."""
    if cost is None or not _computes_all(options):
        return False
    return computed_before_a_lookup(cost, tokens, link.ttfb_s)


def computes_blindly(
    options: PlayOptions, cost: PrefillCost | None, tokens: int, deadline_s: float, link: KnownLink
) -> bool:
    """Return whether nothing is known of the link, and an engine computes everything in any case, so that it begins.

    One that takes longer than `_BLIND_S` waits for a lookup, which takes some round trips.
    """
    if cost is None or link.rate > 0 or not _computes_all(options) or cost.seconds(0, tokens) > _BLIND_S:
        return False
    return computed_on_any_link(cost, tokens, deadline_s, time_price=options.time_price, gpu_price=options.gpu_price)


def _computes_all(options: PlayOptions) -> bool:
    """Return whether an engine computes a prompt that is there, where that costs less."""
    return policy_class(options.policy).divides and options.time_price > 0 and math.isfinite(options.gpu_price)


def lookup_time(clock: Clock, cost: PrefillCost | None, tokens: int) -> float:
    """Return the seconds that a lookup may take: as long as the engine could still recompute everything in time."""
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
    """Return how a prefix may be divided between network and engine, and what a play with each offer should cost.

    Args:
        catalog: the prefix, as a play needs it.
        cost: of the engine's prefill; None: there is no engine, and a tail only if the options ask for one.
        options: of the play.
        rate: of the link, bytes per second; 0.0: it is not known.
        left_s: seconds to the deadline.
        following: tokens that the engine computes behind the prefix in any case.
        skip: leading groups that it has.
        block: it takes whole blocks of this many tokens.
        decoders: groups that are decoded at once.
        divides: the play has the engine compute everything where that costs less.
    """
    most = (0 if cost is None else MOST_TAIL) if options.tail is None else options.tail
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
    """Return the prefix of what was found that is worth fetching: the longest with which the engine is in time.

    If none is, the one with which it is soonest. All of it where an engine can take over anywhere, and while nothing is
    known of the link.

    Args:
        catalog: what was found, as a play needs it (`Catalog.to_play`).
        cost: of the engine's prefill.
        link: what is known of the link.
        left_s: seconds to the deadline.
        skip: leading groups of tokens that the engine has.
        behind: tokens of the prompt that no cache covers.
        block: the engine takes whole blocks of this many tokens.
    """
    kinds = {only.kind for only in catalog.spec.classes}
    if kinds <= {"full", "latent"} or link.rate <= 0:
        return catalog
    groups, size = len(catalog.chunks), catalog.spec.group_tokens
    counts = {catalog.playable(skip + (groups - skip) * part // _MOST_PREFIXES)[0] for part in range(1, _MOST_PREFIXES)}
    best, soonest_s = catalog, _prefix_s(catalog, cost, link, skip, catalog.tokens + behind)
    for count in sorted(counts, reverse=True):
        end = count * size // block * block
        if soonest_s <= left_s:
            break
        if not skip < count < groups or end <= (count - 1) * size:
            continue
        try:
            shorter = catalog.prefix(count, end)
        except UsageError:  # there is no snapshot at the end of a block
            continue
        seconds = _prefix_s(shorter, cost, link, skip, catalog.tokens + behind)
        if seconds < soonest_s:
            best, soonest_s = shorter, seconds
    return best


def _prefix_s(catalog: Catalog, cost: PrefillCost, link: KnownLink, skip: int, tokens: int) -> float:
    """Return when a prompt of this many tokens is in place, if a prefix is fetched on the cheapest track."""
    left = catalog.suffix(skip)
    nbytes = min(track.total_bytes for track in left.tracks if track.refines is None)
    return link.ttfb_s + nbytes / link.rate + cost.seconds(catalog.tokens, tokens - catalog.tokens)
