"""Native decoding of token-separable payloads: each number is checked, converted and written in one pass.

For other devices and element types, and without the extension, torch does the same three to eight times slower, with
identical bits. Caches of any layer class are supported, [layer, K/V, head, token, dim]
(`kvabr.types.kv.LayerClass.halves`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

_kvplace: Any
try:
    from kvabr.codec.native import _kvplace  # type: ignore[attr-defined,no-redef]
except ImportError:
    _kvplace = None

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_E4M3 = 3
_FORMS = {"Int8": 0, "Int4": 1, "FP4": 2}
_VARIABLE = "KVABR_CODER"
"""Environment variable, see `kvabr.codec.native.coder`; ``portable`` avoids AVX2."""


def places(out: torch.Tensor) -> bool:
    """Return True if the functions below can write to ``out``; any strides are allowed."""
    there = out.device.type == "cpu" and out.layout == torch.strided
    return _kvplace is not None and there and out.dtype in _KINDS


def cast(units: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> bool:
    """Copy 16-bit floats into ``out``; saturate instead of overflowing.

    Args:
        units: [token, byte] uint8, contiguous: the numbers of each token, [layer, K/V, head, dim].
        dtype: their type, float16 or bfloat16.
        out: [layer, K/V, head, token, dim], see `places`.

    Returns:
        True if all numbers are finite; if False, ``out`` may be partly written.
    """
    return _cast(units, _KINDS[dtype], None, out)


def cast_scaled(units: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> bool:
    """Copy E4M3 numbers times finite scales, one scale per number of a token; otherwise like `cast`."""
    # Read as half precision, E4M3 bits give 1/256 of their value.
    return _cast(units, _E4M3, (scale.float() * 256).contiguous(), out)


def _cast(units: torch.Tensor, kind: int, scale: torch.Tensor | None, out: torch.Tensor) -> bool:
    source = units.contiguous()
    scales = (0, 0) if scale is None else (scale.data_ptr(), 4 * scale.numel())
    good: bool = _kvplace.cast(_fast(), _cache(out), source.data_ptr(), source.numel(), kind, *scales)
    return good


def dequantise(
    units: torch.Tensor,
    form: str,
    tokens: int,
    keys: int,
    out: torch.Tensor,
    *,
    head: torch.Tensor | None = None,
    blocks: int = 0,
) -> bool:
    """Dequantise a run of units of `kvabr.codec.affine` or `kvabr.codec.fp4` into ``out``.

    Args:
        units: [unit, byte] uint8, contiguous.
        form: ``Int8``, ``Int4`` or ``FP4``.
        tokens: tokens per unit.
        keys: dims of a key, see `kvabr.types.kv.LayerClass.split`.
        out: [layer, K/V, head, token, dim], see `places`.
        head: for Int8 and Int4: offsets, then scales, of the keys, each [layer, head, dim], finite.
        blocks: for Int8 and Int4: number of blocks of heads; a block shares a value scale.

    Returns:
        True if all offsets and scales of the values are finite; if False, ``out`` may be partly written.
    """
    source, numbers = units.contiguous(), None if head is None else head.float().contiguous()
    good: bool = _kvplace.dequantise(
        _fast(),
        _cache(out),
        source.data_ptr(),
        source.numel(),
        (_FORMS[form], tokens, keys, blocks),
        *((0, 0) if numbers is None else (numbers.data_ptr(), 4 * numbers.numel())),
    )
    return good


def _fast() -> bool:
    return os.environ.get(_VARIABLE) != "portable"


def _cache(out: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return out.data_ptr(), _KINDS[out.dtype], tuple(out.shape), out.stride()
