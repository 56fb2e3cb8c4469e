"""Conversion between kvabr's KV, a tensor [layer, K/V, head, token, dim] per layer class, and transformers' caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from kvabr.codec.payload import keys_and_values
from kvabr.engines.adapters import require
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.kv import DTYPES, KVSpec, LayerClass
from kvabr.types.units import Span

_FLOATS = tuple(getattr(torch, name) for name in DTYPES)
SLIDING = "DynamicSlidingWindowLayer"
"""The layer of a cache that keeps only the last tokens, one fewer than its window has."""


def dynamic_cache(parts: Sequence[torch.Tensor], spec: KVSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a `DynamicCache` with a copy of a cache of all tokens in all layers, in a model's dtype and device.

    ``parts`` are a tensor per layer class of ``spec``. Layers with windows keep all tokens, and the model masks them.
    """
    cache = require("transformers").DynamicCache()
    if parts[0].shape[3]:
        for layer, (keys, values) in enumerate(_by_layer(parts, spec)):
            cache.update(*(part.to(device=device, dtype=dtype)[None] for part in (keys, values)), layer)
    return cache


def windowed_cache(parts: Sequence[torch.Tensor], spans: Sequence[Span], spec: KVSpec, tokens: int, model: Any) -> Any:
    """Return a `DynamicCache` with a copy of the first ``tokens`` tokens of a played cache, as a model makes it.

    Layers with windows hold what can still be seen. ``parts`` are a tensor per layer class, with the tokens of
    ``spans``.
    """
    cache = require("transformers").DynamicCache(config=model.config)
    shown = [part[:, :, :, : max(0, tokens - span.first)] for part, span in zip(parts, spans, strict=True)]
    kinds = {layer: each for each in spec.classes for layer in each.layers}
    for layer, (keys, values) in enumerate(_by_layer(shown, spec)):
        state, only = cache.layers[layer], kinds[layer]
        if (type(state).__name__ == SLIDING) != (only.window is not None):
            raise ModelError(f"{spec.model}: transformers keeps layer {layer} as {type(state).__name__}")
        both = [part.to(device=model.device, dtype=model.dtype)[None] for part in (keys, values)]
        if only.window is not None:
            # Of a chunk that has just begun less is needed than the layer has room for: the rest is masked.
            missing = max(0, min(only.window - 1, tokens) - both[0].shape[2])
            both = [pad(part, (0, 0, missing, 0)) for part in both]
        state.update(*both)
        if only.window is not None:
            state.cumulative_length = tokens
    return cache


def _by_layer(parts: Sequence[torch.Tensor], spec: KVSpec) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of every layer of the model, [head, token, dim]; only one vector per token is both."""
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part, one in zip(parts, spec.parts, strict=True):
        keys, values = keys_and_values(part, one)
        pairs = zip(keys, values if one.only.v_dim else keys, strict=True)
        layers.update(zip(one.only.layers, pairs, strict=True))
    return [layers[layer] for layer in sorted(layers)]


def read_cache(cache: Any, spec: KVSpec, first: int, last: int) -> tuple[torch.Tensor, ...]:
    """Copy the KV of tokens ``first`` to ``last`` - 1 out of a cache of ``spec`` that holds all tokens, to the CPU."""
    out = []
    for part in spec.parts:
        kv = torch.empty(part.shape(last - first), dtype=cache.layers[0].keys.dtype)
        keys, values = keys_and_values(kv, part)
        for place, layer in enumerate(part.only.layers):
            keys[place].copy_(cache.layers[layer].keys[0, :, first:last])
            if part.only.v_dim:
                values[place].copy_(cache.layers[layer].values[0, :, first:last])
        out.append(kv)
    return tuple(out)


def cache_kv(cache: Any, spec: KVSpec, tokens: int) -> tuple[torch.Tensor, ...]:
    """Copy the KV of the first tokens out of the ``past_key_values`` of a model's output, for a batch of one.

    Returns:
        A tensor per layer class, [layer, K/V, head, token, dim] in the cache's dtype, on the CPU.

    Raises:
        ModelError: the cache is quantised, static, has dropped what left its windows, or is another model's.
        UsageError: it does not hold exactly one prompt, or holds fewer tokens.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ModelError(
            f"a {type(cache).__name__} is not a cache of transformers; pass the past_key_values of an output"
        )
    kinds = {layer: each for each in spec.classes for layer in each.layers}
    if len(layers) != len(kinds):
        raise ModelError(f"a cache of {len(layers)} layers is not one of {spec.model}, which has {len(kinds)}")
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if kind == SLIDING:
            raise ModelError(
                f"layer {index} keeps its cache as {kind}, which drops tokens that shorter prompts need: give the "
                "model past_key_values=DynamicCache(), made without its configuration"
            )
        if kind != "DynamicLayer":
            raise ModelError(
                f"layer {index} keeps its cache as {kind}: kvabr needs plain layers that hold every token "
                "unquantised; let generate() make a DynamicCache"
            )
        _check_layer(index, layer, spec.model, kinds[index], tokens)
    return read_cache(cache, spec, 0, tokens)


def _check_layer(index: int, layer: Any, model: str, only: LayerClass, tokens: int) -> None:
    keys, values = layer.keys, layer.values
    if keys is None or keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ModelError(f"layer {index} of the cache is empty, or its keys and values differ in shape")
    batch, heads, held, dim = keys.shape
    if batch != 1:
        raise UsageError(f"the cache holds {batch} prompts; publish them one at a time")
    if (heads, dim, values.shape[3]) != (only.heads, only.k_dim, only.v_dim or only.k_dim):
        raise ModelError(
            f"layer {index} of the cache has {heads} heads of {dim}, {model} has {only.heads} of {only.k_dim}: it is "
            "another model's"
        )
    if keys.dtype not in _FLOATS:
        raise ModelError(f"the cache is {keys.dtype}; kvabr takes {', '.join(DTYPES)}")
    if held < tokens:
        raise UsageError(f"the cache holds {held} tokens, fewer than the {tokens} given")
