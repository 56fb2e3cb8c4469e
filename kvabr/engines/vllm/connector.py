"""`KvabrConnector`, which implements vLLM's experimental ``KVConnectorBase_V1``. Only this module imports vLLM."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import vllm
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import get_kv_quant_mode
from vllm.v1.metrics.utils import create_metric_per_engine

from kvabr.data import default_catalog
from kvabr.engines.layouts import BlockLayout, keys_and_values
from kvabr.engines.transformers.publish import find_profile
from kvabr.engines.vllm import ADAPTER, register, stats
from kvabr.engines.vllm.announced_blocks import AnnouncedBlocks
from kvabr.engines.vllm.blocks import codes
from kvabr.engines.vllm.caches import Scales, UnknownCacheError
from kvabr.engines.vllm.config import FP8_CACHES, ServedModel, VllmSettings, read_settings, served_model
from kvabr.engines.vllm.idle import IdleScheduler, IdleWorker
from kvabr.engines.vllm.plays import PlacedPlay, Step, leave_client, take_client
from kvabr.engines.vllm.publishing import Publishers
from kvabr.engines.vllm.requests import OWN
from kvabr.engines.vllm.scheduler import SchedulerHalf
from kvabr.engines.vllm.step_times import computed_before
from kvabr.engines.vllm.worker import WorkerHalf
from kvabr.publish.live_publisher import LivePublisher
from kvabr.publish.publisher import Publisher
from kvabr.telemetry.kv_events.wire import KVBlocksCleared, KVBlocksRemoved, KVEvent
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError

_PerEngine = dict[int, list[object]]
_log = logging.getLogger("vllm.kvabr")
_HIT_SOURCE: Any = None
with contextlib.suppress(ModuleNotFoundError):  # vLLM 0.31 does not count hits by source
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    _HIT_SOURCE = CacheHitSource.P2P
_REPORTED = "kvabr_told"
_BLOCKS_MAY_FAIL = hasattr(KVConnectorBase_V1, "get_block_ids_with_load_errors")


class KvabrMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Passes a step from the scheduler to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class KvabrScales(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Passes the scales of an FP8 cache from a worker to the scheduler."""

    def __init__(self, scales: Scales) -> None:
        self.scales = scales


class KvabrPlaced(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Passes ended plays and the engine's speed from the workers to the scheduler."""

    def __init__(
        self,
        placed: list[PlacedPlay],
        cost: PrefillCost | None,
        published: list[tuple[str, int]],
        *,
        publishing: bool,
    ) -> None:
        self.placed = placed
        self.published = published
        self.cost = cost
        self.publishing = publishing

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another worker's report."""
        assert isinstance(other, KvabrPlaced)  # noqa: S101  # all workers have the same connector
        both = self.publishing or other.publishing
        published = self.published + other.published
        return KvabrPlaced(self.placed + other.placed, self.cost or other.cost, published, publishing=both)


class KvabrConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads and publishes KV caches through kvabr, see `kvabr.engines.vllm`; supports the hybrid memory allocator."""

    _cache_hit_source = _HIT_SOURCE
    _scheduler: SchedulerHalf | IdleScheduler
    _worker: WorkerHalf | IdleWorker

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Start the half for this role, idle for an unknown cache; raise `UsageError` for a wrong configuration."""
        super().__init__(vllm_config, role, kv_cache_config)
        ADAPTER.check(vllm.__version__)
        transfer = self._kv_transfer_config
        consumes, produces = transfer.is_kv_consumer, transfer.is_kv_producer
        settings = read_settings(transfer.kv_connector_extra_config, consumes=consumes, produces=produces)
        if consumes and role == KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                'kvabr: kv_load_failure_policy is "%s": a request fails if one of its groups cannot be decoded; '
                'with "recompute" vLLM computes it instead',
                transfer.kv_load_failure_policy,
            )
        self._client, self._settings = None, settings
        self._publishing = self._to_count = False
        self._scales = scales_of(vllm_config) if role == KVConnectorRole.WORKER else {}
        self._served = partial(
            served_model,
            vllm_config,
            kv_cache_config,
            settings,
            consumes=consumes,
            produces=produces,
            blocks_may_fail=_BLOCKS_MAY_FAIL,
        )
        try:
            model = self._served(scales=self._scales)
        except UnknownCacheError as error:
            _log.warning("kvabr: caches of this model are neither played nor published: %s", error)
            self._scheduler, self._worker = IdleScheduler(), IdleWorker()
            return
        # Last, because an error after this would leave the publishers open.
        publishers = _publishers(settings, model) if produces and role == KVConnectorRole.WORKER else None
        self._client = take_client(settings) if consumes else None
        if role == KVConnectorRole.SCHEDULER:
            _log.info("kvabr: %s", _description(settings, model, consumes=consumes, produces=produces))
            announced = _announced(vllm_config, kv_cache_config, model)
            _, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            how = {"produces": produces, "evict": self._evict, "announced": announced, "hashed": hashed}
            self._scheduler_of = partial(SchedulerHalf, settings, client=self._client, **how)
            self._scheduler = self._scheduler_of(model=model)
        else:
            self._worker = WorkerHalf(settings, model, self._client, publishers)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache that is not published only causes a later miss."""
        return False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pass the engine's cache to the worker's half."""
        config = self._vllm_config
        self._worker.register(kv_caches, partial(layout_of, config), partial(store, config), keepers=self._keepers())

    def _keepers(self) -> list[str]:
        """Return the other connectors of a MultiConnector that keep the engine's cache."""
        every = getattr(get_kv_transfer_group(), "sub_connectors", ()) if has_kv_transfer_group() else ()
        others = [one for one in every if one is not self and one._kv_transfer_config.is_kv_producer]  # noqa: SLF001
        return sorted({type(one).__name__ for one in others})

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the scales of a quantised cache for the scheduler."""
        return KvabrScales(self._scales) if self._scales else None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Use the workers' scales; ignore metadata of other connectors."""
        ranks = (known for _, known in sorted(metadata.items()) if isinstance(known, KvabrScales))
        first = next(ranks, None)
        if first is None or isinstance(self._scheduler, IdleScheduler):
            return
        try:
            model = self._served(scales=first.scales)
        except UnknownCacheError:  # the worker, which is idle too, logs it
            self._scheduler = IdleScheduler()
            return
        _log.info("kvabr: vLLM keeps %s", model.shard.summary)
        self._scheduler = self._scheduler_of(model=model)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Use the scales of the first pipeline stage."""
        self.set_xfer_handshake_metadata({rank: known for (stage, rank), known in metadata.items() if stage == 0})

    def unregister_kv_caches(self) -> None:
        """Stop using the engine's cache: vLLM is going to sleep."""
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """Use the engine's cache again: vLLM has woken up."""
        self._worker.wake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start a step and its plays; do it here, as `start_load_kv` may be called after the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, KvabrMetadata):
            self._worker.begin(connector_metadata.step)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Finish copies from blocks that this step overwrites."""
        if isinstance(kv_connector_metadata, KvabrMetadata):
            self._worker.preempted(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads started with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is computed after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: caches are copied later."""

    def wait_for_save(self) -> None:
        """End the computation of a step."""
        self._worker.computed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests with ended publications and ended loads, and the failed requests."""
        # Later counts need another step.
        self._to_count = self._worker.publishing
        sent, received = self._worker.collect()
        return KVConnectorTransferResults(sent, received, self._worker.failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded."""
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return ended plays and the prefill cost for the scheduler."""
        placed, cost, was = self._worker.placed(), self._worker.measured(), self._publishing
        published = self._worker.published()
        now = self._publishing = self._to_count
        news = placed or cost or published or was or now
        return KvabrPlaced(placed, cost, published, publishing=now) if news else None

    def on_new_request(self, request: Any) -> None:
        """Start the lookup of a request."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens to load; None while the lookup or play runs."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Copy a play into allocated blocks."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the requests for the workers."""
        preempted = bool(getattr(scheduler_output, "preempted_req_ids", None))
        scheduled, before = scheduler_output.num_scheduled_tokens, computed_before(scheduler_output)
        return KvabrMetadata(self._scheduler.step(scheduled, self._tables, before=before, preempted=preempted))

    def has_pending_push_work(self) -> bool:
        """Return True if vLLM must run further steps to collect counters."""
        return self._scheduler.publishing

    def update_connector_output(self, connector_output: Any) -> None:
        """Record ended loads and plays."""
        self._scheduler.received(set(connector_output.finished_recving or ()))
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvabrPlaced):
            self._scheduler.measured(meta.cost)
            self._scheduler.publishing = meta.publishing
            for play in meta.placed:
                self._scheduler.placed(play)
            for name, tokens in meta.published:
                self._scheduler.published(name, tokens)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return and clear the KV events, with vLLM's block names."""
        announced = self._scheduler.announced
        return () if announced is None else map(_event, announced.take())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Publish a request's cache, and report the served cache to its client."""
        served, waits = self._scheduler.served(request, block_ids), self._scheduler.finished(request, block_ids)
        if served is None or getattr(request, _REPORTED, False):
            return waits, None
        setattr(request, _REPORTED, True)  # MultiConnector stops the engine if two connectors answer with the same key
        return waits, {OWN: served}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Publish a request's cache, for a model with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def _evict(self, blocks: set[int]) -> None:
        assert self._kv_cache_manager is not None  # noqa: S101  # vLLM binds it to the scheduler's connector
        self._kv_cache_manager.evict_blocks(blocks)

    def _tables(self, request: str) -> Sequence[Sequence[int]]:
        assert self._kv_cache_manager is not None  # noqa: S101  # vLLM binds it to the scheduler's connector
        tables: Sequence[Sequence[int]] = self._kv_cache_manager.get_block_ids(request)
        return tables

    def reset_cache(self) -> bool | None:
        """Stop using the current cache names, since weights may have changed; other engines' caches remain.

        Return False if loads are in progress, None in a worker.
        """
        return self._scheduler.reset() if self._role == KVConnectorRole.SCHEDULER else None

    def shutdown(self) -> None:
        """End all plays, and publish waiting caches."""
        if self._role == KVConnectorRole.WORKER:
            self._worker.close()
        if self._client is not None:
            self._client = None
            leave_client(self._settings)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counters since the last call."""
        half = self._worker if self._role == KVConnectorRole.WORKER else self._scheduler
        data = half.counts.take()
        return KvabrStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return statistics made from ``data``, the counters of another process."""
        return KvabrStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: _PerEngine
    ) -> KVConnectorPromMetrics | None:
        """Return the Prometheus metrics of the counters."""
        return KvabrPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class KvabrStats(KVConnectorStats):  # type: ignore[misc]
    """Counters of the connector. vLLM adds them up and logs them."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Reset all counters."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of ``other``."""
        self.data = stats.added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number per counter."""
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        """Return True if all counters are empty."""
        return not self.data


class KvabrPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvabr_*``: counters of `stats.HELP` and histograms of `stats.HISTOGRAMS`."""

    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: _PerEngine
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvabr_{name}", documentation=f"{text}.", labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in stats.HELP.items()
        }
        self._histograms = {
            name: create_metric_per_engine(
                self._histogram_cls(
                    name=f"vllm:kvabr_{name}", documentation=f"{text}.", buckets=list(buckets), labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, (text, buckets) in stats.HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counters."""
        for name, value in transfer_stats_data.items():
            if name in self._histograms:
                for each in value:
                    self._histograms[name][engine_idx].observe(each)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(value)


def _description(settings: VllmSettings, model: ServedModel, *, consumes: bool, produces: bool) -> str:
    parts = []
    if consumes:
        where, kept = str(settings.url).partition("?")[0], settings.keep_loss
        how = f"policy {settings.policy}, deadline {settings.deadline_s:g} s, keep_loss {kept:g}"
        parts.append(f"plays from {where} ({how})")
    if produces:
        parts.append(f"publishes to {settings.publish}{' while it is computed' if settings.publish_live else ''}")
    return f"{' and '.join(parts)} caches of {model.shard.model}: {model.shard.summary}"


def _publishers(settings: VllmSettings, model: ServedModel) -> Publishers:
    assert settings.publish is not None  # noqa: S101  # a producer's settings include it
    spec = model.shard
    if settings.profile is not None and model.undrafted is not None:
        _log.warning("kvabr: the codec profile is not used: it lacks the draft model's layers")
    prior = default_catalog() if settings.prior is None else Catalog.read(settings.prior)
    publisher = Publisher(
        settings.publish,
        spec,
        prior=prior,
        tracks=settings.tracks,
        profile=find_profile(spec, settings.profile) if spec is model.spec and model.undrafted is None else None,
        queue=settings.queue,
        max_bytes=settings.publish_bytes,
        source=f"computed by vLLM {vllm.__version__}",
        keep_tokens=settings.publish_tokens,
    )
    return Publishers(publisher, LivePublisher(publisher) if settings.publish_live else None)


def _announced(config: Any, kv_cache_config: Any, model: ServedModel) -> AnnouncedBlocks | None:
    wanted = getattr(config, "kv_events_config", None)
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    return AnnouncedBlocks(resolve_kv_cache_block_sizes(kv_cache_config, config)[1], model.ranks)


def _event(event: KVEvent) -> KVCacheEvent:
    assert not isinstance(event, KVBlocksCleared)  # noqa: S101  # that would be about the engine's own blocks, too
    names = list(map(maybe_convert_block_hash, event.block_hashes))
    if isinstance(event, KVBlocksRemoved):
        return BlockRemoved(block_hashes=names, medium=event.medium)
    return BlockStored(
        block_hashes=names,
        parent_block_hash=None,  # the blocks are at the beginning of a prompt
        token_ids=event.token_ids,
        block_size=event.block_size,
        lora_id=None,
        medium=event.medium,
        lora_name=None,
        extra_keys=event.extra_keys,
    )


def scales_of(config: Any) -> Scales:
    """Return the FP8 scales of this worker's layers by name; empty if all are 1.

    Raise `UsageError` for an unsupported format, or if there are scales per head.
    """
    stored, scales = config.cache_config.cache_dtype, {}
    for name, layer in config.compilation_config.static_forward_context.items():
        mode = int(get_kv_quant_mode(getattr(layer, "kv_cache_dtype", "auto")))
        if getattr(layer, "attn_backend", None) is None or mode == 0:
            continue
        if stored not in FP8_CACHES:
            continue
        if current_platform.is_fp8_fnuz():
            raise UsageError(
                "vLLM's FP8 cache uses the FNUZ format on this device, which kvabr does not support: start it "
                "with --kv-cache-dtype auto"
            )
        halves = [getattr(layer, f"_{half}_scale", None) for half in "kv"]
        if mode != 1 or any(half is not None and half.numel() != 1 for half in halves):
            raise UsageError(
                f"{name}: the checkpoint has FP8 scales per head, but kvabr supports one per layer: start "
                "it with --kv-cache-dtype auto"
            )
        scales[name] = (float(layer._k_scale_float), float(layer._v_scale_float))  # noqa: SLF001  # vLLM's own name
    return {} if set(scales.values()) == {(1.0, 1.0)} else scales


def store(config: Any, name: str, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values, [token, head, dim], in a layer's cache with vLLM's own kernel."""
    layer = config.compilation_config.static_forward_context[name]
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


def layout_of(config: Any, cache: torch.Tensor) -> BlockLayout:
    """Return the layout of a layer's blocks; on a CPU, find it by storing known numbers with vLLM's kernel.

    Raise `UsageError` for an unknown layout.
    """
    if cache.device.type != "cpu":
        return BlockLayout.PLAIN
    from vllm import _custom_ops as ops  # noqa: PLC0415  # for CPUs only
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    _, heads, size, both = cache.shape
    dim = both // 2
    isa = _get_attn_isa(config.model_config.dtype, size, dim, config.cache_config.cache_dtype)
    scratch = torch.zeros((2, heads, size, both), dtype=cache.dtype)
    count, own = size * heads * dim, config.model_config.dtype
    stored = config.cache_config.cache_dtype
    if cache.dtype == torch.uint8:  # codes of finite numbers, all different
        type_ = FP8_CACHES[stored]
        key, value = ((torch.arange(count) % most + 1).to(torch.uint8).view(type_).to(own) for most in (113, 119))
    else:  # small integers: exact in every float type, and different along each dimension
        stored, type_ = "auto", cache.dtype
        key, value = (torch.arange(count) % 241).to(type_), (torch.arange(count) % 251 + 1).to(type_)
    key, value = key.view(size, heads, dim), value.view(size, heads, dim)
    halves = scratch.view(2, heads, 2 * size, dim).chunk(2, dim=2)
    slots = torch.arange(size, 2 * size, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        key, value, halves[0], halves[1], slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=stored
    )
    key, value = codes(key.to(type_)), codes(value.to(type_))
    for layout in BlockLayout:
        try:
            keys, values = keys_and_values(scratch, layout)
        except FormatError:
            continue
        if torch.equal(keys[1], key.transpose(0, 1)) and torch.equal(values[1], value.transpose(0, 1)):
            return layout
    raise UsageError(
        f"vLLM's attention kernel {isa!r} uses a cache layout that kvabr does not know; start vLLM with another "
        "--dtype (float32 uses the plain kernels), or report it to kvabr"
    )


register()
