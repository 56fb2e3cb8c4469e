"""Conversion between kvabr's KV, [layer, K/V, head, token, dim], and the caches of transformers."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvabr.engines.adapters import require
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.kv import DTYPES, KVSpec

_FLOATS = tuple(getattr(torch, name) for name in DTYPES)

_LOSSES: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""Expected loss of played caches, while they live."""


def dynamic_cache(kv: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a `DynamicCache` with a copy of ``kv``.

    Args:
        kv: [layer, K/V, head, token, dim]; no tokens make an empty cache.
        dtype: the model's.
        device: the model's.
    """
    cache = require("transformers").DynamicCache()
    if kv.shape[3]:
        # Not in inference mode: a caller may go on without it.
        with torch.no_grad():
            for layer, (keys, values) in enumerate(kv):
                cache.update(
                    keys[None].to(device=device, dtype=dtype), values[None].to(device=device, dtype=dtype), layer
                )
    return cache


def cache_kv(cache: Any, spec: KVSpec, tokens: int) -> torch.Tensor:
    """Copy the KV of the first tokens out of a transformers cache.

    Args:
        cache: the ``past_key_values`` of a model's output, for a batch of one.
        spec: of the model's cache.
        tokens: number of tokens.

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
    out = torch.empty(spec.shape(tokens), dtype=layers[0].keys.dtype)
    for index, layer in enumerate(layers):
        out[index, 0] = layer.keys[0, :, :tokens]
        out[index, 1] = layer.values[0, :, :tokens]
    return out


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


def remember_loss(cache: Any, loss: float) -> None:
    """Record the expected loss of a cache; see `loss_of`."""
    _LOSSES[cache] = loss


def loss_of(cache: Any) -> float:
    """Return the expected loss of a cache, nats per generated token; 0.0 unless it was played on lossy tracks."""
    try:
        return _LOSSES.get(cache, 0.0)
    except TypeError:  # not hashable, so not recorded
        return 0.0
