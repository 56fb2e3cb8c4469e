"""What vLLM says of its model, as kvabr names and describes caches; and what of it cannot be served."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvabr.engines.layouts import check_block_size, head_shard
from kvabr.engines.require import require
from kvabr.engines.transformers import model_loader
from kvabr.engines.transformers.spec import spec_of
from kvabr.engines.vllm.options import WHERE, Options
from kvabr.publish.publisher import with_heads
from kvabr.types.errors import KvabrError, ModelError, UsageError
from kvabr.types.kv import GROUP_TOKENS, KVSpec, RopeSpec

_PROBE_VOCABULARY = 128
_PLAIN_CACHES = ("auto", "float16", "bfloat16", "half", "float", "float32")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an engine."""

    spec: KVSpec
    """Of the whole model's cache, whatever this rank holds of it."""
    dtype: torch.dtype
    """Element type of the engine's own cache."""
    block: int
    """Tokens in one of its blocks."""
    heads: range
    """KV heads that this rank holds."""
    context: int
    """Tokens that the model sees at most."""

    @property
    def shard(self) -> KVSpec:
        """Of what this rank holds, if it is published by itself; `spec` if it holds all."""
        return with_heads(self.spec, self.heads)


def served_model(config: Any, options: Options) -> ServedModel:
    """Read vLLM's configuration.

    Args:
        config: a ``vllm.config.VllmConfig``.
        options: the user's.

    Raises:
        UsageError: this engine is set up in a way that caches cannot be exchanged with; the message says what to do.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if cache.cache_dtype not in _PLAIN_CACHES:
        raise UsageError(
            f"vLLM keeps its KV cache as {cache.cache_dtype}: it quantises what kvabr has chosen the precision of, "
            "with scales that no other engine has; start it with --kv-cache-dtype auto"
        )
    if parallel.pipeline_parallel_size > 1:
        raise UsageError("kvabr's connector does not know pipeline parallelism; use tensor parallelism instead")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UsageError(f"kvabr's connector does not know {name} above 1")
    if getattr(model, "use_mla", False):
        raise UsageError("multi-head latent attention (MLA) keeps a compressed cache, not keys and values")
    block = int(cache.block_size)
    check_block_size(block, GROUP_TOKENS)
    dtype = _dtype(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype)
    heads = int(model.get_total_num_kv_heads())
    ranks = int(parallel.tensor_parallel_size)
    rank = int(getattr(parallel, "rank", 0)) % ranks
    name, tokenizer = _names(model, options)
    config_dtype = str(getattr(model.hf_config, "dtype", "")).removeprefix("torch.")
    spec = KVSpec(
        model=name,
        tokenizer=tokenizer,
        layers=int(model.get_total_num_hidden_layers()),
        kv_heads=heads,
        head_dim=int(model.get_head_size()),
        dtype=options.asset_dtype or model_loader.asset_dtype(config_dtype),
        rope=rope_of_config(model.hf_text_config),
    )
    return ServedModel(spec, dtype, block, head_shard(heads, rank, ranks), int(model.max_model_len))


def _names(model: Any, options: Options) -> tuple[str, str]:
    """What the model and its tokenizer are called in the track namespace."""
    path = Path(str(model.model))
    if options.model is not None and options.tokenizer is not None:
        return options.model, options.tokenizer
    if not (path / "config.json").is_file() or not (path / "tokenizer.json").is_file():
        raise UsageError(
            f"{WHERE}: {model.model} is no folder with a model and a tokenizer.json, so say how its caches are named: "
            '"model" (with its revision: caches of two revisions must not mix) and "tokenizer"'
        )
    return options.model or model_loader.folder_name(path), options.tokenizer or model_loader.folder_tokenizer(path)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    names = {"half": "float16", "float": "float32"}
    found = getattr(torch, names.get(str(value), str(value)), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"a KV cache of {value} is none that kvabr knows")
    return found


def rope_of_config(config: Any) -> RopeSpec | None:
    """The rotary embedding of a transformers configuration: that of a model of one small layer made from it.

    None if there is none that a spec can say, or the model cannot be made; caches of models that kvabr publishes with
    an embedding are then refused as foreign.
    """
    tiny = copy.deepcopy(config)
    small = {
        "num_hidden_layers": 1,
        "vocab_size": _PROBE_VOCABULARY,
        "intermediate_size": 32,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }
    try:
        for name, value in small.items():
            setattr(tiny, name, value)
        if getattr(tiny, "layer_types", None):
            tiny.layer_types = list(tiny.layer_types)[:1]
        state = torch.random.get_rng_state()
        try:
            model = require("transformers").AutoModelForCausalLM.from_config(tiny, dtype=torch.float32)
        finally:
            torch.random.set_rng_state(state)
        return spec_of(model.eval(), name="probe", tokenizer="", dtype="float16").rope
    except (KvabrError, ModelError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, IndexError):
        return None
