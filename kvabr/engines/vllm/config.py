"""The settings in ``kv_connector_extra_config``, and the model from vLLM's configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, field_validator

from kvabr.abr.plugins import load_policy
from kvabr.abr.policies.fixed import Fixed
from kvabr.engines.adapters import require
from kvabr.engines.layouts import check_block_size, head_shard
from kvabr.engines.settings import OWN, Count, EngineSettings, FilePath, Seconds, Text
from kvabr.engines.transformers import model_loader
from kvabr.engines.transformers.spec import spec_of
from kvabr.engines.vllm.caches import PLAIN, EngineCaches, Quantisation, Scales, UnknownCacheError, engine_caches
from kvabr.engines.vllm.drafts import DRAFT, draft_of
from kvabr.engines.vllm.interleaving import interleaving_of
from kvabr.engines.weights import cached_folder, model_name
from kvabr.publish.publisher import with_heads, with_layers
from kvabr.store.files import read_salt
from kvabr.types.errors import FormatError, KvabrError, UsageError
from kvabr.types.kv import KVSpec, LayerClass, RopeSpec
from kvabr.types.naming import with_facts

_PLAIN_CACHES = ("auto", "float16", "bfloat16", "half", "float", "float32")
FP8_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Element types of caches that vLLM quantises with one scale per layer."""
WHERE = "kv_connector_extra_config"
"""vLLM's name of the table of settings."""


class VllmSettings(EngineSettings):
    """Keys of ``kv_connector_extra_config``."""

    plays: ClassVar[int] = 64
    queue: ClassVar[int] = 4
    deadline_s: Seconds = 2.0
    """TTFT deadline of a request, seconds. A request may set its own: ``kv_transfer_params={"deadline_s": 0.5}``; the
    other keys there are ``max_loss`` (maximum expected loss, nats per generated token), ``play`` (false: compute
    everything), ``publish`` (false: do not publish), ``live`` (false: publish only at the end), ``keep_s`` and ``back``
    (`kvabr.engines.vllm.hints`).
    """
    host_mib: Count = 4096
    """Memory in each worker for compressed groups of plays before their promise, MiB. When it is short, plays skip
    their largest tracks, and further requests wait until their deadline. A larger cache is played when there is no
    other.
    """
    tokenizer: Text | None = None
    """Digest of the tokenizer. None: as computed by `kvabr encode --model DIR`."""
    keep_loss: Annotated[float, Field(ge=0)] = 0.001
    """Maximum expected loss of a play, nats per generated token, for the engine to reuse its blocks for later requests;
    AC-L3 loses about 0.001. vLLM forgets the blocks of other plays when their request ends. SGLang and LMCache always
    keep pages and chunks; with this limit, lossier ones are computed instead.
    """
    salt_file: FilePath | None = None
    """File with a tenant's secret, see `kvabr.types.naming.chain`."""
    store_mib: Annotated[int, Field(ge=0)] = 1024
    """Memory for encoded groups that later requests may use, MiB."""
    player: Text = OWN
    """Where plays run: ``inside`` the engine's process; in a ``process`` that all engines of this user on the node
    share and start, so that network, policy and checks never delay the model's thread; or the path of the socket of a
    running `kvabr player`. If it ends, requests are computed until there is another.
    """
    plain_caches: bool = False
    """With a cache in FP8: also play caches of engines without quantisation, if there is no other. vLLM's own kernel
    stores them as if it had computed them; tokens computed after them are not published.
    """
    without_draft: bool = False
    """Also play caches published without this engine's draft model, if there is no other: the first token is earlier,
    but the draft does not see the played tokens and proposes worse.
    """
    publish_live: bool = False
    """Publish a cache step by step while it is computed, so that another node can play it meanwhile. ``publish`` must
    be an unencrypted folder. Recurrent states are published when their request ends.
    """
    publish_tokens: bool = False
    """Store the token ids of published requests without a salt, so that `kvabr serve --kv-events` can announce them to
    routers. ``publish`` must be an unencrypted folder.
    """

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        if load_policy(policy)().computes:
            raise ValueError("it needs an engine that computes from the front, which vLLM cannot do")
        return policy

    @property
    def only_track(self) -> str | None:
        """The track of a policy that plays a single track; None if the policy chooses."""
        name, _, track = self.policy.partition(":")
        return track if name == Fixed.name else None

    @property
    def salt(self) -> bytes:
        """The tenant's secret; raise `UsageError` for an unusable file."""
        return read_salt(self.salt_file)


def read_settings(given: Mapping[str, Any], *, consumes: bool, produces: bool) -> VllmSettings:
    """Return the settings of an engine that fetches, publishes, or both; raise `UsageError` if they are wrong."""
    settings = VllmSettings.read(given, WHERE)
    if consumes and settings.url is None:
        raise UsageError(f'{WHERE}: a consumer needs "url", the URL of the origin, such as moqt://origin.example:4443/')
    if produces and settings.publish is None:
        raise UsageError(f'{WHERE}: a producer needs "publish", the folder or URL to which caches are written')
    return settings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an engine."""

    spec: KVSpec
    """Spec of the whole model's cache, or, if the classes of other pipeline stages are unknown, of this stage's layers.
    """
    dtype: torch.dtype
    """Element type of unquantised caches in the engine."""
    caches: EngineCaches
    heads: tuple[range, ...]
    """KV heads in this rank, for each layer class."""
    ranks: int = 1
    """Number of the engine's workers; each has a part of the heads or layers."""
    waits: bool = False
    """True if vLLM must wait for copies into blocks, because it accepts only failed requests, not failed blocks."""
    layers: range | None = None
    """Layers of this pipeline stage; None: all layers of `spec`."""
    prefix_caching: bool = True
    """True if the engine shares blocks between requests with equal prefixes."""
    step_tokens: int = 1 << 20
    """Maximum tokens per step."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts in the name of the model's caches, see `with_facts`."""
    named: str | None = None
    """Name without `facts`; None: the name of `spec`."""
    plain_caches: bool = False
    """True to also play caches of engines without quantisation."""
    without_draft: bool = False
    """True to also play caches without the draft model's layers."""
    ahead: int = 0
    """Number of following tokens that the draft's KV of a token depends on."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """Additional facts in the names of an adapter's caches, see `lora_facts`."""

    @property
    def block(self) -> int:
        """Tokens in a block; the engine accepts only whole blocks."""
        return self.caches.block

    @property
    def quantised(self) -> bool:
        """True if a class of the engine's cache has 8-bit codes."""
        return any(one.scales is not None for one in self.spec.classes)

    def kept(self, part: KVSpec) -> torch.dtype:
        """Return the element type of one class in the engine's cache."""
        only = part.only
        return self.dtype if only.scales is None else part.torch_dtype

    @property
    def shard(self) -> KVSpec:
        """Spec of this rank's layers and heads, which are published separately; `spec` if the rank has all of them."""
        return with_heads(self.spec if self.layers is None else with_layers(self.spec, self.layers), self.heads)

    @property
    def apart(self) -> bool:
        """True if ranks hold different parts of the model."""
        return self.ranks > 1 or self.shard is not self.spec

    @property
    def shards(self) -> tuple[KVSpec, ...]:
        """Specs that the ranks of this stage publish."""
        if self.shard is self.spec or self.layers is not None:
            return (self.shard,)
        sizes = [len(own) for own in self.heads]
        counts = [one.heads // size for one, size in zip(self.spec.classes, sizes, strict=True)]
        ranks = max(counts)
        firsts = (
            [rank * count // ranks * size for count, size in zip(counts, sizes, strict=True)] for rank in range(ranks)
        )
        parts = ([range(first, first + size) for first, size in zip(rank, sizes, strict=True)] for rank in firsts)
        return tuple(with_heads(self.spec, tuple(heads)) for heads in parts)

    def adapted(self, adapter: str | None) -> ServedModel:
        """Return the model with the name of a LoRA adapter, given the adapter's digest; None: without an adapter."""
        if adapter is None:
            return self
        named = self.named or self.spec.model
        stage = self.spec.model.removeprefix(with_facts(named, self.facts))
        facts = {**self.facts, **self.lora, "adapters": adapter}
        return replace(self, spec=replace(self.spec, model=with_facts(named, facts) + stage), facts=facts)

    @property
    def undrafted(self) -> KVSpec | None:
        """Spec of caches without the draft model's layers; None if there is no draft model."""
        classes = tuple(one for one in self.spec.classes if not one.role.startswith(DRAFT))
        if len(classes) == len(self.spec.classes):
            return None
        name = with_facts(self.named or self.spec.model, {**self.facts, "draft": None})
        return replace(self.spec, model=name, classes=classes)

    @property
    def unquantised(self) -> KVSpec | None:
        """Spec of caches without quantisation; None if such caches are not played."""
        if not self.plain_caches:
            return None
        name = with_facts(self.named or self.spec.model, {**self.facts, "cache": None})
        classes = tuple(replace(one, dtype=_name(torch.bfloat16), scales=None) for one in self.spec.classes)
        return replace(self.spec, model=name, classes=classes)

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        """Specs to look up, in order: this rank's, the model's, then alternatives."""
        own = (self.spec,) if self.shard is self.spec else (self.shard, self.spec)
        bare = self.undrafted if self.without_draft else None
        return (*own, *(each for each in (self.unquantised, bare) if each is not None))

    @property
    def places(self) -> tuple[tuple[int, range], ...]:
        """For each layer class of this rank: the index of the model's class, and the rows in it."""
        if self.layers is None:
            return tuple((part, range(len(one.layers))) for part, one in enumerate(self.spec.classes))
        found = []
        for own in self.shard.classes:
            layer = self.layers.start + own.layers[0]
            pairs = enumerate(self.spec.classes)
            part, one = next((part, one) for part, one in pairs if one.role == own.role and layer in one.layers)
            row = one.layers.index(layer)
            found.append((part, range(row, row + len(own.layers))))
        return tuple(found)


def served_model(
    config: Any,
    caches: Any,
    settings: VllmSettings,
    *,
    consumes: bool = True,
    produces: bool = False,
    blocks_may_fail: bool = True,
    scales: Scales | None = None,
) -> ServedModel:
    """Return the model of an engine.

    Args:
        config: a ``vllm.config.VllmConfig``.
        caches: a ``vllm.v1.kv_cache_interface.KVCacheConfig``.
        settings: settings of the connector.
        consumes: True if the engine plays caches.
        produces: True if the engine publishes caches.
        blocks_may_fail: True if this version of vLLM accepts single failed blocks.
        scales: scales of an FP8 cache, as read by a worker; default 1.

    Raises:
        UsageError: vLLM's options prevent the exchange of caches; the message names the option to change.
        UnknownCacheError: kvabr does not know the form of this model's cache.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    quantisation = _quantisation(cache, scales or {})
    prefill = int(getattr(parallel, "prefill_context_parallel_size", 1))
    interleaving = interleaving_of(parallel)
    if produces and (prefill > 1 or interleaving.ranks > 1):
        raise UsageError(
            "with prefill_context_parallel_size or decode_context_parallel_size above 1 kvabr cannot "
            "publish, as no rank has all tokens: set kv_role to kv_consumer"
        )
    own = model.dtype if cache.cache_dtype == "auto" else getattr(torch, cache.cache_dtype, model.dtype)
    ranks = int(parallel.tensor_parallel_size)
    rank = int(getattr(parallel, "rank", 0)) % ranks
    draft = draft_of(config)
    facts = facts_of(config) | {"draft": list(draft.facts) or None}
    named, named_facts, tokenizer = _names(model, settings, facts)
    name = with_facts(named, named_facts)
    config_dtype = _name(getattr(model.hf_config, "dtype", ""))
    total = int(model.get_total_num_hidden_layers())
    layers = range(*model.get_layers_start_end_indices(parallel))
    kept = engine_caches(
        caches,
        layers=layers,
        dtype=model_loader.asset_dtype(config_dtype),
        held=own,
        heads_of=lambda heads: _all_heads(model, heads, ranks),
        cpu=config.device_config.device_type == "cpu",
        draft=draft,
        interleaving=interleaving,
        quantisation=quantisation,
    )
    if consumes:
        _check_playable(config, kept)
    ropes = ropes_of_config(model.hf_text_config, kept.classes)
    classes = tuple(replace(one, rope=rope) for one, rope in zip(kept.classes, ropes, strict=True))
    try:
        whole = _whole(classes, layers, total, getattr(model.hf_text_config, "layer_types", None))
        if whole is None:
            here = tuple(one for each in classes if (one := each.of_layers(layers)) is not None)
            spec = KVSpec(f"{name}+layers{layers.start}-{layers.stop - 1}", tokenizer, here)
        else:
            spec = KVSpec(name, tokenizer, whole)
        spec = settings.grouped(spec)
    except FormatError as error:
        raise UnknownCacheError(f"vLLM's cache of {model.model}: {error}") from error
    if kept.states and parallel.world_size > 1:
        raise UnknownCacheError(
            "kvabr supports recurrent states only if each rank has all of them, but here each rank has a part"
        )
    for pages in kept.pages:
        check_block_size(pages.block, spec.group_tokens)
        if pages.passing and spec.group_tokens % pages.block:
            raise UsageError(
                f"vLLM's blocks of {pages.block} tokens in layers with windows are larger than kvabr's groups of "
                f'{spec.group_tokens}: set --block-size {spec.group_tokens} or less, or "group_tokens"'
            )
    plain_caches = settings.plain_caches and any(one.scales is not None for one in spec.classes)
    if plain_caches and (whole is None or not all(map(_was_plain, spec.classes))):
        raise UsageError(
            f"plain_caches is only for whole models with keys and values, but vLLM keeps {spec.summary}: leave it out "
            "to play only caches that are quantised like this engine's"
        )
    heads = tuple(head_shard(one.heads, rank, ranks) if one.heads > 1 else range(1) for one in classes)
    waits = len(caches.kv_cache_groups) > 1 or bool(kept.passing) or not blocks_may_fail
    staged = whole is not None and len(layers) < total
    workers = ranks * prefill * int(parallel.pipeline_parallel_size)
    return ServedModel(
        spec,
        own,
        kept,
        heads,
        workers,
        waits,
        layers if staged else None,
        prefix_caching=bool(getattr(cache, "enable_prefix_caching", True)),
        step_tokens=int(config.scheduler_config.max_num_batched_tokens),
        facts=named_facts,
        named=named,
        plain_caches=plain_caches,
        without_draft=settings.without_draft,
        ahead=draft.ahead,
        lora=lora_facts(config),
    )


def _was_plain(one: LayerClass) -> bool:
    """Return True if vLLM makes the class's codes from keys and values."""
    return one.scales is not None and one.halves == 2


def _quantisation(cache: Any, scales: Scales) -> Quantisation:
    stored = str(cache.cache_dtype)
    codes = FP8_CACHES.get(stored)
    if codes is not None:
        if getattr(cache, "calculate_kv_scales", False):
            raise UsageError(
                "each start of vLLM calculates other scales for its FP8 cache: leave calculate_kv_scales out"
            )
        return Quantisation(_name(codes), scales)
    if stored in _PLAIN_CACHES:
        return PLAIN
    if stored == "fp8_inc":
        raise UsageError(
            "vLLM's fp8_inc cache has scales that kvabr cannot read: start it with --kv-cache-dtype auto or fp8"
        )
    raise UsageError(
        f"kvabr cannot exchange vLLM's cache format {stored}: start it with --kv-cache-dtype auto, float16, bfloat16 "
        "or fp8"
    )


def _check_playable(config: Any, kept: EngineCaches) -> None:
    """Raise `UnknownCacheError` if vLLM cannot compute tokens after a played cache."""
    chunked = getattr(config.scheduler_config, "enable_chunked_prefill", True)
    if kept.latent and not (chunked or getattr(config.cache_config, "enable_prefix_caching", True)):
        raise UnknownCacheError(
            "on this machine vLLM cannot continue a cached prompt of this model (MLA), as on processors without AMX; "
            "set kv_role to kv_producer to publish its caches"
        )


def _whole(
    own: Sequence[LayerClass], layers: range, total: int, types: Sequence[str] | None
) -> tuple[LayerClass, ...] | None:
    """Return the classes of the whole model, given those of a pipeline stage; None if they are unknown.

    If the model's configuration has no layer types, all layers are assumed equal; if not, published caches are later
    rejected as foreign.
    """
    if len(layers) == total:
        return tuple(own)
    if types is None and len(own) > 1:
        return None
    types = tuple(types or ("",) * total)
    found = []
    for each in own:
        alike = {types[layer] for layer in each.layers}
        others = {types[layer] for one in own if one is not each for layer in one.layers}
        if each.role or alike & others or each.scales not in (None, (1.0,)):
            return None
        found.append(replace(each, layers=tuple(layer for layer in range(total) if types[layer] in alike)))
    if sum(len(one.layers) for one in found) != total:
        return None
    return tuple(sorted(found, key=lambda one: one.layers[0]))


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _all_heads(model: Any, heads: int, ranks: int) -> int:
    """Return the number of KV heads of a layer in the whole model, given the number in one tensor-parallel rank."""
    if ranks == 1:
        return heads
    total = int(model.get_total_num_kv_heads())
    if heads != max(1, total // ranks):
        raise UnknownCacheError(
            f"vLLM has {heads} KV heads per layer in each of {ranks} ranks, but the model has {total}: kvabr needs the "
            "same number in all layers"
        )
    return total


def _names(model: Any, settings: VllmSettings, facts: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    """Return the model's name, the facts to add (see `with_facts`), and the tokenizer's name."""
    path = cached_folder(str(model.model), getattr(model, "revision", None)) or Path(str(model.model))
    named = settings.model is not None and settings.tokenizer is not None
    if not named and not ((path / "config.json").is_file() and (path / "tokenizer.json").is_file()):
        raise UsageError(
            f"{WHERE}: {model.model} is not a folder with a model and a tokenizer.json, so name its caches: "
            '"model" (with its revision: caches of two revisions must not mix) and "tokenizer"'
        )
    return settings.model or model_name(path), facts, settings.tokenizer or model_loader.folder_tokenizer(path)


def facts_of(config: Any) -> dict[str, Any]:
    """Return the facts that change the model's KV beyond files and defaults; see `with_facts`."""
    model, load = config.model_config, getattr(config, "load_config", None)
    stored = config.cache_config.cache_dtype
    cache = FP8_CACHES.get(stored)
    own = getattr(model.hf_config, "quantization_config", None)
    overrides: Any = getattr(model, "hf_overrides", None)
    dummy = getattr(load, "load_format", None) == "dummy"
    return {
        "cache": _name(cache) if cache is not None else None if stored in _PLAIN_CACHES else stored,
        "config": _text(getattr(model, "hf_config_path", None)),
        "dummy": [getattr(model, "seed", 0)] if dummy else None,
        "overrides": _function(overrides) if callable(overrides) else _text(overrides),
        "rope": "long" if _is_long(model) else None,
        "quantization": None if own else _text(getattr(model, "quantization", None)),
        "quantized": _text(getattr(model, "quantization_config", None)),
        "weights": _text(getattr(model, "model_weights", None)),
        "window": "off" if getattr(model, "disable_sliding_window", False) else None,
    }


def lora_facts(config: Any) -> dict[str, Any]:
    """Return the facts that change the effect of an adapter; see `with_facts`."""
    lora = getattr(config, "lora_config", None)
    return {
        "adapted_modules": sorted(getattr(lora, "target_modules", None) or ()),
        "adapted_towers": getattr(lora, "enable_tower_connector_lora", False) or None,
    }


def _is_long(model: Any) -> bool:
    """Return True if vLLM rotates all keys like LongRoPE rotates those of long prompts."""
    config = getattr(model, "hf_text_config", None)
    original = None if config is None else model_loader.original_context(config)
    return original is not None and int(model.max_model_len) > original


def _text(value: object) -> str | None:
    """Return a setting as text that is the same in every process; None if it is empty."""
    if not value:
        return None
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _function(given: Any) -> str:
    return f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', type(given).__qualname__)}"


def ropes_of_config(config: Any, classes: Sequence[LayerClass]) -> list[RopeSpec | None]:
    """Return the rotary embedding of each layer class, probed on a model with one small layer per class.

    An entry is None if a spec cannot express the embedding, or the model cannot be built. Published caches with an
    embedding are then foreign.
    """
    unknown: list[RopeSpec | None] = [None] * len(classes)
    firsts = sorted({one.layers[0] for one in classes if not one.role})
    tiny = copy.deepcopy(config)
    small = {"num_hidden_layers": len(firsts), "vocab_size": 128, "intermediate_size": 32, "tie_word_embeddings": True}
    try:
        for name, value in {**small, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}.items():
            setattr(tiny, name, value)
        if getattr(tiny, "layer_types", None):
            tiny.layer_types = [list(config.layer_types)[first] for first in firsts]
        with torch.random.fork_rng(devices=[]):
            model = require("transformers").AutoModelForCausalLM.from_config(tiny, dtype=torch.float32)
        probed = spec_of(model.eval(), name="probe", tokenizer="", dtype="float16").classes
    except (KvabrError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, IndexError):
        return unknown
    ropes = {one.layers[0]: one for one in probed if not one.role}
    alike = [ropes.get(firsts.index(one.layers[0])) if not one.role else None for one in classes]
    return [
        found.rope if found is not None and _same(found, one) else None
        for found, one in zip(alike, classes, strict=True)
    ]


def _same(found: LayerClass, wanted: LayerClass) -> bool:
    alike = replace(found, layers=wanted.layers, dtype=wanted.dtype, scales=wanted.scales, rope=None)
    return alike == replace(wanted, rope=None)
