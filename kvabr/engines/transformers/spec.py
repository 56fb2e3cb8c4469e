"""The spec of a transformers model's cache, checked on a real cache of a few tokens."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from kvabr.engines.adapters import require
from kvabr.engines.transformers.rotary import rope_of
from kvabr.types.errors import ModelError
from kvabr.types.kv import KVSpec

_PROBED = 8
"""Tokens of the probe."""
_FAR = 500
"""Position of its last token: far enough for slow rotations to show, near enough for exact float32 angles."""


def spec_of(model: Any, *, name: str, tokenizer: str, dtype: str, whole_windows: bool = False) -> KVSpec:
    """Return the spec of a transformers model's cache, checked on a real cache of a few tokens.

    Args:
        model: a loaded causal language model.
        name: the model's name, as in the track namespace.
        tokenizer: digest of the tokenizer.
        dtype: element type of the published cache, a key of `kvabr.types.kv.DTYPES`.
        whole_windows: accept a model with sliding windows: for measurements, whose cache keeps every token in every
            layer. Such models rotate keys differently in different layers, so keys count as not rotated.

    Raises:
        ModelError: the cache is not plain full attention.
    """
    config = model.config
    if getattr(config, "kv_lora_rank", None):
        raise ModelError(f"{name}: multi-head latent attention (MLA) keeps a compressed cache, not keys and values")
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    windows = kinds == ["sliding_attention"] and whole_windows
    if kinds and not windows:
        raise ModelError(f"{name}: has {', '.join(kinds)} layers; kvabr needs full attention in every layer")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) and not windows:
        raise ModelError(f"{name}: its attention is a sliding window; kvabr needs full attention in every layer")
    positions = _probe_positions(model)
    keys = _probe_keys(model, name, positions)
    _, heads, _, dim = keys[0].shape
    return KVSpec(
        model=name,
        tokenizer=tokenizer,
        layers=len(keys),
        kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        rope=None if windows else rope_of(model, keys[0][0], positions),
    )


def _probe_positions(model: Any) -> torch.Tensor:
    """Return the positions of the probe's tokens: consecutive, but the last far away if the model allows it."""
    positions = torch.arange(_PROBED)
    context = getattr(model.config, "max_position_embeddings", None)
    if isinstance(context, int) and "position_ids" in signature(model.base_model.forward).parameters:
        positions[-1] = max(_PROBED - 1, min(context - 1, _FAR))
    return positions


@torch.inference_mode()
def _probe_keys(model: Any, name: str, positions: torch.Tensor) -> list[torch.Tensor]:
    """Return the keys of every layer, [1, head, token, dim], for one token id repeated, as `rope_of` needs them."""
    cache = require("transformers").DynamicCache()
    tokens = len(positions)
    moved = {} if int(positions[-1]) == tokens - 1 else {"position_ids": positions[None].to(model.device)}
    ids = torch.full((1, tokens), 100, device=model.device)
    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True, **moved)
    layers = list(cache.layers)
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if kind != "DynamicLayer" or layer.keys is None or layer.keys.shape != layer.values.shape:
            raise ModelError(f"{name}: layer {index} keeps its cache as {kind}; kvabr needs plain full attention")
        if layer.keys.shape != layers[0].keys.shape or layer.keys.shape[2] != tokens:
            raise ModelError(f"{name}: layer {index} of the cache has another shape than layer 0")
    return [layer.keys for layer in layers]
