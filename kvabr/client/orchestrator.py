"""The steps of a play behind the lookup: the profile, the playing itself, and what happens when nothing is cached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvabr.abr.estimator import Estimator, Prior
from kvabr.abr.ladder import Ladder
from kvabr.abr.plugins import load_policy
from kvabr.client import allocator as room
from kvabr.client.driver import LIVE, Driver
from kvabr.client.executors import decoders, in_thread, known_cost, on_engine, prefill_cost
from kvabr.client.lookup import Found, playable
from kvabr.client.peer_history import priors_at
from kvabr.client.profiles import fetch_profile, profile_at_hand
from kvabr.client.result import Clock, Played, PlayOptions
from kvabr.client.shared_bandwidth import estimating, link_of
from kvabr.client.upgrades import Late, LateDriver
from kvabr.codec.profile import Profile
from kvabr.player.assembler import Assembler
from kvabr.player.builder import new_estimator, new_session, opening
from kvabr.player.session import Session
from kvabr.player.session_types import GroupRecord, PlayRecord, UpgradeGoal
from kvabr.quic.interface import Connection
from kvabr.types.catalog import RECOMPUTED, Catalog, played_loss
from kvabr.types.errors import FormatError, KvabrError, ModelError, PlayError, TransportError, UsageError
from kvabr.types.events import (
    CacheDelivered,
    Log,
    PlayEvent,
    PlayGaveUp,
    ProfileFailed,
    RecomputeDone,
    RecomputeStarted,
)
from kvabr.types.kv import KVSpec

_PROFILE_SHARE = 0.3
"""Share of the time left that fetching a codec profile may take; then the play goes on without the tracks it serves."""
_LEAST_SHARE = 0.1
"""Share of the deadline that a play is given even after a lookup that took longer: late, but at its cheapest."""
_ENGINE_PATIENCE = 2.0
"""Times that an engine may take what it was timed to take before it counts as hung."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is needed to begin."""

    ladder: Ladder
    profile: Profile | None
    sha256: str
    """Of the catalog as it came."""


async def timed(options: PlayOptions, tokens: Sequence[int]) -> PlayOptions:
    """The options with the cost of their engine, which is timed if nobody has done so yet."""
    engine = options.recompute
    if engine is None:
        return replace(options, cost=None)
    if options.cost is not None:
        return options
    cost = known_cost(engine) or await in_thread(partial(prefill_cost, engine, tokens))
    return replace(options, cost=cost)


async def prepare(origin: Connection, found: Found, options: PlayOptions, clock: Clock) -> Prepared:
    """Fetch the codec profile if that pays and time allows, and leave out what cannot be decoded without.

    Raises:
        FormatError: none of the asset's tracks can be decoded here.
    """
    catalog, profile = found.catalog, None
    needed = catalog.profile is not None
    if needed:
        try:
            if profile_at_hand(catalog, options.profiles) or _pays(catalog):
                async with asyncio.timeout(max(0.0, _PROFILE_SHARE * clock.left())):
                    profile = await fetch_profile(origin, catalog, options.profiles)
        except (TransportError, FormatError, TimeoutError) as error:
            options.note(ProfileFailed(clock.now(), str(error) or "it did not come in time"))
    catalog = playable(catalog, profile=profile is not None or not needed)
    for track in catalog.tracks:
        origin.identify(catalog.namespace, track.name, track.digests)
    ladder = await asyncio.get_running_loop().run_in_executor(decoders(), Ladder, catalog)
    return Prepared(ladder, profile, found.sha256)


async def perform(
    origin: Connection, prepared: Prepared, tokens: Sequence[int], options: PlayOptions, clock: Clock
) -> Played:
    """Play what was found.

    Raises:
        PlayError, ModelError, PolicyError, UsageError: see `kvabr.client.play.play`.
    """
    catalog = prepared.ladder.catalog
    assembler = Assembler(catalog, prepared.profile, out=_room(catalog, options))
    # What the engine must compute behind the cache comes out of the same deadline.
    behind = len(tokens) - catalog.tokens
    rest_s = 0.0 if options.cost is None else min(options.deadline_s / 2, options.cost.seconds(catalog.tokens, behind))
    lookup_s = clock.now()
    wanted_s = max(_LEAST_SHARE * options.deadline_s, clock.left() - options.guard_s - rest_s)
    priors = priors_at(options.priors)
    with estimating(origin, new_estimator(options.policy, options.estimator), priors) as estimator:
        session = _session(origin, prepared.ladder, options, estimator, wanted_s, lookup_s)
        driver = Driver(
            session, origin, catalog, assembler, engine=options.recompute, tokens=tokens, watch=options.watch
        )
        record = await driver.run()
    if options.priors is not None:
        asyncio.get_running_loop().run_in_executor(None, priors.save)  # a disk must not keep decoders from their work
    if record.gave_up is not None:
        options.note(PlayGaveUp(clock.now() - lookup_s, record.gave_up))
        if isinstance(driver.engine_error, KvabrError):
            raise driver.engine_error
        message = with_trouble(f"no cache after {clock.now():.2f} s: {record.gave_up}", origin)
        raise (PlayError if driver.engine_error is None else ModelError)(message) from driver.engine_error
    kv = assembler.take(upgrades=options.after is not None)
    ttft_s = clock.now()
    record.met = ttft_s <= options.deadline_s - rest_s
    coverage = tuple(track or "" for track in assembler.coverage)
    loss = played_loss(catalog, record.steps)
    options.note(CacheDelivered(ttft_s - lookup_s, record.met, loss))
    late = None
    if options.after is not None:
        late = _go_on(origin, prepared.ladder, assembler, coverage, session, options)
    return Played(
        kv,
        catalog.tokens,
        coverage,
        ttft_s,
        lookup_s,
        record.met,
        loss,
        record,
        catalog.spec,
        catalog,
        prepared.sha256,
        late,
    )


def _go_on(
    origin: Connection,
    ladder: Ladder,
    assembler: Assembler,
    coverage: tuple[str, ...],
    play: Session,
    options: PlayOptions,
) -> Late:
    """Begin the upgrades of a cache that was handed over."""
    assert options.after is not None  # noqa: S101  # else they are not wanted
    rate = play.view.rate or play.record.bytes_fetched / max(play.view.now, 1e-3)
    alone = new_estimator(options.policy, options.estimator)
    alone.prime(Prior(rate, play.view.ttfb_s))
    shared = ExitStack()
    estimator = shared.enter_context(link_of(origin).joined(alone))
    log: Log | None = None
    if options.log is not None:
        log = partial(_later, options.log, play.view.now)
    session = new_session(
        ladder,
        options.deadline_s,
        options.policy,
        estimator,
        goal=UpgradeGoal(coverage, options.after, rate),
        config=LIVE,
        at_hand=origin.at_hand,
        log=log,
    )
    driver = LateDriver(session, origin, ladder.catalog, assembler)
    return Late(session, driver, assembler, ladder.catalog, at_end=shared.close)


def _later(log: Log, begun_s: float, event: PlayEvent) -> None:
    """Log an event of the upgrades on the clock of the play."""
    log(replace(event, t=event.t + begun_s, late=True))


async def recompute_all(tokens: Sequence[int], options: PlayOptions, clock: Clock) -> Played:
    """Let the engine compute the whole prompt.

    Raises:
        ModelError: it failed, or did not end.
    """
    engine = options.recompute
    if engine is None or options.cost is None:
        raise UsageError("there is no engine to recompute with")
    spec, lookup_s = engine.spec, clock.now()
    patience_s = options.patience * options.deadline_s + _ENGINE_PATIENCE * options.cost.seconds(0, len(tokens))
    options.note(RecomputeStarted(0.0, 0, spec.groups(len(tokens))))
    try:
        async with asyncio.timeout(patience_s):
            kv = await on_engine(engine, partial(engine.prefill, tokens))
        kv = _placed(kv, spec, len(tokens), options)
    except TimeoutError as error:
        raise ModelError(f"nothing was fetched, and the engine did not end within {patience_s:.1f} s") from error
    except KvabrError:
        raise
    except Exception as error:  # an engine raises what it likes
        raise ModelError(f"nothing was fetched, and the engine failed: {error!r}") from error
    ttft_s = clock.now()
    took_s, met = ttft_s - lookup_s, ttft_s <= options.deadline_s
    groups = spec.groups(len(tokens))
    options.note(RecomputeDone(took_s, 0, groups))
    options.note(CacheDelivered(took_s, met, 0.0))
    record = PlayRecord(
        [GroupRecord(group, RECOMPUTED, requested_s=0.0, ready_s=took_s, source=RECOMPUTED) for group in range(groups)],
        delivered_s=took_s,
        met=met,
        tokens_recomputed=len(tokens),
        recompute_s=took_s,
        steps=[("compute", 0, groups)],
    )
    return Played(kv, len(tokens), (RECOMPUTED,) * groups, ttft_s, lookup_s, met, 0.0, record, spec)


def with_trouble(message: str, origin: Connection) -> str:
    """What to tell whoever gets no cache: what happened, and what the connection knows of why."""
    return message if origin.trouble is None else f"{message}; {origin.trouble}"


def nothing(spec: KVSpec, options: PlayOptions, clock: Clock) -> Played:
    """What a play brings when nothing is cached and there is no engine: no tokens at all."""
    now = clock.now()
    kv = torch.zeros(spec.shape(0), dtype=options.dtype or spec.torch_dtype)
    return Played(kv, 0, (), now, now, now <= options.deadline_s, 0.0, PlayRecord([]), spec)


def _room(catalog: Catalog, options: PlayOptions) -> torch.Tensor:
    """Where the cache goes."""
    out = options.out
    if out is None:
        try:
            return room.empty(catalog.spec.shape(catalog.tokens), options.dtype or catalog.spec.torch_dtype)
        except RuntimeError as error:  # there is no memory
            raise PlayError(f"no memory for a cache of {catalog.fp16_bytes:,} bytes: {error}") from error
    return out[:, :, :, : catalog.tokens] if out.dim() == 5 else out


def _session(
    origin: Connection,
    ladder: Ladder,
    options: PlayOptions,
    estimator: Estimator,
    wanted_s: float,
    lookup_s: float,
) -> Session:
    mode = options.mode or ("hole" if options.recompute is None else options.recompute.mode)
    catalog, cost = ladder.catalog, options.cost
    # However slow the engine is: what it has begun is sooner done than begun again by whoever would get an error.
    engine_s = 0.0 if cost is None else _ENGINE_PATIENCE * cost.seconds(0, catalog.tokens)
    options.note(
        opening(
            ladder,
            trace=origin.backend,
            policy=options.policy,
            estimator=options.estimator or load_policy(options.policy)().estimator,
            deadline_s=wanted_s,
            mode=mode,
            rtt_s=origin.stats().rtt_s,
            lookup_s=lookup_s,
        )
    )
    return new_session(
        ladder,
        wanted_s,
        options.policy,
        estimator,
        cost=cost,
        mode=mode,
        config=replace(LIVE, gpu_price=options.gpu_price),
        patience_s=options.patience * options.deadline_s + engine_s - lookup_s,
        at_hand=origin.at_hand,
        log=options.log,
    )


def _pays(catalog: Catalog) -> bool:
    """Whether fetching the profile and then the cheapest track beats fetching the cheapest that needs no profile."""
    try:
        plain = playable(catalog, profile=False)
    except FormatError:
        return True
    cheapest = min(track.total_bytes for track in catalog.tracks if track.refines is None)
    return catalog.profile_bytes + cheapest < min(t.total_bytes for t in plain.tracks if t.refines is None)


def _placed(kv: torch.Tensor, spec: KVSpec, tokens: int, options: PlayOptions) -> torch.Tensor:
    """What an engine computed, checked, in the tensor or the element type that the caller wants."""
    if tuple(kv.shape) != spec.shape(tokens) or not bool(torch.isfinite(kv).all()):
        raise ModelError(f"the engine returned {tuple(kv.shape)}, or NaN, where {spec.shape(tokens)} was due")
    if options.out is None:
        return kv.to(options.dtype or spec.torch_dtype)
    place = options.out[:, :, :, :tokens]
    if tuple(place.shape) != spec.shape(tokens):
        raise UsageError(f"the tensor to assemble in is {tuple(options.out.shape)}, too small for {spec.shape(tokens)}")
    return place.copy_(kv)
