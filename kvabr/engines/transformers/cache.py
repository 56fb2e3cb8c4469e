"""Conversion between kvabr's KV, [layer, K/V, head, token, dim], and the caches of transformers."""

from __future__ import annotations

from typing import Any

import torch

from kvabr.engines.adapters import require
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.kv import DTYPES, KVSpec

_FLOATS = tuple(getattr(torch, name) for name in DTYPES)


def dynamic_cache(kv: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a `DynamicCache` with a copy of ``kv``, [layer, K/V, head, token, dim], in a model's dtype and device."""
    cache = require("transformers").DynamicCache()
    if kv.shape[3]:
        for layer, part in enumerate(kv):
            keys, values = part.to(device=device, dtype=dtype)
            cache.update(keys[None], values[None], layer)
    return cache


def read_cache(cache: Any, spec: KVSpec, first: int, last: int) -> torch.Tensor:
    """Copy the KV of tokens ``first`` to ``last`` - 1 out of a cache that is one of ``spec``, on the CPU."""
    out = torch.empty(spec.shape(last - first), dtype=cache.layers[0].keys.dtype)
    for (keys, values), layer in zip(out, cache.layers, strict=True):
        keys.copy_(layer.keys[0, :, first:last])
        values.copy_(layer.values[0, :, first:last])
    return out


def cache_kv(cache: Any, spec: KVSpec, tokens: int) -> torch.Tensor:
    """Copy the KV of the first tokens out of the ``past_key_values`` of a model's output, for a batch of one.

    Returns:
        [layer, K/V, head, token, dim] in the cache's dtype, on the CPU.

    Raises:
        ModelError: the cache is quantised, static, has sliding windows, or is another model's.
        UsageError: it does not hold exactly one prompt, or holds fewer tokens.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ModelError(
            f"a {type(cache).__name__} is not a cache of transformers; pass the past_key_values of an output"
        )
    if len(layers) != spec.layers:
        raise ModelError(f"a cache of {len(layers)} layers is not one of {spec.model}, which has {spec.layers}")
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if kind != "DynamicLayer":
            raise ModelError(
                f"layer {index} keeps its cache as {kind}: kvabr needs plain layers that hold every token "
                "unquantised; let generate() make a DynamicCache"
            )
        _check_layer(index, layer, spec, tokens)
    return read_cache(cache, spec, 0, tokens)


def _check_layer(index: int, layer: Any, spec: KVSpec, tokens: int) -> None:
    keys, values = layer.keys, layer.values
    if keys is None or keys.dim() != 4 or keys.shape != values.shape:
        raise ModelError(f"layer {index} of the cache is empty, or its keys and values differ in shape")
    batch, heads, held, dim = keys.shape
    if batch != 1:
        raise UsageError(f"the cache holds {batch} prompts; publish them one at a time")
    if (heads, dim) != (spec.kv_heads, spec.head_dim):
        raise ModelError(
            f"layer {index} of the cache has {heads} heads of {dim}, {spec.model} has {spec.kv_heads} of "
            f"{spec.head_dim}: it is another model's"
        )
    if keys.dtype not in _FLOATS:
        raise ModelError(f"the cache is {keys.dtype}; kvabr takes {', '.join(DTYPES)}")
    if held < tokens:
        raise UsageError(f"the cache holds {held} tokens, fewer than the {tokens} given")
