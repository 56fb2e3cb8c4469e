"""vLLM's cache tensors: the layer of each, and the layout of its blocks, which a kernel reveals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from kvabr.engines.layouts import BlockLayout, keys_and_values
from kvabr.types.errors import FormatError, UsageError

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layers_of(caches: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return cache tensors by layer, by their names, for instance ``model.layers.7.self_attn.attn``.

    Raises:
        UsageError: a name has no layer number, or two have the same.
    """
    out: dict[int, torch.Tensor] = {}
    for name, cache in caches.items():
        numbers = _LAYER.findall(name)
        if len(numbers) != 1 or int(numbers[0]) in out:
            raise UsageError(f"the name of vLLM's cache {name!r} does not tell its layer: this model is not supported")
        out[int(numbers[0])] = cache
    return out


def layout_of(config: Any, layers: Mapping[int, torch.Tensor]) -> BlockLayout:
    """Return the layout of the blocks; on a CPU by letting the attention kernel store a few known numbers.

    Args:
        config: a ``vllm.config.VllmConfig``.
        layers: the caches, by layer.

    Raises:
        UsageError: the kernel uses another layout.
    """
    cache = layers[min(layers)]
    if cache.device.type != "cpu":
        return BlockLayout.PLAIN
    from vllm import _custom_ops as ops  # noqa: PLC0415  # for CPUs only
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    _, heads, size, both = cache.shape
    dim = both // 2
    isa = _get_attn_isa(config.model_config.dtype, size, dim, config.cache_config.cache_dtype)
    scratch = torch.zeros((2, heads, size, both), dtype=cache.dtype)
    # Small integers: exact in every float type, and no two equal along a dimension.
    count = size * heads * dim
    key = (torch.arange(count) % 241).to(cache.dtype).view(size, heads, dim)
    value = (torch.arange(count) % 251 + 1).to(cache.dtype).view(size, heads, dim)
    halves = scratch.view(2, heads, 2 * size, dim).chunk(2, dim=2)
    slots = torch.arange(size, 2 * size, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        key, value, halves[0], halves[1], slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
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
