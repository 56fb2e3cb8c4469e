"""Settings, spec and layout of LMCache's chunks. Pure functions; LMCache is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvabr.engines import chunk_store as keyed
from kvabr.engines.chunk_store import KeyedSettings
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

_OWN_KEYS = ("module_path", "class_name")
"""Keys that LMCache reads itself."""


def read_settings(extra_config: Mapping[str, Any] | None, plugin: str = "kvabr") -> KeyedSettings:
    """Return the settings of a plug-in, which the user lists under the name ``plugin``; see `KeyedSettings.read`."""
    prefix = f"remote_storage_plugin.{plugin}."
    given = {key.removeprefix(prefix): value for key, value in (extra_config or {}).items() if key.startswith(prefix)}
    for key in _OWN_KEYS:
        given.pop(key, None)
    return KeyedSettings.read(given, f"extra_config, {prefix}*")


def spec_of(model: str, shape: Sequence[int], dtype: torch.dtype) -> KVSpec:
    """Return the spec of chunks of LMCache's shape (layers, 2, tokens, heads of one rank, dim); not of MLA or FP8."""
    layers, both, _, heads, dim = shape
    if both != 2:
        raise FormatError(f"a cache of shape {tuple(shape)}: kvabr has tracks for keys and values, not for MLA")
    return keyed.spec_of(model, "lmcache", layers, heads, dim, dtype)


def as_kv(chunk: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Return a view in kvabr's layout, [layer, K/V, head, token, dim], of a chunk in LMCache's KV_2LTD.

    That is [K/V, layer, token, head x dim]; another shape is a `FormatError`.
    """
    both, layers, tokens, width = chunk.shape if chunk.dim() == 4 else (0, 0, 0, 0)
    if (both, layers, width) != (2, spec.layers, spec.kv_heads * spec.head_dim):
        wanted = f"[2, {spec.layers}, tokens, {spec.kv_heads * spec.head_dim}]"
        raise FormatError(f"a chunk has the shape {tuple(chunk.shape)}, not {wanted}")
    return chunk.view(2, layers, tokens, spec.kv_heads, spec.head_dim).permute(1, 0, 3, 2, 4)
