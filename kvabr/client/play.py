"""Run plays from the first request to the end.

A play of a whole cache may continue with upgrades. Without an engine it ends at the deadline: complete, or with an
`IncompleteError`. A prefix play is for an engine that computes the rest itself (vLLM, SGLang): it returns the groups
before the first missing one.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvabr.abr.estimators import Prior
from kvabr.abr.plugins import load_policy
from kvabr.client.driver import LIVE, Driver
from kvabr.client.engine_hook import EngineHook
from kvabr.client.live_feed import LiveFeed
from kvabr.client.passages import PassagePrompt
from kvabr.client.prepare import Prepared
from kvabr.client.runner import PlayCall
from kvabr.client.token_recompute import TokenRecompute
from kvabr.client.upgrades import Upgrades
from kvabr.client.warming import receive_pinned, warm_in_background
from kvabr.codec.profile import Profile
from kvabr.codec.threads import decoder_threads
from kvabr.player.assembler import Assembler
from kvabr.player.groups import SharedDecodeRate
from kvabr.player.session import Session
from kvabr.player.session_types import BlendGoal, PlayRecord, PrefixGoal, UpgradeGoal, WholeGoal, opening
from kvabr.store.buffers import CACHES
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import PlayError, UsageError
from kvabr.types.events import Log, PlayEvent

_MIN_SHARE, _MIN_PREFIX_SHARE = 0.1, 0.05
"""Minimum fraction of the deadline for a play after a slow lookup: of a whole cache, and of a prefix."""
_MIN_LEFT_S = 1e-3
_MIN_HUGE_BYTES = 4 << 20
"""Tensors of fewer bytes are not placed in huge pages."""


@dataclass(frozen=True, slots=True)
class EndedPlay:
    """A play that has ended, complete or not."""

    prepared: Prepared
    driver: Driver
    lookup_s: float
    rest_s: float

    @property
    def record(self) -> PlayRecord:
        """History of every group."""
        return self.driver.session.record

    @property
    def assembler(self) -> Assembler:
        """The assembler, which holds the cache."""
        return self.driver.assembler


async def play_whole(call: PlayCall, prepared: Prepared, prompt: PassagePrompt | None = None) -> EndedPlay:
    """Play the whole cache, or a prompt in parts."""
    catalog = prepared.catalog
    uncached = max(prepared.tail, len(call.tokens) - catalog.tokens) + call.options.question_tokens
    again = None if prompt is None else prompt.recompute(catalog, call.engine)
    goal = WholeGoal() if prompt is None else prompt.goal
    return await _run(call, goal, prepared, call.engine_s(catalog.tokens, uncached), again)


async def play_prefix(call: PlayCall, prepared: Prepared, uncached: int) -> EndedPlay:
    """Play a prefix until time is up, and leave it compressed.

    Waits for groups that should arrive before the engine could compute them. The deadline includes computing the
    prompt's ``uncached`` tokens.
    """
    uncached += prepared.tail + call.options.question_tokens
    rest_s = call.engine_s(prepared.catalog.first_token + prepared.catalog.tokens, uncached)
    return await _run(call, PrefixGoal(), prepared, rest_s, coded=True)


async def play_coded(call: PlayCall, prepared: Prepared) -> EndedPlay:
    """Play the whole cache without an engine, and leave it compressed."""
    return await _run(call, WholeGoal(), prepared, 0.0, coded=True)


async def _run(
    call: PlayCall,
    goal: WholeGoal | PrefixGoal | BlendGoal,
    prepared: Prepared,
    rest_s: float,
    again: TokenRecompute | None = None,
    *,
    coded: bool = False,
) -> EndedPlay:
    options, ladder, connection, lookup_s = call.options, prepared.ladder, call.connection, call.clock.now()
    if options.device is not None and options.out is None and not coded:
        raise UsageError(
            f"PlayOptions.device ({options.device}) is only for a prefix that is expanded later; to play into a GPU, "
            "give `out`"
        )
    warmed = _ready_device(call, prepared.profile)
    catalog = ladder.catalog
    try:
        output = None if coded else _output(call, catalog)
        assembler = Assembler(catalog, prepared.profile, out=output, dtype=options.dtype, coded=coded)
    except RuntimeError as error:
        raise PlayError(f"no memory for a cache of {catalog.fp16_bytes:,} bytes: {error}") from error
    rates = options.decode_share or SharedDecodeRate(call.memory.speeds.rates(catalog, call.device), call.plays)
    cost_s = rest_s
    if coded:  # expanded after its arrival
        cheapest = ladder.cheapest
        cost_s += rates.latency(cheapest) + rates.seconds(cheapest) * catalog.groups / call.decoders
    wanted_s, end_s = _times(call, cost_s, prefix=isinstance(goal, PrefixGoal))
    mode = options.mode or ("hole" if call.engine is None else call.engine.mode)
    if options.log is not None and not isinstance(goal, PrefixGoal):
        options.log(
            opening(
                ladder,
                trace=connection.backend,
                policy=options.policy,
                estimator=options.estimator or load_policy(options.policy)().estimator,
                deadline_s=wanted_s,
                mode=mode,
                rtt_s=connection.stats().rtt_s,
                lookup_s=call.clock.now(),
                tail_s=prepared.tail_s,
            )
        )
    with ExitStack() as links:
        history = call.memory.history
        session = Session(
            ladder,
            wanted_s,
            options.policy,
            [links.enter_context(peer.estimating(call.estimator(), history)) for peer in connection.peers],
            goal=goal,
            cost=call.cost,
            mode=mode,
            config=replace(
                LIVE,
                gpu_price=options.gpu_price,
                time_price=options.time_price,
                # The goal of a joined prompt has its own limit.
                max_loss=math.inf if isinstance(goal, BlendGoal) or options.max_loss is None else options.max_loss,
                decoders=call.decoders,
                together=assembler.together,
                decodes_last=assembler.coded,
                decode_ahead_s=math.inf if assembler.coded else LIVE.decode_ahead_s,
            ),
            patience_s=end_s,
            cached_groups=connection.cached_groups,
            decode_rates=rates,
            expected_s=None if prepared.growing is None else prepared.growing.expected_s,
            log=options.log,
            offers=connection.offers,
            round_trips=connection.round_trips,
        )
        driver = Driver(
            session,
            connection,
            assembler,
            engine=call.engine,
            tokens=call.tokens,
            watch=options.watch,
            feed=None if prepared.growing is None else LiveFeed(connection, prepared.growing, ladder.cheapest),
            again=again,
        )
        await driver.run()
    _remember(call, prepared, warmed=warmed)
    return EndedPlay(prepared, driver, lookup_s, rest_s)


def _times(call: PlayCall, cost_s: float, *, prefix: bool) -> tuple[float, float]:
    """Return the seconds until the groups are due, and until the play ends even if some are missing.

    ``cost_s``: seconds of work after the play. It gets at most half of the deadline, since more would cost too much
    quality.
    """
    deadline_s, least, end_s = call.clock.deadline_s, _MIN_PREFIX_SHARE, call.clock.left()
    if not prefix:
        least, end_s = _MIN_SHARE, call.patience_s + call.first_call_s - call.clock.now()
    wanted_s = max(least * deadline_s, call.left_s - min(deadline_s / 2, cost_s))
    return (max(_MIN_LEFT_S, min(wanted_s, end_s)) if call.engine is None else wanted_s), end_s


def _remember(call: PlayCall, prepared: Prepared, *, warmed: bool) -> None:
    memory, catalog, profile = call.memory, prepared.catalog, prepared.profile
    call.save_costs()
    if memory.history.path is not None:
        # Outside the decoder threads, which must not wait for a disk.
        asyncio.get_running_loop().run_in_executor(None, memory.history.save)
    if not warmed and (profile is not None or catalog.profile is None) and memory.speeds.lacks(catalog, call.device):
        asyncio.get_running_loop().run_in_executor(None, memory.speeds.measure, catalog, profile, call.device)


def _ready_device(call: PlayCall, profile: Profile | None) -> bool:
    """Receive groups in pinned memory for a GPU, and compile, check and measure its kernels.

    Return True if a thread does the latter; until it ends, the processor decodes.
    """
    if call.device is None:
        return False
    receive_pinned(call.device)
    dtype = None if call.options.out is None else call.options.out.dtype
    trying = None if profile is None else warm_in_background(profile, call.device, dtype, call.memory.speeds)
    if trying is not None and trying.is_alive():
        call.device, call.decoders = None, decoder_threads()
    return trying is not None


def _output(call: PlayCall, catalog: Catalog) -> torch.Tensor | None:
    out = call.options.out
    if out is None and not catalog.every_token:
        return None
    if out is not None:
        return out[:, :, :, : catalog.tokens] if out.dim() == 5 else out
    return allocate(catalog.spec.shape(catalog.tokens), call.options.dtype or catalog.spec.torch_dtype)


def upgrade(call: PlayCall, played: EndedPlay, after_s: float) -> Upgrades:
    """Start upgrades of a returned cache; they end after ``after_s`` seconds at most."""
    options, connection, session = call.options, call.connection, played.driver.session
    view, assembler, ladder = session.view, played.assembler, played.prepared.ladder
    # A running engine has changed its recurrent state: upgrades of the old state would be useless.
    kinds = view.catalog.spec.classes
    final = [kinds[view.catalog.unit(group).part].kind == "state" for group in range(view.groups)]
    tracks = zip(assembler.coverage, final, strict=True)
    rate = view.rate or session.record.bytes_fetched / max(view.now, 1e-3)
    shared, estimators = ExitStack(), []
    for peer in connection.peers:
        own = call.estimator()
        own.prime(Prior(rate / len(connection.peers), view.ttfb_s))
        estimators.append(shared.enter_context(peer.link.joined(own)))
    upgrading = Session(
        ladder,
        call.clock.deadline_s,
        options.policy,
        estimators,
        goal=UpgradeGoal(tuple(RECOMPUTED if stays else track or "" for track, stays in tracks), after_s, rate),
        config=replace(LIVE, decoders=call.decoders),
        cached_groups=connection.cached_groups,
        decode_rates=call.memory.speeds.rates(ladder.catalog, call.device),
        log=None if options.log is None else partial(_late, options.log, view.now),
        offers=connection.offers,
        round_trips=connection.round_trips,
    )
    hook = EngineHook()
    return Upgrades(Driver(upgrading, connection, assembler, hook=hook), hook, shared.close)


def _late(log: Log, begun_s: float, event: PlayEvent) -> None:
    log(replace(event, t=event.t + begun_s, late=True))


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised contiguous tensor, in huge pages if large; raise `RuntimeError` if out of memory."""
    count = math.prod(shape)
    if count * dtype.itemsize < _MIN_HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.frombuffer(CACHES.take(count * dtype.itemsize), dtype=dtype).view(shape)
    except MemoryError as error:
        raise RuntimeError(str(error)) from error
