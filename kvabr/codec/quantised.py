"""Caches that an engine stores as 8-bit floats: conversion between codes and numbers.

A float8 tensor holds the engine's codes. Numbers are codes times the class's scales
(`kvabr.types.kv.LayerClass.scales`). The level Raw stores codes, other levels store numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import QUANTISED, KVSpec, LayerClass

_TYPES = tuple(getattr(torch, name) for name in QUANTISED)
_SPECIAL = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


def is_quantised(dtype: torch.dtype) -> bool:
    """Return True if this type holds codes, which need scales."""
    return dtype in _TYPES


def _foreign(dtype: torch.dtype, spec: KVSpec) -> bool:
    return dtype != spec.torch_dtype and dtype in _TYPES


def check_type(kv: torch.Tensor, spec: KVSpec, what: str) -> None:
    """Raise `FormatError` if a tensor of codes has another type than the spec's only class."""
    if _foreign(kv.dtype, spec):
        raise FormatError(f"{what} {kv.dtype}: the class {spec.only.title} of {spec.model} is kept in {spec.dtype}")


def check_wanted(dtype: torch.dtype, spec: KVSpec) -> None:
    """Raise `UsageError` if caches of the spec's only class cannot be converted to a type."""
    if not dtype.is_floating_point:
        raise UsageError(f"the element type of a cache must be a float, got {dtype}")
    if _foreign(dtype, spec):
        raise UsageError(f"a cache in {spec.dtype} cannot be converted to {dtype}, which has scales of its own")


def special(codes: torch.Tensor) -> torch.Tensor:
    """Return the mask of NaN and infinity in a float8 tensor."""
    return (codes.view(torch.uint8) & 0x7F) >= _SPECIAL[codes.dtype]


def any_special(codes: torch.Tensor) -> bool:
    """Return True if a contiguous float8 tensor has NaN or infinity."""
    return int((codes.view(torch.uint8) & 0x7F).amax()) >= _SPECIAL[codes.dtype]


def all_finite(kv: torch.Tensor) -> bool:
    """Return True if a tensor of any float dtype is finite."""
    if kv.numel() == 0:
        return True
    if is_quantised(kv.dtype):
        return not bool(special(kv).any())
    low, high = torch.aminmax(kv)  # NaN propagates; this takes a tenth of the time of torch.isfinite
    return bool(torch.isfinite(low) & torch.isfinite(high))


def scales_of(spec: KVSpec) -> torch.Tensor:
    """Return the scales of the spec's only class, float32 [layer, K/V, head, 1, dim]; read-only."""
    return _scales(spec.only)


@lru_cache(maxsize=64)
def _scales(only: LayerClass) -> torch.Tensor:
    if only.scales is None:
        raise FormatError(f"a cache in {only.dtype} has no scales")
    layers, vectors = len(only.layers), only.vectors
    axes = {1: (1, 1, 1), layers * vectors: (layers, vectors, 1)}.get(len(only.scales), (layers, vectors, only.heads))
    each = torch.tensor(only.scales, dtype=torch.float32).reshape(axes).expand(layers, vectors, only.heads)
    dims = [dim for dim in only.split if dim]
    if only.halves == 2:
        return each[..., None, None].expand(-1, -1, -1, 1, dims[0]).contiguous()
    wide = [each[:, number, :, None].expand(-1, -1, dim) for number, dim in enumerate(dims)]
    return torch.cat(wide, dim=2)[:, None, :, None]


def numbers_of(kv: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Convert codes [layer, K/V, head, token, dim] to numbers, float32."""
    return kv.float().mul_(scales_of(spec).to(kv.device))


def codes_of(kv: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Convert a tensor [layer, K/V, head, token, dim] of another float dtype to the nearest codes."""
    own = spec.torch_dtype
    top = torch.finfo(own).max
    return (kv.float() / scales_of(spec).to(kv.device)).clamp_(-top, top).to(own)


def as_type(kv: torch.Tensor, dtype: torch.dtype, spec: KVSpec) -> torch.Tensor:
    """Convert codes or numbers [layer, K/V, head, token, dim] to another type; see `check_wanted`."""
    return _translated(kv, dtype, spec).to(dtype)


def convert(kv: torch.Tensor, out: torch.Tensor, spec: KVSpec) -> None:
    """Copy a tensor [layer, K/V, head, token, dim] into another; each may hold codes or numbers."""
    out.copy_(_translated(kv, out.dtype, spec))


def _translated(kv: torch.Tensor, dtype: torch.dtype, spec: KVSpec) -> torch.Tensor:
    if is_quantised(dtype) == is_quantised(kv.dtype):
        return kv
    return codes_of(kv, spec) if is_quantised(dtype) else numbers_of(kv, spec)
