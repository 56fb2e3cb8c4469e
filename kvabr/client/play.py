"""One play of what was found: profile, session, driver and result. Plays differ in the session's goal.

A play of a whole cache may continue with upgrades. Without an engine it ends at the deadline: complete, or with an
error that names the missing groups and has those before them. A prefix play is for an engine that computes by itself
whatever it is not given (vLLM, SGLang): it never waits for an engine, never fails for a group that did not come, and
hands over the groups before the first that is missing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from kvabr.abr.compute_planner import computed_before_a_lookup, computed_on_any_link
from kvabr.abr.estimator import Estimator, Prior
from kvabr.abr.ladder import Ladder
from kvabr.abr.plugins import load_policy, policy_class
from kvabr.abr.tail import MOST_TAIL, TailOffer, tail_costs, tail_offers
from kvabr.client.decode_speeds import DecodeSpeeds
from kvabr.client.driver import LIVE, Driver
from kvabr.client.engine_costs import EngineCosts
from kvabr.client.engine_hook import EngineHook
from kvabr.client.live_feed import LiveFeed
from kvabr.client.lookup import Found, most_frame_bytes, playable
from kvabr.client.options import PlayOptions, guard_s
from kvabr.client.passages import PassagePrompt
from kvabr.client.profiles import ProfileCache
from kvabr.client.resources import on_engine, timed
from kvabr.client.result import IncompleteError, Played, PlayedPrefix, listed, numbers
from kvabr.client.runner import Clock, R, Turn
from kvabr.client.shared_bandwidth import KnownLink, PeerHistory, estimating
from kvabr.client.sources import PlaySources
from kvabr.client.token_recompute import TokenRecompute
from kvabr.client.upgrades import Upgrades
from kvabr.client.warming import receive_pinned, warm_in_background
from kvabr.codec.profile import Profile
from kvabr.codec.quantised import all_finite, as_type, check_wanted, convert
from kvabr.codec.threads import decoder_threads
from kvabr.player.assembler import Assembler
from kvabr.player.blend_plan import delivered_loss
from kvabr.player.builder import choose_tail, new_estimator, new_session, opening
from kvabr.player.decode_queue import DecodeShare
from kvabr.player.prefixes import PlacedPrefix, prefix_loss
from kvabr.player.session_types import (
    ENGINE_PATIENCE,
    BlendGoal,
    GroupRecord,
    PlayRecord,
    PrefixGoal,
    UpgradeGoal,
    WholeGoal,
)
from kvabr.store.buffers import CACHES
from kvabr.transfer.work import decoders
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine, ResidentEngine, prefill_classes
from kvabr.types.errors import FormatError, KvabrError, ModelError, PlayError, TransportError, UsageError
from kvabr.types.events import (
    CacheDelivered,
    Log,
    PlayEvent,
    PlayGaveUp,
    ProfileFailed,
    RecomputeDone,
    RecomputeStarted,
    SourceLeftOut,
)
from kvabr.types.kv import KVSpec
from kvabr.types.live import GrowingCatalog
from kvabr.types.loss import played_loss, predicted_loss, promised_loss
from kvabr.types.units import computed_shape
from kvabr.types.words import counted

T = TypeVar("T")

_PROFILE_SHARE = 0.3
"""Share of the time left that fetching a codec profile may take; then the play goes on without the tracks it serves."""
_MIN_SHARE, _MIN_PREFIX_SHARE = 0.1, 0.05
"""Share of the deadline that a play gets even after a lookup that took longer, as far as the play may be late."""
_BLIND_S = 0.5
"""Most seconds that an engine takes which begins before anything is known of the link."""
_MIN_LEFT_S = 1e-3
_FIRST_CALL_S, _FIRST_CALL_TIMES = 60.0, 20.0
"""Seconds, or multiples of a guess, for which an engine is waited for of which nothing was timed: a first call may load
and compile, and the guess be wrong."""
_LOOKUP_SHARE = 0.25
"""Share of the deadline that a lookup may take although the engine could then not recompute everything in time."""
_MOST_PREFIXES = 16
"""Most prefixes that are considered where an engine cannot take over anywhere."""
_MIN_HUGE_BYTES = 4 << 20
"""Smaller tensors do not fill huge pages."""


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


@dataclass(slots=True)
class Play:
    """One play."""

    turn: Turn
    connection: PlaySources = field(init=False)
    options: PlayOptions = field(init=False)
    clock: Clock = field(init=False)
    profiles: ProfileCache
    history: PeerHistory
    """What the client knows of its peers."""
    speeds: DecodeSpeeds
    """How fast this machine decodes."""
    costs: EngineCosts
    """What the prefills of engines take here."""
    engine: Engine | None
    """Computes what would be late."""
    cost: PrefillCost | None
    """Of the engine's prefill; a prefix play needs it."""
    tokens: Sequence[int]
    """Ids of the prompt, for the engine."""
    _device: torch.device | None = field(init=False)
    """Where the cache is decoded; None: on the processor."""
    _decoders: int = field(init=False)
    """How many groups are decoded beside each other; a GPU takes one batch after the other."""

    def __post_init__(self) -> None:
        self.connection, self.options, self.clock = self.turn.connection, self.turn.options, self.turn.clock
        # Not a method of its own, with which the connection would keep what the play has left in memory.
        self.connection.left_out = partial(_left_out, self.options, self.clock)
        out, device = self.options.out, self.options.device
        self._device = device if out is None else out.device
        batches = self.options.decode_share is not None or (self._device is not None and self._device.type == "cuda")
        self._decoders = 1 if batches else decoder_threads()

    def over(self, played: R) -> R:
        """Note what came of the play, and return it."""
        return self.turn.over(played)

    async def prepare(self, found: Found, skip: int = 0, *, behind: int | None = None, block: int = 1) -> Prepared:
        """Fetch the codec profile if that pays and time allows, and leave out what cannot be decoded without it.

        The engine has the first ``skip`` groups already. If it computes the ``behind`` tokens of the prompt behind what
        was found, less may be played than was found (`shortened`, `kvabr.abr.tail`).

        Raises:
            FormatError: none of the asset's tracks can be decoded here.
            PlayError: the deadline has come, and there is no engine.
            UsageError: everything is skipped.
        """
        catalog = found.to_play
        with suppress(TransportError, TimeoutError):  # then its requests say why
            async with asyncio.timeout(max(0.0, _PROFILE_SHARE * self.clock.left())):
                await self.connection.reach()
        if self.engine is not None and self.options.prefill_cost is None:
            self.cost = self.costs.of(self.engine).cost(catalog.prefill)
        profile, why = await self._profile_of(catalog)
        catalog = playable(catalog, profile=profile is not None or catalog.profile is None, why=why)
        end, cut = catalog.first_token + catalog.tokens, None
        link = KnownLink.of_all(self.history.best(source.names) for source in self.connection.downloads)
        if self.cost is not None and behind is not None:
            left_s = self.clock.left() - guard_s(self.clock.deadline_s)
            catalog = shortened(catalog, self.cost, link, left_s, skip=skip, behind=behind, block=block)
            if catalog.first_token + catalog.tokens < end:
                cut = "the rest is sooner computed than fetched"
        behind = end - catalog.first_token - catalog.tokens + (behind or 0) + self.options.question_tokens
        offer = await self._tail(catalog, link.rate, skip=skip, behind=behind, block=block)
        wanted, growing = offer.catalog, None
        if offer.tokens and cut is None:
            cut = f"the last {counted(offer.tokens, 'token')} are computed with the question"
        if found.live is not None:
            growing = GrowingCatalog(found.live, wanted, most_frame_bytes(wanted.spec))
            wanted = growing.catalog
        for asset in catalog.sources or (catalog,):
            for name, digests in asset.known_digests() if growing is None else growing.known.items():
                self.connection.identify(asset.namespace, name, digests)
        ladder = await self._in_time(partial(_ladder, wanted))
        left_out = end - wanted.first_token - wanted.tokens
        return Prepared(
            ladder, profile, found.sha256, found.limited_by, left_out, cut, offer.tokens, offer.engine_s, growing
        )

    async def _in_time(self, read: Callable[[], T]) -> T:
        """Return what comes of reading a catalog, which may take a while; a `PlayError` says that it took too long."""
        end_s = None if self.engine is not None else max(0.0, self._patience_s() - self.clock.now())
        try:
            async with asyncio.timeout(end_s):
                return await asyncio.get_running_loop().run_in_executor(decoders(), read)
        except TimeoutError as error:
            late = f"the deadline of {self.clock.deadline_s:g} s came before its catalog was read; allow more"
            raise PlayError(f"no cache after {self.clock.now():.2g} s: {late}") from error

    async def _tail(self, catalog: Catalog, rate: float, *, skip: int, behind: int, block: int) -> TailOffer:
        """Return how much of what was found is fetched, and how much the engine computes with what is ``behind`` it."""
        left_s = self.clock.left() - guard_s(self.clock.deadline_s)
        choices = partial(
            tail_choices, catalog, self.cost, self.options, rate, left_s, following=behind, skip=skip, block=block,
            decoders=self._decoders, divides=self.engine is not None and policy_class(self.options.policy).divides,
        )  # fmt: skip
        return choose_tail(self.options.policy, *await self._in_time(choices))

    async def _profile_of(self, catalog: Catalog) -> tuple[Profile | None, str]:
        """Return the codec profile of an asset if it needs one, fetching it pays, and time allows; else why not."""
        if catalog.profile is None:
            return None, "it has none"
        if not self.profiles.has(catalog) and not pays(catalog):
            return None, "fetching it does not pay"
        try:
            async with asyncio.timeout(max(0.0, _PROFILE_SHARE * self.clock.left())):
                return await self.profiles.fetch(self.connection, catalog), ""
        except (TransportError, FormatError, TimeoutError) as error:
            why = str(error) or "it did not come in time"
            self.options.note(ProfileFailed(self.clock.now(), why))
        return None, why

    async def whole(self, prepared: Prepared, prompt: PassagePrompt | None = None) -> Played:
        """Play the whole cache, of a prompt in parts if one is given; errors as `AsyncClient.play`."""
        catalog, options, clock = prepared.catalog, self.options, self.clock
        behind = max(prepared.left_out, len(self.tokens) - catalog.tokens) + options.question_tokens
        lookup_s, rest_s = clock.now(), self._engine_s(catalog.tokens, behind)
        again = None if prompt is None else prompt.recompute(catalog, self.engine)
        driver = await self._run(WholeGoal() if prompt is None else prompt.goal, prepared, rest_s, again)
        record, assembler = driver.session.record, driver.assembler
        if record.gave_up is not None:
            options.note(PlayGaveUp(clock.now() - lookup_s, record.gave_up))
            if self.engine is not None and not catalog.even and driver.engine_error is None:
                return await self.compute()
            if isinstance(driver.engine_error, KvabrError):
                raise driver.engine_error
            message = f"no complete cache after {clock.now():.2f} s: {record.gave_up}"
            if driver.engine_error is not None:
                raise ModelError(self.with_trouble(message)) from driver.engine_error
            raise self._incomplete(message, record.gave_up, driver, prepared, lookup_s)
        take = partial(assembler.take_classes, upgrades=options.after is not None)
        # On a GPU it may wait for a batch, and for kernels that are being compiled.
        parts = await asyncio.to_thread(take) if assembler.together else take()
        ttft_s = clock.now()
        record.met = ttft_s + rest_s <= clock.deadline_s
        record.tail, record.tail_s = prepared.tail, prepared.tail_s
        coverage = tuple(track or "" for track in assembler.coverage)
        loss, blend = promised_loss(catalog, coverage, delivered_loss(catalog, record)), record.blend
        options.note(CacheDelivered(ttft_s - lookup_s, record.met, loss))
        return Played(
            parts=parts,
            tokens=catalog.tokens,
            coverage=coverage,
            ttft_s=ttft_s,
            lookup_s=lookup_s,
            met=record.met,
            loss=loss,
            fusion_loss=0.0 if blend is None else blend.fusion_loss,
            computed_again=assembler.computed_again,
            record=record,
            spec=catalog.spec,
            catalog=catalog,
            catalog_sha256=prepared.sha256,
            limited_by=prepared.limited_by,
            tail=prepared.tail,
            upgrades=None if options.after is None else self._upgrade(prepared.ladder, driver, options.after),
        )

    def _incomplete(
        self, message: str, reason: str, driver: Driver, prepared: Prepared, lookup_s: float
    ) -> IncompleteError:
        """Return the error of a play that ended with groups missing, which has what can be used of it."""
        catalog, record = prepared.catalog, driver.session.record
        missing, prefix = record.missing, None
        usable = missing[0] if missing and catalog.every_token else catalog.groups
        parts, found = driver.assembler.take_prefix(usable)
        if found.tokens:
            behind = catalog.tokens - found.tokens
            begin = catalog.behind(catalog.spec.groups(found.tokens), behind)
            coverage = _tracks(driver, found)
            if catalog.every_token:
                loss = promised_loss(begin, coverage, played_loss(begin, _steps_before(record, usable)))
            else:
                loss = predicted_loss(begin, coverage)
            prefix = Played(
                parts=parts,
                tokens=begin.tokens,
                coverage=coverage,
                ttft_s=self.clock.now(),
                lookup_s=lookup_s,
                met=False,
                loss=loss,
                record=record,
                spec=catalog.spec,
                catalog=begin,
                catalog_sha256=prepared.sha256,
                limited_by=prepared.limited_by,
                tail=behind + prepared.tail,
            )
        tokens = 0 if prefix is None else prefix.tokens
        said = numbers(missing) if catalog.every_token else listed(map(catalog.title, missing))
        message += f"; missing: {said}; in place before them: {tokens:,} of {catalog.tokens:,} tokens"
        return IncompleteError(self.with_trouble(message), reason, missing, record, prefix)

    async def prefix(self, prepared: Prepared, behind: int, block: int) -> PlayedPrefix:
        """Play a prefix, and hand over what is in place when the time is up; errors as `AsyncClient.play_prefix`.

        What should come sooner than the engine computes it is waited for. Computing the ``behind`` tokens of the prompt
        that no cache covers comes out of the deadline.
        """
        behind += prepared.left_out + self.options.question_tokens
        rest_s = self._engine_s(prepared.catalog.first_token + prepared.catalog.tokens, behind)
        return self._coded(await self._run(PrefixGoal(), prepared, rest_s, coded=True), prepared, block)

    async def coded(self, prepared: Prepared, *, whole: bool = True) -> PlayedPrefix:
        """Play the whole cache without an engine, and leave it compressed; errors as `AsyncClient.play_coded`.

        If not ``whole``, what came before the first group that is missing will do.
        """
        driver = await self._run(WholeGoal(), prepared, 0.0, coded=True)
        record = driver.session.record
        if record.gave_up is not None:
            self.options.note(PlayGaveUp(self.clock.now(), record.gave_up))
            message = f"no complete cache after {self.clock.now():.2f} s: {record.gave_up}"
            if whole:
                raise IncompleteError(self.with_trouble(message), record.gave_up, record.missing, record, None)
        return self._coded(driver, prepared, 1)

    def _coded(self, driver: Driver, prepared: Prepared, block: int) -> PlayedPrefix:
        """Return what a play has left compressed."""
        catalog = prepared.catalog
        groups, found = driver.assembler.take_coded(driver.session.record.used, block)
        record, coverage = driver.session.record, _tracks(driver, found)
        unused = sum(one.bytes for one in record.groups) - sum(record.groups[group].bytes for group in found.groups)
        cut = prepared.cut
        if record.missing or record.used is not None:
            cut = record.cut or record.gave_up or "the play ended"
            if record.missing and not catalog.every_token:
                cut += f"; missing: {listed(map(catalog.title, record.missing))}"
            if record.gave_up is None:  # it says so itself
                cut = "; ".join((cut, *driver.session.retries.last_words))
        return PlayedPrefix(
            spec=catalog.spec,
            groups=groups,
            dtype=self.options.dtype,
            spans=found.spans,
            first=catalog.first_token,
            tokens=found.tokens,
            wanted=catalog.tokens + prepared.left_out,
            units=tuple(map(catalog.unit, found.groups)),
            coverage=coverage,
            loss=prefix_loss(catalog, found, coverage),
            bytes_fetched=record.bytes_fetched,
            bytes_wasted=record.bytes_wasted + unused,
            seconds=self.clock.now(),
            cut=cut,
            damaged=len(record.damaged),
            failed=record.failed,
            tail=prepared.tail,
            live=record.live,
        )

    async def compute(self) -> Played:
        """Let the engine compute the whole prompt; raise `ModelError` if it fails or does not end."""
        engine, tokens, options, clock = self.engine, self.tokens, self.options, self.clock
        if engine is None:
            raise UsageError("there is no engine to recompute with")
        spec, lookup_s = engine.spec, clock.now()
        groups = spec.groups(len(tokens))
        patience_s = self._patience_s() + ENGINE_PATIENCE * self._engine_s(0, len(tokens)) + self._doubt_s()
        options.note(RecomputeStarted(0.0, 0, groups))
        try:
            async with asyncio.timeout(patience_s):
                work = partial(timed, asyncio.get_running_loop().time, self._computed, engine)
                parts, engine_s = await on_engine(engine, work)
            parts = self._placed(parts, spec)
            self.costs.of(engine).note(0, len(tokens), engine_s)
            self._save_costs()
        except TimeoutError as error:
            raise ModelError(f"nothing was fetched, and the engine did not end within {patience_s:.1f} s") from error
        except KvabrError:
            raise
        except Exception as error:  # engines raise whatever they like
            raise ModelError(f"nothing was fetched, and the engine failed: {error!r}") from error
        ttft_s = clock.now()
        took_s, met = ttft_s - lookup_s, ttft_s <= clock.deadline_s
        options.note(RecomputeDone(took_s, 0, groups))
        options.note(CacheDelivered(took_s, met, 0.0))
        record = PlayRecord(
            [
                GroupRecord(group, RECOMPUTED, requested_s=0.0, ready_s=took_s, source=RECOMPUTED)
                for group in range(groups)
            ],
            delivered_s=took_s,
            met=met,
            tokens_recomputed=len(tokens),
            recompute_s=took_s,
            steps=[("compute", 0, groups)],
        )
        return Played(parts, len(tokens), (RECOMPUTED,) * groups, ttft_s, lookup_s, met, 0.0, record, spec)

    def with_trouble(self, message: str) -> str:
        """Return an error message with what the connection knows of the cause."""
        trouble = self.connection.trouble
        return message if trouble is None or trouble in message else f"{message}; {trouble}"

    # -------------------------------------------------------------- internals

    async def _run(
        self,
        goal: WholeGoal | PrefixGoal | BlendGoal,
        prepared: Prepared,
        rest_s: float,
        again: TokenRecompute | None = None,
        *,
        coded: bool = False,
    ) -> Driver:
        """Drive a session to its end; the engine needs ``rest_s`` for what no cache covers."""
        options, ladder, connection = self.options, prepared.ladder, self.connection
        if options.device is not None and options.out is None and not coded:
            raise UsageError(
                f"PlayOptions.device ({options.device}) is for what is expanded later; give `out` to play into a GPU"
            )
        warmed = self._ready_device(prepared.profile)
        catalog = ladder.catalog
        try:
            room = None if coded else self._room(catalog)
            assembler = Assembler(catalog, prepared.profile, out=room, dtype=options.dtype, coded=coded)
        except RuntimeError as error:
            raise PlayError(f"no memory for a cache of {catalog.fp16_bytes:,} bytes: {error}") from error
        deadline_s, least, end_s = self.clock.deadline_s, _MIN_PREFIX_SHARE, self.clock.left()
        if not isinstance(goal, PrefixGoal):
            least, end_s = _MIN_SHARE, self._patience_s() + self._doubt_s() - self.clock.now()
        # At most half of the deadline is set aside for the rest: a worse cache would not make up for more.
        rates = options.decode_share or DecodeShare(self.speeds.rates(catalog, self._device), self.turn.plays)
        if coded:  # it is expanded when it is there
            cheapest = ladder.cheapest
            rest_s += rates.latency(cheapest) + rates.seconds(cheapest) * catalog.groups / self._decoders
        left_s = self.clock.left() - guard_s(deadline_s) - min(deadline_s / 2, rest_s)
        wanted_s = max(least * deadline_s, left_s)
        if self.engine is None:
            wanted_s = max(_MIN_LEFT_S, min(wanted_s, end_s))
        mode = options.mode or ("hole" if self.engine is None else self.engine.mode)
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
                    lookup_s=self.clock.now(),
                    tail_s=prepared.tail_s,
                )
            )
        with ExitStack() as links:
            session = new_session(
                ladder,
                wanted_s,
                options.policy,
                [
                    links.enter_context(estimating(source, self._estimator(), self.history))
                    for source in connection.downloads
                ],
                goal=goal,
                cost=self.cost,
                mode=mode,
                config=replace(
                    LIVE,
                    gpu_price=options.gpu_price,
                    time_price=options.time_price,
                    decoders=self._decoders,
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
            feed = None if prepared.growing is None else LiveFeed(connection, prepared.growing, ladder.cheapest)
            driver = Driver(
                session,
                connection,
                assembler,
                engine=self.engine,
                tokens=self.tokens,
                watch=options.watch,
                feed=feed,
                again=again,
            )
            await driver.run()
        self._save_costs()
        if self.history.path is not None:
            # Not in the decoders' threads: they must not wait for a disk.
            asyncio.get_running_loop().run_in_executor(None, self.history.save)
        profile = prepared.profile
        if not warmed and (profile is not None or catalog.profile is None) and self.speeds.lacks(catalog, self._device):
            # Only now: a play must not wait for it.
            asyncio.get_running_loop().run_in_executor(None, self.speeds.measure, catalog, profile, self._device)
        return driver

    def _ready_device(self, profile: Profile | None) -> bool:
        """Have groups received in memory from which a GPU copies by itself, and its kernels tried, and measured.

        Returns whether the latter is done by somebody else. Until it is, the processor decodes.
        """
        if self._device is None:
            return False
        receive_pinned(self._device)
        dtype = None if self.options.out is None else self.options.out.dtype
        trying = None if profile is None else warm_in_background(profile, self._device, dtype, self.speeds)
        if trying is not None and trying.is_alive():
            self._device, self._decoders = None, decoder_threads()
        return trying is not None

    def _doubt_s(self) -> float:
        """Return the seconds for which an engine is waited for beyond what it should take: many for its first call."""
        if self.engine is None or self.options.prefill_cost is not None or not self.costs.of(self.engine).empty:
            return 0.0
        return max(_FIRST_CALL_S, _FIRST_CALL_TIMES * self._engine_s(0, len(self.tokens)))

    def _save_costs(self) -> None:
        if self.engine is not None:
            asyncio.get_running_loop().run_in_executor(None, self.costs.save_engine, self.engine)

    def _upgrade(self, ladder: Ladder, played: Driver, after_s: float) -> Upgrades:
        """Begin the upgrades of a cache that was handed over."""
        options, connection, view = self.options, self.connection, played.session.view
        # An engine that has begun has moved on from a state, which is of no more use to it.
        kinds = view.catalog.spec.classes
        final = [kinds[view.catalog.unit(group).part].kind == "state" for group in range(view.groups)]
        tracks = zip(played.assembler.coverage, final, strict=True)
        rate = view.rate or played.session.record.bytes_fetched / max(view.now, 1e-3)
        shared, estimators = ExitStack(), []
        for source in connection.downloads:
            own = self._estimator()
            own.prime(Prior(rate / len(connection.downloads), view.ttfb_s))
            estimators.append(shared.enter_context(source.link.joined(own)))
        session = new_session(
            ladder,
            self.clock.deadline_s,
            options.policy,
            estimators,
            goal=UpgradeGoal(tuple(RECOMPUTED if stays else track or "" for track, stays in tracks), after_s, rate),
            config=replace(LIVE, decoders=self._decoders),
            cached_groups=connection.cached_groups,
            decode_rates=self.speeds.rates(ladder.catalog, self._device),
            log=None if options.log is None else partial(_late, options.log, view.now),
            offers=connection.offers,
            round_trips=connection.round_trips,
        )
        hook = EngineHook()
        return Upgrades(Driver(session, connection, played.assembler, hook=hook), hook, shared.close)

    def _estimator(self) -> Estimator:
        """Return a fresh estimator of the link."""
        return new_estimator(self.options.policy, self.options.estimator)

    def _patience_s(self) -> float:
        """Return when an incomplete play ends, seconds since the call; an engine may take longer."""
        return self.options.patience * self.clock.deadline_s

    def _engine_s(self, before: int, tokens: int) -> float:
        """Return the seconds that the engine needs for ``tokens`` behind ``before`` others; 0.0 without an engine."""
        return 0.0 if self.cost is None else self.cost.seconds(before, tokens)

    def _room(self, catalog: Catalog) -> torch.Tensor | None:
        """Return the tensor for the cache, or None: the assembler makes several. `RuntimeError`: there is no memory."""
        out = self.options.out
        if out is None and not catalog.every_token:
            return None
        if out is not None:
            return out[:, :, :, : catalog.tokens] if out.dim() == 5 else out
        return allocate(catalog.spec.shape(catalog.tokens), self.options.dtype or catalog.spec.torch_dtype)

    def _computed(self, engine: Engine) -> tuple[torch.Tensor, ...]:
        """Have the whole prompt computed, and check it; called in the engine's thread, where a GPU is waited for."""
        parts = computed(engine, self.tokens)
        for kv, part in zip(parts, engine.spec.parts, strict=True):
            due = computed_shape(part, len(self.tokens))
            if tuple(kv.shape) != due or not all_finite(kv):
                raise ModelError(f"the engine returned {tuple(kv.shape)}, or NaN, where {due} was due")
        return parts

    def _placed(self, parts: tuple[torch.Tensor, ...], spec: KVSpec) -> tuple[torch.Tensor, ...]:
        """Return what an engine computed in the tensor or element type that the caller wants."""
        options, tokens = self.options, len(self.tokens)
        if options.out is None:
            wanted = [options.dtype or part.torch_dtype for part in spec.parts]
            for dtype, part in zip(wanted, spec.parts, strict=True):
                check_wanted(dtype, part)
            pairs = zip(parts, wanted, spec.parts, strict=True)
            return tuple(as_type(kv.cpu(), dtype, part) for kv, dtype, part in pairs)
        place = options.out[:, :, :, :tokens]
        if tuple(place.shape) != spec.shape(tokens):
            have, needed = tuple(options.out.shape), spec.shape(tokens)
            raise UsageError(f"`out` is {have}, too small for {needed}")
        check_wanted(place.dtype, spec)
        convert(parts[0], place, spec)
        return (place,)


def computed(engine: Engine, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Compute a whole prompt, [layer, K/V, head, token, dim] per layer class, and leave it where the engine has it."""
    room = engine.reside(len(tokens)) if isinstance(engine, ResidentEngine) else None
    return prefill_classes(engine, tokens) if room is None else (room.prefill(tokens, 0),)


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


def _ladder(catalog: Catalog) -> Ladder:
    """Return the ladder of a catalog, with what the default policy asks of it: of a long prompt that takes a while."""
    ladder = Ladder(catalog)
    ladder.price(0.0)
    return ladder


def _tracks(driver: Driver, found: PlacedPrefix) -> tuple[str, ...]:
    """Return the tracks on which the groups of a prefix are in place."""
    coverage = driver.assembler.coverage
    return tuple(coverage[group] or "" for group in found.groups)


def _steps_before(record: PlayRecord, groups: int) -> list[tuple[str, int, int | str]]:
    """Return the steps of a play as far as they concern its first ``groups`` groups."""
    return [
        (kind, where, min(what, groups) if isinstance(what, int) else what)
        for kind, where, what in record.steps
        if where < groups
    ]


def _left_out(options: PlayOptions, clock: Clock, source: int, why: str) -> None:
    options.note(SourceLeftOut(clock.now(), source, why))


def _late(log: Log, begun_s: float, event: PlayEvent) -> None:
    """Log an event of the upgrades on the clock of the play."""
    log(replace(event, t=event.t + begun_s, late=True))


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a new contiguous tensor with arbitrary contents, in huge pages where the system has them.

    Every element is going to be written, so nothing is cleared. Memory of tensors that are gone is used again.

    Raises:
        RuntimeError: there is not enough memory.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < _MIN_HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.frombuffer(CACHES.take(count * dtype.itemsize), dtype=dtype).view(shape)
    except MemoryError as error:
        raise RuntimeError(str(error)) from error
