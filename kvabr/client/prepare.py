"""One play of a client: its sources, clock, options, engine and prompt; and what it plays of a found asset.

Preparing an asset fetches its codec profile, selects the decodable tracks, and chooses the part to fetch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from kvabr.abr.estimator import Estimator, Prior
from kvabr.abr.ladder import Ladder
from kvabr.abr.planner import computed_before_a_lookup
from kvabr.abr.plugins import policy_class
from kvabr.abr.tail import MAX_TAIL, TailOffer, tail_costs, tail_offers
from kvabr.client.decode_speeds import DecodeSpeeds
from kvabr.client.engine_work import EngineCosts
from kvabr.client.lookup import Found, most_frame_bytes, playable
from kvabr.client.options import PlayOptions, check_deadline, guard_s
from kvabr.client.profiles import ProfileCache
from kvabr.client.result import NothingCached, Played, PlayedPrefix
from kvabr.client.shared_bandwidth import PeerHistory, combined
from kvabr.client.sources import PlaySources
from kvabr.codec.profile import Profile
from kvabr.codec.threads import decoder_threads
from kvabr.player.builder import choose_tail, new_estimator
from kvabr.transfer.work import decoders
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine
from kvabr.types.errors import FormatError, PlayError, TransportError, UsageError
from kvabr.types.events import ProfileFailed, SourceLeftOut
from kvabr.types.live import GrowingCatalog
from kvabr.types.words import counted

R = TypeVar("R", bound=Played | NothingCached | PlayedPrefix)
T = TypeVar("T")

_FIRST_CALL_S, _FIRST_CALL_TIMES = 60.0, 20.0
"""Longest wait for an engine without timings, in seconds and multiples of its estimate: it may load and compile."""


@dataclass(frozen=True, slots=True)
class Memory:
    """State that a client keeps between plays."""

    profiles: ProfileCache
    history: PeerHistory
    speeds: DecodeSpeeds
    costs: EngineCosts


class Clock:
    """Seconds since a play's call, and to its deadline."""

    def __init__(self, deadline_s: float) -> None:
        """Start on the running event loop; raise `UsageError` unless the deadline is positive and finite."""
        check_deadline(deadline_s)
        self._loop = asyncio.get_running_loop()
        self._start_s, self.deadline_s = self._loop.time(), deadline_s

    def now(self) -> float:
        """Return the seconds since the call."""
        return self._loop.time() - self._start_s

    def left(self) -> float:
        """Return the seconds to the deadline; negative once it has passed."""
        return self._start_s + self.deadline_s - self._loop.time()


@dataclass(slots=True)
class PlayCall:
    """One play, from its turn on."""

    connection: PlaySources
    clock: Clock
    options: PlayOptions
    memory: Memory
    plays: Callable[[], int]
    """Number of current plays, including this one; they share link, decoders and engine."""
    engine: Engine | None
    cost: PrefillCost | None
    """Required for a prefix play."""
    tokens: Sequence[int]
    result: Played | NothingCached | PlayedPrefix | None = None
    device: torch.device | None = field(init=False)
    """None: the processor."""
    decoders: int = field(init=False)
    """Groups decoded in parallel; a GPU takes one batch at a time."""

    def __post_init__(self) -> None:
        # A bound method would make the connection keep the play's data in memory.
        self.connection.on_left_out = partial(_left_out, self.options, self.clock)
        out, device = self.options.out, self.options.device
        self.device = device if out is None else out.device
        batches = self.options.decode_share is not None or (self.device is not None and self.device.type == "cuda")
        self.decoders = 1 if batches else decoder_threads()

    def finish(self, result: R) -> R:
        """Record and return the result."""
        self.result = result
        return result

    @property
    def link(self) -> Prior:
        """Estimate of the links to all sources together."""
        return combined(peer.expected(self.memory.history) for peer in self.connection.peers)

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, less a reserve."""
        return self.clock.left() - guard_s(self.clock.deadline_s)

    @property
    def patience_s(self) -> float:
        """Time limit without an engine, seconds since the call."""
        return self.options.patience * self.clock.deadline_s

    @property
    def first_call_s(self) -> float:
        """Seconds to wait for an engine beyond its estimate: many for its first call."""
        engine = self.engine
        if engine is None or self.options.prefill_cost is not None or not self.memory.costs.of(engine).empty:
            return 0.0
        return max(_FIRST_CALL_S, _FIRST_CALL_TIMES * self.engine_s(0, len(self.tokens)))

    def engine_s(self, before: int, tokens: int) -> float:
        """Return the engine's seconds for ``tokens`` after ``before`` others; 0.0 without an engine."""
        return 0.0 if self.cost is None else self.cost.seconds(before, tokens)

    def estimator(self) -> Estimator:
        """Return a fresh estimator of the link."""
        return new_estimator(self.options.policy, self.options.estimator)

    def save_costs(self) -> None:
        """Save the engine's prefill timings."""
        if self.engine is not None:
            asyncio.get_running_loop().run_in_executor(None, self.memory.costs.save_engine, self.engine)

    def with_trouble(self, message: str) -> str:
        """Return a message with the connection's error."""
        trouble = self.connection.trouble
        return message if trouble is None or trouble in message else f"{message}; {trouble}"

    async def in_time(self, read: Callable[[], T]) -> T:
        """Read a catalog in a thread; raise `PlayError` if late."""
        end_s = None if self.engine is not None else max(0.0, self.patience_s - self.clock.now())
        try:
            async with asyncio.timeout(end_s):
                return await asyncio.get_running_loop().run_in_executor(decoders(), read)
        except TimeoutError as error:
            late = f"the deadline of {self.clock.deadline_s:g} s passed before its catalog was read; allow more"
            raise PlayError(f"no cache after {self.clock.now():.2g} s: {late}") from error


def _left_out(options: PlayOptions, clock: Clock, source: int, why: str) -> None:
    options.note(SourceLeftOut(clock.now(), source, why))


_PROFILE_SHARE = 0.3
"""Share of the time left for fetching a profile; then tracks that need it are omitted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A found asset, ready to play."""

    ladder: Ladder
    profile: Profile | None
    sha256: str
    limited_by: str | None
    engine_tokens: int = 0
    """Tokens at its end that the engine computes, with the question or because that is faster."""
    cut: str | None = None
    tail: int = 0
    """Of these, tokens computed with the question, on the fetched cache."""
    tail_s: float = 0.0
    """Seconds that they add."""
    growing: GrowingCatalog | None = None
    """For an asset still being prefilled."""

    @property
    def catalog(self) -> Catalog:
        """The tracks that can be decoded here."""
        return self.ladder.catalog


async def prepare(
    call: PlayCall, found: Found, skip: int = 0, *, uncached: int | None = None, block: int = 1
) -> Prepared:
    """Fetch the codec profile if it pays and time allows; otherwise omit tracks that need it.

    The engine has the first ``skip`` groups. If it computes ``uncached`` tokens, less may be played than was found
    (`shortened`, `kvabr.abr.tail`).

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
    if call.cost is not None and uncached is not None:
        catalog = shortened(catalog, call.cost, link, call.left_s, skip=skip, uncached=uncached, block=block)
        if catalog.first_token + catalog.tokens < end:
            cut = "the rest is faster to compute than to fetch"
    uncached = end - catalog.first_token - catalog.tokens + (uncached or 0) + call.options.question_tokens
    offer = await _tail(call, catalog, link.rate, skip=skip, uncached=uncached, block=block)
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
    engine_tokens = end - wanted.first_token - wanted.tokens
    return Prepared(
        ladder, profile, found.sha256, found.limited_by, engine_tokens, cut, offer.tokens, offer.engine_s, growing
    )


async def _tail(call: PlayCall, catalog: Catalog, rate: float, *, skip: int, uncached: int, block: int) -> TailOffer:
    choices = partial(
        tail_choices, catalog, call.cost, call.options, rate, call.left_s, following=uncached, skip=skip, block=block,
        decoders=call.decoders, divides=call.engine is not None and policy_class(call.options.policy).divides,
    )  # fmt: skip
    return choose_tail(call.options.policy, *await call.in_time(choices))


async def _profile_of(call: PlayCall, catalog: Catalog) -> tuple[Profile | None, str]:
    if catalog.profile is None:
        return None, "the asset has none"
    if not call.memory.profiles.has(catalog) and not pays(catalog):
        return None, "fetching it does not pay off"
    try:
        async with asyncio.timeout(max(0.0, _PROFILE_SHARE * call.clock.left())):
            return await call.memory.profiles.fetch(call.connection, catalog), ""
    except (TransportError, FormatError, TimeoutError) as error:
        why = str(error) or "it was not received in time"
        call.options.note(ProfileFailed(call.clock.now(), why))
    return None, why


def pays(catalog: Catalog) -> bool:
    """Return whether profile and cheapest track are smaller than the cheapest track without a profile."""
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


_MIN_LEFT_S = 1e-3
_LOOKUP_SHARE = 0.25
"""Least share of the deadline for a lookup, even if the engine could then be late."""
_MAX_PREFIXES = 16
"""Most prefixes to consider if the engine cannot continue at every group."""


def computes_at_once(options: PlayOptions, cost: PrefillCost | None, tokens: int, link: Prior) -> bool:
    """Return whether an engine finishes before a typical lookup."""
    if cost is None or not (policy_class(options.policy).divides and options.time_price > 0):
        return False
    return math.isfinite(options.gpu_price) and computed_before_a_lookup(cost, tokens, link.ttfb_s)


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

    ``catalog`` is from `Found.to_play`. Without a ``cost`` there is no engine, and a tail only if the options set one.
    ``rate`` in bytes per second, 0.0 if unknown; ``left_s`` to the deadline; ``following`` tokens always computed after
    the prefix; ``skip`` leading groups that the engine has; ``block`` size in tokens; ``decoders`` work in parallel.
    ``divides``: the engine may compute everything if that costs less.
    """
    most = (0 if cost is None else MAX_TAIL) if options.tail is None else options.tail
    offers = tail_offers(catalog, cost, following=following, limit=most, skip=skip, block=block)
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
    catalog: Catalog, cost: PrefillCost, link: Prior, left_s: float, *, skip: int, uncached: int, block: int = 1
) -> Catalog:
    """Return the prefix worth fetching: the longest that lets the engine finish in time, or else the fastest.

    It is the whole prefix if the engine can continue at every group, or the link is unknown. Arguments as for
    `tail_choices`; ``uncached``: tokens of the prompt without a cache.
    """
    kinds = {only.kind for only in catalog.spec.classes}
    if kinds <= {"full", "latent"} or link.rate <= 0:
        return catalog
    groups, size = len(catalog.chunks), catalog.spec.group_tokens
    counts = {catalog.playable(skip + (groups - skip) * part // _MAX_PREFIXES)[0] for part in range(1, _MAX_PREFIXES)}
    best, soonest_s = catalog, _prefix_s(catalog, cost, link, skip, catalog.tokens + uncached)
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
        seconds = _prefix_s(shorter, cost, link, skip, catalog.tokens + uncached)
        if seconds < soonest_s:
            best, soonest_s = shorter, seconds
    return best


def _prefix_s(catalog: Catalog, cost: PrefillCost, link: Prior, skip: int, tokens: int) -> float:
    left = catalog.suffix(skip)
    nbytes = min(track.total_bytes for track in left.tracks if track.refines is None)
    return link.ttfb_s + nbytes / link.rate + cost.seconds(catalog.tokens, tokens - catalog.tokens)
