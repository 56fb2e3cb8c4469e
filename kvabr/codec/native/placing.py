"""Token-separable payloads into a cache by native code: each number is checked, converted and placed in one pass.

Torch does the same in several passes over memory, three to eight times slower, and to the bit. It takes over where the
extension is not built, for other devices and element types, and if KVABR_CODER is ``reference``.
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
_VARIABLE = "KVABR_CODER"
"""As for `kvabr.codec.native.coder`; with ``portable`` without AVX2."""


def places(out: torch.Tensor) -> bool:
    """Return whether the functions below can write to ``out``, of any strides; otherwise torch has to.

    They know caches whose keys and values are alike, [layer, K/V, head, token, dim].
    """
    return (
        _kvplace is not None
        and out.device.type == "cpu"
        and out.layout == torch.strided
        and out.dtype in _KINDS
        and os.environ.get(_VARIABLE) != "reference"
    )


def cast(units: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> bool:
    """Place 16-bit floats; saturate instead of overflowing.

    Args:
        units: [token, byte] uint8, contiguous: the numbers of each token, [layer, K/V, head, dim].
        dtype: their type, float16 or bfloat16.
        out: [layer, K/V, head, token, dim], see `places`.

    Returns:
        Whether all numbers are finite; if not, some of ``out`` may have been written.
    """
    source = units.contiguous()
    good: bool = _kvplace.cast(_fast(), _cache(out), source.data_ptr(), source.numel(), _KINDS[dtype])
    return good


def affine(units: torch.Tensor, head: torch.Tensor, bits: int, tokens: int, blocks: int, out: torch.Tensor) -> bool:
    """Dequantise and place a run of units of `kvabr.codec.affine`.

    Args:
        units: [unit, byte] uint8, contiguous.
        head: offsets, then scales, of the keys, each [layer, head, dim]; finite.
        bits: 4 or 8.
        tokens: tokens of each unit.
        blocks: blocks of heads whose values share a scale.
        out: [layer, K/V, head, token, dim], see `places`.

    Returns:
        Whether all offsets and scales of the values are finite; if not, some of ``out`` may have been written.
    """
    source, keys = units.contiguous(), head.float().contiguous()
    good: bool = _kvplace.affine(
        _fast(),
        _cache(out),
        source.data_ptr(),
        source.numel(),
        (bits, tokens, blocks),
        keys.data_ptr(),
        4 * keys.numel(),
    )
    return good


def _fast() -> bool:
    return os.environ.get(_VARIABLE) != "portable"


def _cache(out: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    layers, _, heads, tokens, dim = out.shape
    return out.data_ptr(), _KINDS[out.dtype], (layers, heads, tokens, dim), out.stride()
