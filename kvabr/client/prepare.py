"""Check the arguments of a call, and prepare a found asset for playing.

Preparing fetches the codec profile, selects the tracks that can be decoded, and chooses the prefix to fetch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvabr.abr.estimators import Prior
from kvabr.abr.ladder import Ladder
from kvabr.abr.planner import computed_before_a_lookup
from kvabr.abr.plugins import policy_class
from kvabr.abr.tail import DEFAULT_MAX_TAIL, TailOffer, tail_offers
from kvabr.abr.tail_costs import tail_costs
from kvabr.client.lookup import Found, playable
from kvabr.client.memory import EngineCosts
from kvabr.client.options import PlayOptions
from kvabr.client.runner import Clock, PlayCall, guard_s
from kvabr.codec.profile import Profile
from kvabr.player.play_policy import choose_tail
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine, EngineMode
from kvabr.types.errors import FormatError, TransportError, UsageError
from kvabr.types.events import ProfileFailed
from kvabr.types.kv import KVSpec
from kvabr.types.live import GrowingCatalog
from kvabr.types.media import MediaTokens
from kvabr.types.words import counted

_PROFILE_SHARE = 0.3
"""Fraction of the time left that may be spent fetching a profile; without it, tracks that need it are omitted."""
_LOOKUP_SHARE = 0.25
"""Minimum fraction of the time left for a lookup, even if the engine could then be late."""
_MIN_LEFT_S = 1e-3


def check_prompt(tokens: Sequence[int], engine: Engine | None = None) -> None:
    """Raise `UsageError` unless a prompt has one dimension and at least one token; `chain` checks the ids.

    A prompt with media cannot be played with an ``engine``, which receives only token ids.
    """
    if not hasattr(tokens, "__getitem__") or isinstance(tokens, str | bytes | Mapping):
        raise UsageError(
            f"a prompt must be a sequence of token ids, got {type(tokens).__name__}; tokenize text first, or give the "
            "`tokens` of a loaded file"
        )
    shape = getattr(tokens, "shape", None)
    if shape is not None and len(shape) != 1:
        raise UsageError(f"a prompt must have one dimension, got the shape {tuple(shape)}")
    if not len(tokens):
        raise UsageError("a prompt must have at least 1 token, got 0")
    if engine is not None and isinstance(tokens, MediaTokens):
        raise UsageError(
            "an engine computes from token ids alone, but some of these stand for media: play with "
            "PlayOptions(recompute=False), and let the model compute the rest"
        )


def engine_of(
    engine: Engine | None, options: PlayOptions, costs: EngineCosts
) -> tuple[Engine | None, PrefillCost | None]:
    """Return the engine of a play and its prefill cost; both None if it may not compute."""
    if engine is None or not options.recompute:
        return None, None
    return engine, options.prefill_cost or costs.of(engine).cost()


def model_of(model: KVSpec | str | None, engine: Engine | None) -> tuple[KVSpec | str | None, bool]:
    """Return the model to look up, and True if any group size is accepted."""
    if engine is None:
        return model, False
    if isinstance(model, KVSpec):
        check_engine(engine, model)
        return model, False
    if model not in (None, engine.spec.model):
        raise UsageError(f"the engine computes caches of {engine.spec.model}, not of {model}")
    return engine.spec, True


def check_engine(engine: Engine, spec: KVSpec) -> None:
    """Raise `UsageError` unless an engine computes caches of a spec."""
    if not engine.spec.same_cache(spec):  # the publisher chooses the group size
        raise UsageError(f"the engine computes caches of {engine.spec.model}, not of {spec.model}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A found asset, ready to play."""

    ladder: Ladder
    profile: Profile | None
    sha256: str
    limited_by: str | None
    tail: int = 0
    """Number of last tokens of the asset that the engine computes on the fetched cache, with the question."""
    tail_s: float = 0.0
    """Seconds that the engine takes for the tail."""
    growing: GrowingCatalog | None = None
    """Catalog of an asset still being prefilled; None if it is complete."""

    @property
    def catalog(self) -> Catalog:
        """The tracks that can be decoded here."""
        return self.ladder.catalog

    @property
    def cut(self) -> str | None:
        """Why the play requests less than the asset; None if it does not."""
        return f"the engine computes the last {counted(self.tail, 'token')}" if self.tail else None


async def prepare(
    call: PlayCall, found: Found, skip: int = 0, *, uncached: int | None = None, block: int = 1
) -> Prepared:
    """Fetch the codec profile if it pays and time allows; otherwise omit tracks that need it.

    The engine has the first ``skip`` groups, and computes ``uncached`` tokens after the asset; None: only the tokens of
    the question. The prefix may become shorter than the asset (`kvabr.abr.tail`).

    Raises:
        FormatError: none of the asset's tracks can be decoded here.
        PlayError: the deadline has passed, and there is no engine.
        UsageError: everything is skipped.
    """
    catalog = found.to_play
    with suppress(TransportError, TimeoutError):  # later requests report the error
        async with asyncio.timeout(max(0.0, _PROFILE_SHARE * call.clock.left())):
            await call.connection.reach()
    if call.engine is not None and call.options.prefill_cost is None:
        call.cost = call.memory.costs.of(call.engine).cost(catalog.prefill)
    profile, why = await _profile_of(call, catalog)
    catalog = playable(catalog, profile=profile is not None or catalog.profile is None, why=why)
    mode: EngineMode | None = None
    if call.engine is not None and policy_class(call.options.policy).divides:
        mode = call.options.mode or call.engine.mode
    choices = partial(
        tail_choices, catalog, call.cost, call.options, call.link, call.left_s,
        following=(uncached or 0) + call.options.question_tokens, skip=skip, block=block, decoders=call.decoders,
        mode=mode, last_resorts=uncached is not None,
    )  # fmt: skip
    offer = choose_tail(call.options.policy, *await call.in_time(choices))
    wanted, growing = offer.catalog, None
    if found.live is not None:
        growing = GrowingCatalog(found.live, wanted)
        wanted = growing.catalog
    for asset in catalog.sources or (catalog,):
        for name, digests in asset.known_digests() if growing is None else growing.known.items():
            call.connection.identify(asset.namespace, name, digests)
    ladder = await call.in_time(partial(Ladder, wanted))
    return Prepared(ladder, profile, found.sha256, found.limited_by, offer.tokens, offer.engine_s, growing)


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
    """Return True if profile and cheapest track are smaller than the cheapest track without a profile."""
    try:
        plain = playable(catalog, profile=False)
    except FormatError:
        return True
    cheapest = min(track.total_bytes for track in catalog.tracks if track.refines is None)
    return catalog.profile_bytes + cheapest < min(t.total_bytes for t in plain.tracks if t.refines is None)


def computes_at_once(options: PlayOptions, cost: PrefillCost | None, tokens: int, link: Prior) -> bool:
    """Return True if an engine finishes before a typical lookup, and the objective prefers that."""
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
    link: Prior,
    left_s: float,
    *,
    following: int,
    skip: int = 0,
    block: int = 1,
    decoders: int = 1,
    mode: EngineMode | None = None,
    last_resorts: bool = False,
) -> tuple[list[TailOffer], list[float]]:
    """Return possible divisions of a prefix between network and engine, and the expected cost of a play with each.

    ``catalog`` is from `Found.to_play`. Without a ``cost`` there is no engine, and a tail only if the options set one.
    ``link``: earlier plays; ``left_s``: seconds to the deadline; ``following``: tokens after the prefix, which the
    engine always computes; ``skip``: leading groups that the engine has; ``block``: block size in tokens; ``decoders``:
    number of decoders in parallel. ``mode``: which other parts of the prefix the engine may compute; None: nothing.
    ``last_resorts``: see `tail_offers`.
    """
    most = (0 if cost is None else DEFAULT_MAX_TAIL) if options.tail is None else options.tail
    offers = tail_offers(
        catalog, cost, following=following, limit=most, skip=skip, block=block, last_resorts=last_resorts
    )
    if len(offers) == 1:
        return offers, [0.0]
    if cost is not None:
        left_s -= cost.seconds(catalog.first_token + catalog.tokens, following)
    costs = tail_costs(
        offers, left_s, rate=link.rate, ttfb_s=link.ttfb_s, cost=None if mode is None else cost, mode=mode or "hole",
        decoders=decoders, time_price=options.time_price, gpu_price=options.gpu_price,
        max_loss=math.inf if options.max_loss is None else options.max_loss,
    )  # fmt: skip
    return offers, costs
