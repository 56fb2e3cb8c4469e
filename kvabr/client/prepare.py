"""Prepare a found asset for a play: its codec profile, the decodable tracks, and the part to fetch."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvabr.abr.ladder import Ladder
from kvabr.abr.plugins import policy_class
from kvabr.abr.tail import TailOffer
from kvabr.client.call import PlayCall
from kvabr.client.division import shortened, tail_choices
from kvabr.client.lookup import Found, most_frame_bytes, playable
from kvabr.codec.profile import Profile
from kvabr.player.builder import choose_tail
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError, TransportError
from kvabr.types.events import ProfileFailed
from kvabr.types.live import GrowingCatalog
from kvabr.types.words import counted

_PROFILE_SHARE = 0.3
"""Share of the remaining time for fetching a codec profile; then tracks that need it are omitted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A found asset, ready to play."""

    ladder: Ladder
    profile: Profile | None
    sha256: str
    """SHA-256 of the catalog as received, hex."""
    limited_by: str | None
    """See `Found.limited_by`."""
    left_out: int = 0
    """Tokens at its end that the engine computes, with the question or because that is faster."""
    cut: str | None = None
    """Why they are left out; None if there are none."""
    tail: int = 0
    """Of these, tokens computed with the question, on the fetched cache."""
    tail_s: float = 0.0
    """Seconds that they add to its call."""
    growing: GrowingCatalog | None = None
    """Catalog of an asset that is still being prefilled; None if it is complete."""

    @property
    def catalog(self) -> Catalog:
        """The tracks that can be decoded here."""
        return self.ladder.catalog


async def prepare(
    call: PlayCall, found: Found, skip: int = 0, *, behind: int | None = None, block: int = 1
) -> Prepared:
    """Fetch the codec profile if it pays and time allows; otherwise omit tracks that need it.

    The engine has the first ``skip`` groups. If it computes ``behind`` uncached tokens, less may be played than was
    found (`shortened`, `kvabr.abr.tail`).

    Raises:
        FormatError: none of the asset's tracks can be decoded here.
        PlayError: the deadline has passed, and there is no engine.
        UsageError: everything is skipped.
    """
    catalog = found.to_play
    with suppress(TransportError, TimeoutError):  # its requests report the error
        async with asyncio.timeout(max(0.0, _PROFILE_SHARE * call.clock.left())):
            await call.connection.reach()
    if call.engine is not None and call.options.prefill_cost is None:
        call.cost = call.memory.costs.of(call.engine).cost(catalog.prefill)
    profile, why = await _profile_of(call, catalog)
    catalog = playable(catalog, profile=profile is not None or catalog.profile is None, why=why)
    end, cut = catalog.first_token + catalog.tokens, None
    link = call.link
    if call.cost is not None and behind is not None:
        catalog = shortened(catalog, call.cost, link, call.left_s, skip=skip, behind=behind, block=block)
        if catalog.first_token + catalog.tokens < end:
            cut = "the rest is sooner computed than fetched"
    behind = end - catalog.first_token - catalog.tokens + (behind or 0) + call.options.question_tokens
    offer = await _tail(call, catalog, link.rate, skip=skip, behind=behind, block=block)
    wanted, growing = offer.catalog, None
    if offer.tokens and cut is None:
        cut = f"the last {counted(offer.tokens, 'token')} are computed with the question"
    if found.live is not None:
        growing = GrowingCatalog(found.live, wanted, most_frame_bytes(wanted.spec))
        wanted = growing.catalog
    for asset in catalog.sources or (catalog,):
        for name, digests in asset.known_digests() if growing is None else growing.known.items():
            call.connection.identify(asset.namespace, name, digests)
    ladder = await call.in_time(partial(_ladder, wanted))
    left_out = end - wanted.first_token - wanted.tokens
    return Prepared(
        ladder, profile, found.sha256, found.limited_by, left_out, cut, offer.tokens, offer.engine_s, growing
    )


async def _tail(call: PlayCall, catalog: Catalog, rate: float, *, skip: int, behind: int, block: int) -> TailOffer:
    """Return which tokens to fetch, and which to compute with the ``behind`` tokens after them."""
    choices = partial(
        tail_choices, catalog, call.cost, call.options, rate, call.left_s, following=behind, skip=skip, block=block,
        decoders=call.decoders, divides=call.engine is not None and policy_class(call.options.policy).divides,
    )  # fmt: skip
    return choose_tail(call.options.policy, *await call.in_time(choices))


async def _profile_of(call: PlayCall, catalog: Catalog) -> tuple[Profile | None, str]:
    """Return the asset's codec profile if needed, worthwhile and in time; else the reason."""
    if catalog.profile is None:
        return None, "it has none"
    if not call.memory.profiles.has(catalog) and not pays(catalog):
        return None, "fetching it does not pay"
    try:
        async with asyncio.timeout(max(0.0, _PROFILE_SHARE * call.clock.left())):
            return await call.memory.profiles.fetch(call.connection, catalog), ""
    except (TransportError, FormatError, TimeoutError) as error:
        why = str(error) or "it did not come in time"
        call.options.note(ProfileFailed(call.clock.now(), why))
    return None, why


def pays(catalog: Catalog) -> bool:
    """Return whether the profile plus the cheapest track is smaller than the cheapest track without a profile."""
    try:
        plain = playable(catalog, profile=False)
    except FormatError:
        return True
    cheapest = min(track.total_bytes for track in catalog.tracks if track.refines is None)
    return catalog.profile_bytes + cheapest < min(t.total_bytes for t in plain.tracks if t.refines is None)


def _ladder(catalog: Catalog) -> Ladder:
    ladder = Ladder(catalog)
    ladder.price(0.0)
    return ladder
