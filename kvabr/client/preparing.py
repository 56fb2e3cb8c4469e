"""What a play knows before it begins: its time, and what was found, ready to be played."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from kvabr.abr.ladder import Ladder
from kvabr.abr.tail import MOST_TAIL, TailOffer, tail_costs, tail_offers
from kvabr.client.lookup import Found, playable
from kvabr.client.options import PlayOptions, guard_s
from kvabr.codec.profile import Profile
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError
from kvabr.types.live import GrowingCatalog

_LOOKUP_SHARE = 0.25
"""Share of the deadline that a lookup may take although the engine could then not recompute everything in time."""
_MIN_LEFT_S = 1e-3


class Clock:
    """Seconds since a play was called for, and to its deadline."""

    def __init__(self, deadline_s: float) -> None:
        """Start, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._start_s, self.deadline_s = self._loop.time(), deadline_s

    def now(self) -> float:
        """Return the seconds since the call."""
        return self._loop.time() - self._start_s

    def left(self) -> float:
        """Return the seconds to the deadline; negative once it has passed."""
        return self.deadline_s - self.now()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was found, ready to be played."""

    ladder: Ladder
    profile: Profile | None
    sha256: str
    """SHA-256 of the catalog as it came, hex."""
    limited_by: str | None
    """See `Found.limited_by`."""
    left_out: int = 0
    """Tokens at the end of what was found that the engine computes: with the question, or sooner than they come."""
    cut: str | None = None
    """Why they are left out; None if there are none."""
    tail: int = 0
    """Tokens of these that it computes with the question, on what was fetched."""
    tail_s: float = 0.0
    """Seconds by which they make its call longer."""
    growing: GrowingCatalog | None = None
    """The catalog of an asset that is still being prefilled; None if it is complete."""

    @property
    def catalog(self) -> Catalog:
        """The tracks that can be decoded here."""
        return self.ladder.catalog


def loadable(found: Found, options: PlayOptions) -> Found | None:
    """Return what of a prompt's cache is loaded, by the options' limits; None: nothing."""
    catalog, most = found.catalog, options.max_load_tokens
    if catalog.tokens < options.min_load_tokens:
        return None
    if most is None or catalog.tokens <= most or catalog.sources:
        return found
    groups, limit = catalog.playable(most // catalog.spec.group_tokens)
    if not groups:
        return None
    return replace(found, catalog=catalog.prefix(groups), limited_by=limit)


def pays(catalog: Catalog) -> bool:
    """Return whether fetching the profile and then the cheapest track beats the cheapest that needs no profile."""
    try:
        plain = playable(catalog, profile=False)
    except FormatError:
        return True
    cheapest = min(track.total_bytes for track in catalog.tracks if track.refines is None)
    return catalog.profile_bytes + cheapest < min(t.total_bytes for t in plain.tracks if t.refines is None)


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
    """
    most = (0 if cost is None else MOST_TAIL) if options.tail is None else options.tail
    offers = tail_offers(catalog, cost, following=following, most=most, skip=skip, block=block)
    if cost is not None:
        left_s -= cost.seconds(catalog.first_token + catalog.tokens, following)
    costs = tail_costs(
        offers, left_s, rate=rate, time_price=options.time_price, gpu_price=options.gpu_price, decoders=decoders
    )
    return offers, costs
