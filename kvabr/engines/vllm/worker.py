"""The connector's half in a worker of vLLM: plays caches into the engine's blocks, and publishes from them.

Plays run on the client's event loop, and leave compressed groups in host memory. vLLM allocates blocks for promised
tokens, and threads or a GPU stream decode the groups into these. Another thread copies caches to publish. vLLM keeps a
request's blocks until its load or publication ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvabr.client.blocking import Background, Handle
from kvabr.client.options import PlayOptions
from kvabr.client.result import PlayedPrefix, expand_here
from kvabr.engines.clients import EngineClient
from kvabr.engines.layouts import whole_blocks
from kvabr.engines.settings import TroubleLog
from kvabr.engines.vllm.blocks import Caches, EngineBlocks, LayoutOf, Store
from kvabr.engines.vllm.config import ServedModel, VllmSettings
from kvabr.engines.vllm.copier import Copier
from kvabr.engines.vllm.lossy import LossyGroups
from kvabr.engines.vllm.plays import CopyRequest, LoadRequest, PlacedPlay, Step, cut, find_cache
from kvabr.engines.vllm.publishing import Publications, Publishers
from kvabr.engines.vllm.stats import SECONDS, ConnectorCounts
from kvabr.engines.vllm.step_times import StepTimes
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import KvabrError, PlayError
from kvabr.types.loss import predicted_loss, promised_loss

_log = logging.getLogger("vllm.kvabr")

_NAP_S, _SHORT_NAP_S = 0.01, 0.002
"""Pauses in steps without computation, in seconds, since vLLM would otherwise poll on a core that decoding needs; the
shorter pause is for lookups.
"""
_START_S = 30.0
_HUNG_S, _HUNG_DEADLINES = 5.0, 2.0
"""Time limit after which a hanging play is cancelled: seconds, plus a multiple of the deadline."""
_MAX_LOSSY = 4096
_EXACT = ("FP16", "BF16", "Raw")
"""Tracks without loss."""


@dataclass(slots=True)
class _Playing:
    load: LoadRequest
    handle: Handle[PlayedPrefix]
    prefix: PlayedPrefix | None = None


class WorkerHalf:
    """The connector's half in a worker."""

    def __init__(
        self,
        settings: VllmSettings,
        model: ServedModel,
        client: Background[EngineClient] | None,
        publishers: Publishers | None,
    ) -> None:
        self._settings, self._model, self._client = settings, model, client
        self.counts, self._trouble = ConnectorCounts(), TroubleLog(_log)
        self._blocks: EngineBlocks | None = None
        self._asleep: EngineBlocks | None = None
        self._copier, self._loader = Copier("kvabr-copy"), Copier("kvabr-load")
        self._news = threading.Condition()
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._failed: set[int] = set()
        self._unfilled: set[str] = set()
        """Requests with failed loads, used if vLLM does not accept single failed blocks."""
        self._plays: dict[int, _Playing] = {}
        self._placed: list[PlacedPlay] = []
        self._scheduled, self._nap_s = 0, _NAP_S
        kind = f"{' '.join(sorted({str(model.kept(part)) for part in model.shard.parts}))} {model.ranks}"
        self._times = StepTimes(kind, model.shard, model.step_tokens, settings.cache, self._copier.submit)
        self.lossy = LossyGroups(model.spec, model.block, _MAX_LOSSY)
        self._max_loss = math.inf
        self._publications: Publications | None = None
        if publishers is not None:
            self._publications = Publications(self, publishers, model, self._copier, settings.host_mib << 18)

    def register(
        self, caches: Caches, layout_of: LayoutOf, store: Store | None = None, *, keepers: Sequence[str] = ()
    ) -> None:
        """Set the engine's cache; raise as `EngineBlocks`. ``keepers`` are connectors that would keep lossy plays."""
        if keepers:
            self._max_loss = self._settings.keep_loss
            _log.info(
                "kvabr: %s may keep played caches, so caches with a loss above keep_loss (%g nats) are computed "
                "instead",
                ", ".join(keepers),
                self._max_loss,
            )
        self._blocks = EngineBlocks(self._model, caches, layout_of, store)
        self.lossy.limit = max(_MAX_LOSSY, 4 * self._blocks.tokens // self._model.spec.group_tokens)
        self._copier.use(self._blocks.device)
        self._loader.use(self._blocks.device)
        self._times.use(self._blocks.device)
        if self._client is not None:
            spec, blocks = self._model.shard, self._blocks
            dtype = self._model.kept(spec.largest)
            self._client.begin(lambda client: client.warm(spec, blocks.device, dtype, blocks.layers))
            # Wait for a player process to start now, as the first request has no time for it.
            ready = self._client.begin(lambda client: client.known_link())
            try:
                ready.result(_START_S)
            except (KvabrError, TimeoutError) as error:
                self._trouble.warn("plays are not possible yet", str(error) or f"not ready after {_START_S:g} s")
        if self._publications is not None:
            self._publications.registered()
        one, many = (self.cost.seconds(0, tokens) for tokens in (1, 8192))
        tracks = "" if self._publications is None else f"; publishes on {self._publications.tracks}"
        _log.info(
            "kvabr: blocks on %s; prefills of 1 and 8,192 tokens are estimated at %.3g and %.3g s%s",
            self._blocks.device,
            one,
            many,
            tracks,
        )

    def sleep(self) -> None:
        """Stop using the engine's cache until `wake`; idempotent."""
        self._wait_for_copies()
        self._asleep, self._blocks = self._blocks or self._asleep, None
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        for copier in (self._loader, self._copier):
            copier.wait()

    def wake(self) -> None:
        """Use the engine's cache again at its old address; idempotent."""
        self._blocks, self._asleep = self._blocks or self._asleep, None

    def begin(self, step: Step) -> None:
        """Begin a step."""
        self._scheduled = step.scheduled
        self._times.begin(step.prefill)
        self._nap_s = _SHORT_NAP_S if step.polling else _NAP_S
        if step.loads or step.copies:
            self._loader.mark()
        for number in step.dropped:
            self._drop(number)
        for copy in step.copies:
            with self._news:
                self._loader.submit(self._place_played, copy, self._plays.pop(copy.play, None))
        for load in step.loads:
            self._play(load)
        if self._publications is not None:
            self._publications.begin(step)

    def preempted(self, step: Step) -> None:
        """Finish copies from blocks that vLLM is about to overwrite."""
        if step.preempted and self._publications is not None:
            self._publications.preempted()

    def computed(self) -> None:
        """End the computation of a step; copy its results."""
        self._times.end(alone=not self._loader.busy)
        if self._publications is not None:
            self._publications.computed()

    def collect(self) -> tuple[set[str], set[str]]:
        """Return the requests with ended publications, and those with ended loads."""
        with self._news:
            if not self._scheduled and not self._received and not self._sent and not self._placed:
                self._news.wait(self._nap_s)
            sent, self._sent = self._sent, set()
            received, self._received = self._received, set()
        return sent, received

    def placed(self) -> list[PlacedPlay]:
        """Return newly ended plays, once."""
        with self._news:
            placed, self._placed = self._placed, []
        return placed

    def published(self) -> list[tuple[str, int]]:
        """Return newly published requests with their cached tokens, once."""
        return [] if self._publications is None else self._publications.published()

    @property
    def publishing(self) -> bool:
        return self._publications is not None and self._publications.under_way

    def measured(self) -> PrefillCost | None:
        """Return a new cost of a prefill, once."""
        return self._times.news()

    def failed_blocks(self) -> set[int]:
        """Return the blocks that the collected loads did not fill, once."""
        with self._news:
            failed, self._failed = self._failed, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Return the collected requests that must be computed from the start, once."""
        with self._news:
            unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def close(self) -> None:
        """Cancel all plays and publish the waiting caches."""
        with self._news:
            plays, self._plays = list(self._plays.values()), {}
        for play in plays:
            play.handle.cancel()
        self._loader.close()
        self._copier.close()
        self._times.close()
        if self._publications is not None:
            self._publications.close()
        self._blocks = None

    @property
    def cost(self) -> PrefillCost:
        return self._settings.prefill_cost or self._times.cost(None)

    def release_blocks(self, request: str) -> None:
        with self._news:
            self._sent.add(request)
            self._news.notify_all()

    @property
    def blocks(self) -> EngineBlocks:
        """The engine's blocks; raise `PlayError` before they are registered."""
        if self._blocks is None:
            raise PlayError("vLLM sleeps" if self._asleep is not None else "vLLM has not registered its cache")
        return self._blocks

    def _play(self, load: LoadRequest) -> None:
        assert self._client is not None  # noqa: S101  # loads come from a scheduler with a client
        self.counts.add("plays")
        began_s = time.monotonic()
        play = self._client.begin(lambda client: self._prefix(client, load))
        with self._news:
            self._plays[load.play] = _Playing(load, play)
        play.when_done(lambda ended: self._hold(load, ended, began_s))

    async def _prefix(self, client: EngineClient, load: LoadRequest) -> PlayedPrefix:
        """Play a request's cache; if the found cache is another rank's shard, look up this rank's shard first."""
        settings, model, due_s = self._settings, self._model.adapted(load.adapter), time.monotonic() + load.deadline_s
        own = model.shard
        found, skip = load.found, load.found.catalog.group_at(load.first)
        async with asyncio.timeout(_HUNG_S + _HUNG_DEADLINES * load.deadline_s):
            if found.catalog.spec.model not in {own.model, *(each.model for each in model.specs)}:
                shard = await find_cache(client, load.tokens, [own], load.salt, load.deadline_s / 2)
                if shard is None or len(shard.catalog.chunks) <= skip:
                    raise PlayError(f"the part of another rank is published, but {own.model} is not")
                found = cut(shard, load.last) if shard.catalog.tokens > load.last else shard
            cost = settings.prefill_cost or self._times.cost(load.found.catalog.prefill)
            return await client.play_prefix(
                found,
                deadline=max(1e-3, due_s - time.monotonic()),
                cost=cost,
                skip=skip,
                uncached=load.uncached,
                block=self._model.block,
                options=PlayOptions(
                    policy=settings.policy,
                    gpu_price=load.engine_price,
                    max_loss=load.max_loss,
                    salt=load.salt,
                    dtype=None if self._model.quantised or self._model.caches.states else self._model.dtype,
                    patience=1.0,
                    tail=load.tail,
                    device=self.blocks.device,
                ),
            )

    def _brought(self, load: LoadRequest, play: Handle[PlayedPrefix]) -> tuple[PlayedPrefix | None, int]:
        try:
            prefix = play.result(0.0)
        except PlayError as error:
            if load.play in self._plays:  # the request may have shared another play instead
                _log.info("kvabr: %s: %s", load.request, error)
        except Exception as error:  # noqa: BLE001  # the request must continue
            self._failure(error)
        else:
            if prefix.live is not None:
                self.counts.add("plays_live")
            for name in ("bytes_fetched", "bytes_wasted", "loss"):
                self.counts.add(name, getattr(prefix, name))
            for name in ("damaged", "failed"):
                if count := getattr(prefix, name):
                    self.counts.add(f"groups_{name}", count)
            worst = _worst(load, prefix) if self._max_loss < math.inf else 0.0
            if worst > self._max_loss or prefix.loss > load.max_loss:
                _log.info(
                    "kvabr: %s: the expected loss of %.3g nats per token is too high; the request is computed",
                    load.request,
                    prefix.loss,
                )
                return None, load.first
            return prefix, max(
                load.first, whole_blocks(min(load.last, prefix.first + prefix.tokens), self._model.block)
            )
        return None, load.first

    def _failure(self, error: Exception) -> None:
        self.counts.add("plays_failed")
        unexpected = not isinstance(error, KvabrError)
        if unexpected:
            _log.warning("kvabr: a play failed; the request is computed", exc_info=error)
        else:
            self._trouble.warn("a play failed; its request is computed", error)

    def _missed(self, load: LoadRequest, end: int, prefix: PlayedPrefix | None) -> None:
        tail = 0 if prefix is None else prefix.tail
        if tail:
            self.counts.add("tokens_tail", tail)
        if (missed := load.last - tail - end) <= 0:
            return
        self.counts.add("plays_cut")
        self.counts.add("tokens_missed", missed)
        if prefix is not None:
            late = -(-missed // self._model.spec.group_tokens) - prefix.damaged - prefix.failed
            if late > 0:
                self.counts.add("groups_late", late)
            self._trouble.warn("a play ended early", f"{missed} tokens are computed: {prefix.cut}")

    def _hold(self, load: LoadRequest, play: Handle[PlayedPrefix], began_s: float) -> None:
        self.counts.note(SECONDS, time.monotonic() - began_s)
        prefix, end = self._brought(load, play)
        with self._news:
            playing = self._plays.get(load.play)
            if playing is not None:
                playing.prefix = prefix if end > load.first else None
                self._placed.append(_placed_play(load, prefix, end))
                self._news.notify_all()
        if playing is not None:
            self._missed(load, end, prefix)

    def _drop(self, number: int) -> None:
        with self._news:
            playing = self._plays.pop(number, None)
        if playing is None:
            return
        if playing.prefix is not None:
            self.counts.add("plays_unused")
        elif not playing.handle.done():
            self.counts.add("plays_aborted")
            playing.handle.cancel()

    def _place_played(self, copy: CopyRequest, playing: _Playing | None) -> None:
        end = copy.first
        if playing is None or playing.prefix is None:
            self._failure(PlayError(f"play {copy.play} is no longer available"))
        else:
            end = self._expand(playing.load, playing.prefix, copy.first, copy.last, copy.blocks)
        self._loaded(copy.request, copy.first, copy.last, end, copy.blocks)

    def _loaded(self, request: str, first: int, last: int, end: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        self.counts.add("tokens_loaded", end - first)
        with self._news:
            if end < last and self._model.waits:
                self._unfilled.add(request)
            elif end < last:
                for run, size in zip(blocks, self._model.caches.blocks, strict=True):
                    self._failed.update(run[(end - first) // size :])
            self._received.add(request)
            self._news.notify_all()

    def _expand(
        self, load: LoadRequest, prefix: PlayedPrefix, first: int, last: int, blocks: tuple[tuple[int, ...], ...]
    ) -> int:
        """Decode tokens into blocks; return the end of the whole blocks before the first failed group."""
        end, began_s = last, time.monotonic()
        try:
            with self._loader.apart():
                groups, places, begins = self.blocks.places(prefix, first, last, blocks)
                errors = expand_here(groups, places)
            if self._publications is not None:
                self._note_lossy(load, prefix)
        except Exception as error:  # noqa: BLE001  # the request must continue
            self._failure(error)
            return first
        for begin, wrong in zip(begins, errors, strict=True):
            if wrong is not None:
                self._failure(wrong)
                end = min(end, first if self._model.waits else first + whole_blocks(begin - first, self._model.block))
        self.counts.add("copy_seconds", time.monotonic() - began_s)
        return end

    def _note_lossy(self, load: LoadRequest, prefix: PlayedPrefix) -> None:
        classes, own, lossy = load.found.catalog.spec.classes, self._model.shard.classes, []
        # The draft's blocks may be empty, or codes made from another engine's values.
        whole = [one.scales for one in classes] == [one.scales for one in own]
        for unit, track in zip(prefix.units, prefix.coverage, strict=True):
            if track not in _EXACT or not whole:
                lossy.append(unit.first - (classes[unit.part].kind == "state"))
        self.lossy.note(load.tokens, load.salt, lossy, self._model.adapted(load.adapter).spec.model)


def _placed_play(load: LoadRequest, prefix: PlayedPrefix | None, end: int) -> PlacedPlay:
    if prefix is None or end <= load.first:
        return PlacedPlay(load.play, load.request, end)
    return PlacedPlay(load.play, load.request, end, prefix.loss, _worst(load, prefix), prefix.nbytes)


def _worst(load: LoadRequest, prefix: PlayedPrefix) -> float:
    """Return a play's loss for another request that shares no later tokens."""
    catalog = load.found.catalog
    if not (prefix.tokens and catalog.even and catalog.by_name.keys() >= {*prefix.coverage}):
        return prefix.loss
    shorter = catalog.prefix(catalog.group_at(prefix.first + prefix.tokens - 1) + 1)
    played = shorter.suffix(catalog.group_at(prefix.first))
    return promised_loss(played, prefix.coverage, predicted_loss(played, prefix.coverage))
