"""Publishing in a worker, from the engine's blocks: when a request ends, or group by group during its prefill.

A growing cache is copied right after each step, before later steps overwrite its blocks. On a GPU it is copied during
the next step, and the engine waits only if it preempts requests.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kvabr.codec import gpu
from kvabr.engines.settings import TroubleLog
from kvabr.engines.vllm.blocks import EngineBlocks, codes
from kvabr.engines.vllm.config import ServedModel
from kvabr.engines.vllm.copier import Copier
from kvabr.engines.vllm.lossy import LossyGroups
from kvabr.engines.vllm.plays import GrowRequest, KeepRequest, PublishRequest, SnapshotRequest, Step
from kvabr.engines.vllm.snapshots import StateCache
from kvabr.engines.vllm.stats import ConnectorCounts
from kvabr.engines.vllm.windows import WindowCache
from kvabr.publish.live_publisher import LivePublisher, LiveSlot
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import KvabrError, UsageError

_log = logging.getLogger("vllm.kvabr")
_TIMEOUT_S = 60.0
_MAX_GPU_SHARE = 0.25

_Read = Callable[[], tuple[torch.Tensor, ...]]


class PublishingWorker(Protocol):
    """What publications need from the worker."""

    counts: ConnectorCounts

    @property
    def blocks(self) -> EngineBlocks:
        """The engine's blocks."""

    @property
    def cost(self) -> PrefillCost:
        """Cost of the engine's prefill."""

    lossy: LossyGroups

    def release_blocks(self, request: str) -> None:
        """Release the blocks of an ended request."""


@dataclass(frozen=True, slots=True)
class Publishers:
    """Publishers of ended and of running requests."""

    ended: Publisher
    live: LivePublisher | None = None
    """Publisher for requests during prefill, into the same store."""

    def close(self) -> None:
        """Publish the waiting caches."""
        (self.live or self.ended).close()


class Publications:
    """The publications of one worker."""

    def __init__(
        self, engine: PublishingWorker, publishers: Publishers, model: ServedModel, copier: Copier, kept: int
    ) -> None:
        """Start, with ``kept`` bytes of memory for data that vLLM drops early."""
        self._engine, self._publishers, self._model, self._copier = engine, publishers, model, copier
        self._counts, self._trouble = engine.counts, TroubleLog(_log)
        self._windows, self._states = WindowCache(kept), StateCache(kept)
        self._passing = tuple(dict.fromkeys(pages.part for pages in model.caches.passing if pages.names))
        self._growing: dict[str, LiveSlot | None] = {}
        """Growing caches by request; None for those that are not published."""
        self._kept: list[KeepRequest] = []
        self._snapshots: list[SnapshotRequest] = []
        self._grown: list[GrowRequest] = []
        self._under_way, self._begun_s = 0, 0.0
        self._ended: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self.overlapped = False
        """True if growing caches are copied during the next step: on a GPU, without windows."""

    @property
    def tracks(self) -> str:
        """Description of the published tracks and the codec profile."""
        offer = self._publishers.ended.offer
        return f"{', '.join(offer.tracks)} ({'a' if offer.profile is not None else 'no'} codec profile)"

    @property
    def under_way(self) -> bool:
        """True if a publication that began recently is in progress."""
        return self._under_way > 0 and time.monotonic() - self._begun_s < _TIMEOUT_S

    def registered(self) -> None:
        """Start to use the engine's blocks."""
        self.overlapped = self._copier.on_gpu and not self._passing

    def begin(self, step: Step) -> None:
        """Begin a step."""
        self._kept, self._snapshots, self._grown = step.kept, step.snapshots, step.grown
        for publication in step.publications:
            if publication.request in self._growing:
                self._end(publication)
            else:
                self._publish(publication)
        for grown in step.grown:
            if grown.tokens:  # announce before the first step, so that players can already find it
                self._growing[grown.request] = self._announce(grown)

    def preempted(self) -> None:
        """Wait for copies from blocks that vLLM is about to overwrite."""
        self._copier.wait()

    def computed(self) -> None:
        """Copy the step's results; call this on the engine's thread after the step."""
        for keep in self._kept:
            self._keep(keep)
        for snapshot in self._snapshots:
            self._keep_states(snapshot)
        if self._grown and self.overlapped:
            self._copier.mark()
        for grown in self._grown:
            self._grow(grown)
        self._kept, self._snapshots, self._grown = [], [], []

    def close(self) -> None:
        self._publishers.close()

    # ------------------------------------------------------- while it is prefilled

    def _grow(self, grown: GrowRequest) -> None:
        began_s = time.thread_time()
        try:
            slot = self._growing[grown.request]
            if slot is not None and grown.last > grown.first:
                if self.overlapped:
                    self._copier.submit(self._hand_over, slot, grown)
                else:
                    self._hand_over(slot, grown)
        except Exception as error:  # noqa: BLE001  # the request must continue
            _log.warning("kvabr: a cache is not published while it is computed (%s)", error, exc_info=True)
        self._counts.add("copy_seconds", time.thread_time() - began_s)

    def _announce(self, grown: GrowRequest) -> LiveSlot | None:
        live = self._publishers.live
        assert live is not None  # noqa: S101  # a cache only grows with a live publisher
        cost = self._engine.cost
        size, chunk = self._model.spec.group_tokens, max(1, grown.step)
        ends = range(size, len(grown.tokens) + 1, size)
        pace = [cost.seconds(grown.had, -(-(end - grown.had) // chunk) * chunk) for end in ends]
        why, model = "failed", self._model.adapted(grown.adapter)
        try:
            if self._engine.lossy.before(
                grown.tokens, grown.salt, model.spec.model
            ):  # the following tokens are not exact either
                slot: LiveSlot | str = "lossy"
            else:
                own, done = model.shard.model, partial(self._published, grown.request)
                slot = live.begin(grown.tokens, pace=pace, salt=grown.salt, model=own, done=done)
                self._count(0 if isinstance(slot, str) else 1)
        except Exception as error:  # noqa: BLE001  # the request must continue
            _log.warning("kvabr: a cache is not published: %s", error, exc_info=not isinstance(error, UsageError))
        else:
            if not isinstance(slot, str):
                self._counts.add("published_live")
                return slot
            why = slot
        self._counts.add(f"publish_dropped_{why}")
        return None

    def _hand_over(self, slot: LiveSlot, grown: GrowRequest) -> None:
        try:
            tokens = grown.last - grown.first
            model = self._model
            kv = tuple(torch.empty(part.shape(tokens), dtype=model.kept(part)) for part in model.shard.parts)
            with self._copier.apart():
                self._engine.blocks.read(grown.blocks, kv)
            slot.groups(grown.first, kv)
            if grown.last == slot.tokens:
                slot.end()
        except Exception as error:  # noqa: BLE001  # as in `_grow`
            slot.fail(str(error))

    def _end(self, publication: PublishRequest) -> None:
        slot = self._growing.pop(publication.request)

        def end() -> None:
            if slot is not None:
                slot.end()
            if not publication.alive:
                self._engine.release_blocks(publication.request)

        if self.overlapped:
            self._copier.submit(end)
        else:
            end()

    # ------------------------------------------------------- when it ends

    def _keep(self, keep: KeepRequest) -> None:
        began_s, size = time.thread_time(), self._model.spec.group_tokens
        parts = self._model.shard.parts
        try:
            for number, chunk in enumerate(keep.chunks):
                if not self._windows.lacks([chunk]):
                    continue
                kv = {
                    part: torch.empty(parts[part].shape(size), dtype=self._model.kept(parts[part]))
                    for part in self._passing
                }
                each = (size // block for block in self._model.caches.blocks)
                runs = [
                    run[number * count : (number + 1) * count] for run, count in zip(keep.blocks, each, strict=True)
                ]
                self._engine.blocks.read(runs, [kv.get(part) for part in range(len(parts))])
                self._windows.keep(chunk, [kv[part] for part in self._passing])
        except Exception as error:  # noqa: BLE001  # the request must continue; it is not published
            _log.warning("kvabr: tokens that leave a sliding window could not be kept (%s)", error, exc_info=True)
        self._counts.add("copy_seconds", time.thread_time() - began_s)

    def _keep_states(self, snapshot: SnapshotRequest) -> None:
        if snapshot.chunk in self._engine.lossy:
            return
        began_s = time.thread_time()
        try:
            self._states.keep(snapshot.chunk, self._engine.blocks.snapshot(snapshot.blocks))
        except Exception as error:  # noqa: BLE001  # as in `_keep`
            _log.warning("kvabr: a state could not be kept (%s)", error, exc_info=True)
        self._counts.add("copy_seconds", time.thread_time() - began_s)

    def _publish(self, publication: PublishRequest) -> None:
        why, model = "dropped_failed", self._model.adapted(publication.adapter)
        try:
            slot = self._publishers.ended.reserve(publication.tokens, publication.salt, model.shard.model)
        except KvabrError as error:
            self._trouble.warn("a cache is not published", error)
        else:
            if not isinstance(slot, Slot):
                why = f"dropped_{slot}"
            elif self._engine.lossy.before(publication.tokens, publication.salt, model.spec.model):
                why = "dropped_lossy"
                slot.leave()
            elif (read := self._reading(publication, slot)) is None:
                why = "skipped_window"
                slot.leave()
            else:
                self._copier.mark()
                self._count(1)
                self._copier.submit(self._take, publication, slot, read)
                return
        self._counts.add(f"publish_{why}")
        self._over(publication.request, len(publication.tokens) if why == "dropped_known" else 0)
        self._engine.release_blocks(publication.request)

    def _reading(self, publication: PublishRequest, slot: Slot) -> _Read | None:
        kept = self._windows.take(publication.chunks) if self._passing else ()
        states = self._states.take(publication.chunks[-1]) if self._model.caches.states else {}
        if kept is None or len(kept) < len(self._passing) or states is None:
            return None
        return partial(self._read, publication, slot, kept, states)

    def _read(
        self,
        publication: PublishRequest,
        slot: Slot,
        kept: tuple[tuple[torch.Tensor, ...], ...],
        states: dict[int, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        parts = self._model.shard.parts
        dtypes = [self._model.kept(part) for part in parts]
        had = states | {
            part: torch.cat([codes(group) for group in groups], dim=3).view(dtypes[part])
            for part, groups in zip(self._passing, kept, strict=True)
        }
        shapes = {number: part.shape(slot.tokens) for number, part in enumerate(parts) if number not in had}
        device = self._device_for(sum(math.prod(shape) * dtypes[number].itemsize for number, shape in shapes.items()))
        rest = [
            torch.empty(shapes[number], dtype=dtypes[number], device=device) if number in shapes else None
            for number in range(len(parts))
        ]
        self._engine.blocks.read(publication.blocks, rest)
        return tuple(had[number] if one is None else one for number, one in enumerate(rest))

    def _device_for(self, size: int) -> torch.device:
        device: torch.device = self._engine.blocks.device
        if gpu.runs_on(device) and size <= torch.cuda.mem_get_info(device)[0] * _MAX_GPU_SHARE:
            return device
        return torch.device("cpu")

    def _take(self, publication: PublishRequest, slot: Slot, read: _Read) -> None:
        began_s = time.thread_time()
        try:
            with self._copier.apart():
                kv = read()
        except Exception as error:  # noqa: BLE001  # the request must continue
            slot.leave()
            self._published(publication.request, PublishOutcome("failed", why=str(error)))
        else:
            self._counts.add("copy_seconds", time.thread_time() - began_s)
            slot.fill(kv, partial(self._published, publication.request))
        finally:
            self._engine.release_blocks(publication.request)

    def _count(self, by: int) -> None:
        with self._lock:
            self._under_way += by
            if by > 0:
                self._begun_s = time.monotonic()

    def published(self) -> list[tuple[str, int]]:
        """Return the newly published requests with their cached tokens, once."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _over(self, request: str, tokens: int) -> None:
        with self._lock:
            self._ended.append((request, tokens))

    def _published(self, request: str, outcome: PublishOutcome) -> None:
        self._over(request, outcome.tokens)
        if outcome.left_out:
            self._counts.add("publish_left_out", outcome.left_out)
        if outcome.not_finite:  # logged by the publisher
            self._counts.add("publish_dropped_not_finite")
        if outcome.tokens:  # possibly of a shorter prompt
            self._counts.add("published")
            self._counts.add("published_bytes", outcome.bytes)
        elif outcome.verdict == "known":
            self._counts.add("publish_dropped_known")
        elif not outcome.not_finite:
            self._counts.add("publish_dropped_failed")
            self._trouble.warn("a cache could not be published", outcome.why)
        self._count(-1)
