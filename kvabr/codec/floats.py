"""FP16, BF16 and FP8: each element as a float of 16 or 8 bits.

FP16 and BF16 store the cache unchanged, without a head:

    unit: one token, [layer, K/V, head, dim]

FP8 is E4M3, which has the same relative precision at every magnitude. One scale per layer, K/V, head and channel avoids
overflow (448) and subnormals. As all tokens of a group share this half-precision scale, it adds only 1.6 %.

    head: scales as FP16, [layer, K/V, head, dim]
    unit: one token, [layer, K/V, head, dim]
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kvabr.codec.native import placing
from kvabr.codec.payload import Separable, finite, half_scale, not_finite, place
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX, KVSpec


class Cast(Separable):
    """Elements cast to a 16-bit float."""

    dtype: ClassVar[torch.dtype]

    def largest(self, spec: KVSpec) -> float:  # noqa: ARG002
        return float(torch.finfo(self.dtype).max)

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int, spec: KVSpec) -> torch.Tensor:  # noqa: ARG002
        if run.dtype != self.dtype:
            top = torch.finfo(self.dtype).max
            run = run.float().clamp(-top, top).to(self.dtype)
        return run.permute(3, 0, 1, 2, 4)

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor, spec: KVSpec) -> None:  # noqa: ARG002
        place_numbers(units, self.dtype, out, self.name)


def place_numbers(units: torch.Tensor, dtype: torch.dtype, out: torch.Tensor, what: str) -> None:
    """Copy units of one token, [unit, byte], of 16- or 32-bit floats into ``out``; check that all are finite.

    ``out`` is [layer, K/V, head, unit, 1, dim]; ``what`` is the level's name for error messages.
    """
    flat = out[:, :, :, :, 0]
    if dtype.itemsize == 2 and placing.places(flat):
        if not placing.cast(units, dtype, flat):
            raise not_finite(what)
        return
    layers, both, heads, tokens, dim = flat.shape
    values = finite(units.view(dtype), what).reshape(tokens, layers, both, heads, dim)
    place(flat, values.permute(1, 2, 3, 0, 4))


class Fp16(Cast):
    """IEEE half precision."""

    name = "FP16"
    has_kernel: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float16


class Bf16(Cast):
    """bfloat16."""

    name = "BF16"
    has_kernel: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.bfloat16


_TOP = 448.0
_NAN = 0x7F
"""Code of NaN without its sign bit; E4M3 has no infinity."""


class Fp8(Separable):
    """E4M3 with one scale per channel."""

    name = "FP8"
    has_kernel: ClassVar[bool] = True

    def head(self, group: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        return half_scale((group.abs().amax(dim=3).float() / _TOP).clamp(2.0**-24, FP16_MAX), spec)

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int, spec: KVSpec) -> torch.Tensor:  # noqa: ARG002
        # If half precision rounded a scale down, the quotient can exceed the maximum.
        scaled = (run.float().permute(3, 0, 1, 2, 4) / head.float()).clamp_(-_TOP, _TOP)
        return scaled.to(torch.float8_e4m3fn)

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor, spec: KVSpec) -> None:  # noqa: ARG002
        if placing.places(out):
            if not placing.cast_scaled(units, head, out[:, :, :, :, 0]):
                raise _not_a_number(self.name)
            return
        if int((units & _NAN).amax()) == _NAN:
            raise _not_a_number(self.name)
        values = _to_half(units).float().mul_(head.float() * 256)
        layers, both, heads, tokens, _, dim = out.shape
        place(out[:, :, :, :, 0], values.reshape(tokens, layers, both, heads, dim).permute(1, 2, 3, 0, 4))


def _not_a_number(what: str) -> FormatError:
    return FormatError(f"{what}: an element is not a number; the payload is corrupt")


def _to_half(coded: torch.Tensor) -> torch.Tensor:
    """Convert E4M3 codes to float16 numbers 1/256 as large, by moving the bit fields.

    The exponent biases differ by 8, and both formats have subnormals, so this is exact.
    """
    wide = coded.view(torch.int8).short()
    sign = wide & -0x8000
    return wide.bitwise_left_shift_(7).bitwise_and_(0x3FFF).bitwise_or_(sign).view(torch.float16)
