"""How much of what was found a play fetches, if its engine computes the rest: decided before it begins.

With full attention an engine can take over anywhere, so a play decides on its way. Behind a prefix that ends earlier, a
window needs other groups than the play fetches, and a state another snapshot. A play of these must know where it ends
when it begins, and so decides by what earlier plays told of the link.
"""

from __future__ import annotations

from typing import NamedTuple

from kvabr.client.peer_history import PeerHistory
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

_MOST = 16
"""Most prefixes that are considered."""
_CAUTION, _LEAST_WEIGHT = 0.8, 0.5
"""Share of the rate of earlier plays that is counted on; and how fresh they must be, see `Prior.weight`."""


class KnownLink(NamedTuple):
    """What is known of the link before a play."""

    rate: float
    """Rate that it should exceed most of the time, bytes per second; 0.0 if it is unknown."""
    ttfb_s: float
    """Seconds from a request to its first byte."""


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
    counts = {catalog.playable(skip + (groups - skip) * part // _MOST)[0] for part in range(1, _MOST)}
    best, soonest_s = catalog, _seconds(catalog, cost, link, skip, catalog.tokens + behind)
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
        seconds = _seconds(shorter, cost, link, skip, catalog.tokens + behind)
        if seconds < soonest_s:
            best, soonest_s = shorter, seconds
    return best


def known_link(peer: str | None, history: PeerHistory) -> KnownLink:
    """Return what earlier plays told of the link to a peer, if they were not long ago."""
    prior = None if peer is None else history.of(peer)
    if prior is None or prior.weight < _LEAST_WEIGHT:
        return KnownLink(0.0, 0.0)
    return KnownLink(_CAUTION * prior.rate, prior.ttfb_s)


def _seconds(catalog: Catalog, cost: PrefillCost, link: KnownLink, skip: int, tokens: int) -> float:
    """Return when a prompt of this many tokens is in place, if a prefix is fetched on the cheapest track."""
    left = catalog.suffix(skip)
    nbytes = min(track.total_bytes for track in left.tracks if track.refines is None)
    return link.ttfb_s + nbytes / link.rate + cost.seconds(catalog.tokens, tokens - catalog.tokens)
