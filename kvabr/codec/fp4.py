"""FP4: E2M1 in blocks of 32 with one 8-bit scale each, 4.25 bits an element.

A block of keys is 32 tokens of one channel, a block of values 32 channels of one token, for the reason that the
integers of `kvabr.codec.affine` have. NVFP4's blocks of 16 would cost 12.5 %, MXFP4's power-of-two scales lose too
much; so the scale is a float of 5 exponent and 3 fraction bits without sign (as NVFP4's, but with a range that needs no
second scale). Each block takes the best of nine scales, from its largest element on 6 down to it on 3: that leaves a
sixth less error than a choice between 6 and 4, and 13 % less KL on SmolLM2. Scales that clip the largest element leave
less error still, but more KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.bits import Reader, pack_nibbles, place, raw, unpack_nibbles

_BLOCK = 32
_EXPONENT = 0x7F800000
_ONE = 0x3F800000
"""Exponent bits of float32, and those of 1.0."""
_PLACES = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)
"""Which of the levels 0, 0.5, 1, 1.5, 2, 3, 4 and 6 a number is, by twice its value."""
_SCALES = 9
_EXPONENT_OFFSET = (127 - 18) << 3
"""The scale's smallest exponent is 2^-18: with 5 bits, elements from 2^-18 to beyond the largest FP16 are in range."""


class Fp4(Codec):
    """E2M1 with block scales."""

    name: ClassVar[str] = "FP4"

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """Quantise keys in blocks of tokens, values in blocks of channels."""
        values = group.float()
        spec = context.spec
        keys = values[:, 0].transpose(2, 3).reshape(-1, context.tokens)
        # All tokens of a layer in one row: where 32 does not divide a token's channels, blocks run on into the next.
        rest = values[:, 1].transpose(1, 2).reshape(spec.layers, -1)
        return _encode(keys) + _encode(rest)

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        """Look up and scale back."""
        spec, tokens = context.spec, context.tokens
        layers, heads, dim = spec.layers, spec.kv_heads, spec.head_dim
        reader = Reader(payload, self.name)
        keys = _decode(reader, layers * heads * dim, tokens)
        rest = _decode(reader, layers, tokens * heads * dim)
        reader.end()
        place(out[:, 0], keys.reshape(layers, heads, dim, tokens).transpose(2, 3))
        place(out[:, 1], rest.reshape(layers, tokens, heads, dim).transpose(1, 2))


def _encode(rows: torch.Tensor) -> bytes:
    """Rows of [row, element], each cut into blocks of which the last may be short."""
    count, length = rows.shape
    blocks = -(-length // _BLOCK)
    padded = torch.zeros(count, blocks * _BLOCK)
    padded[:, :length] = rows
    cut = padded.reshape(count, blocks, _BLOCK)
    magnitude = cut.abs()
    smallest = _store(magnitude.amax(dim=2, keepdim=True) / 6.0)
    best, error = smallest, _error(magnitude, smallest)
    for wider in range(1, _SCALES):
        stored = (smallest + wider).clamp(max=255)
        found = _error(magnitude, stored)
        best = torch.where(found < error, stored, best)
        error = torch.minimum(found, error)
    # Twice a level is a whole number up to 12, which leads to its place among the levels.
    codes = _PLACES[(_nearest(magnitude / _load(best)) * 2).to(torch.uint8).int()] | ((cut < 0).to(torch.uint8) << 3)
    return raw(best.to(torch.uint8)) + raw(pack_nibbles(codes.reshape(count, -1)[:, :length]))


def _decode(reader: Reader, count: int, length: int) -> torch.Tensor:
    blocks = -(-length // _BLOCK)
    # The codes' numbers come 2^14 times too small; 2^14 more of the scale make up for that, exactly.
    scale = _load(reader.tensor(torch.uint8, (count, blocks, 1)).int()) * 2.0**14
    codes = unpack_nibbles(reader.tensor(torch.uint8, ((count * length + 1) // 2,)), count * length)
    values = _to_half(codes).float().reshape(count, length)
    if length % _BLOCK:
        return values * scale.expand(count, blocks, _BLOCK).reshape(count, -1)[:, :length]
    return (values.reshape(count, blocks, _BLOCK) * scale).reshape(count, length)


def _error(magnitude: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Sum of the squared errors of each block under a scale."""
    scale = _load(stored)
    return (_nearest(magnitude / scale).mul_(scale) - magnitude).square_().sum(dim=2, keepdim=True)


def _nearest(magnitude: torch.Tensor) -> torch.Tensor:
    """The nearest level: they are half apart below 2, 1 apart below 4, and 2 apart above."""
    # The power of two at or below the magnitude, from its exponent bits; half of that, within bounds, is the spacing.
    power = (magnitude.view(torch.int32) & _EXPONENT).clamp_(_ONE, _ONE + (2 << 23))
    spacing = (power - (1 << 23)).view(torch.float32)
    return (magnitude / spacing).round_().mul_(spacing).clamp_(max=6.0)


def _to_half(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes as float16, 2^14 times too small: the fields moved to where float16 has them, subnormals included."""
    wide = codes.short()
    return (((wide << 12) & -0x8000) | ((wide << 9) & 0x0E00)).view(torch.float16)


def _store(scale: torch.Tensor) -> torch.Tensor:
    """A positive float to its 8 bits: the float32's own exponent and first three fraction bits, rounded."""
    rounded = (scale.contiguous().view(torch.int32) + (1 << 19)) >> 20
    return (rounded - _EXPONENT_OFFSET).clamp(0, 255)


def _load(stored: torch.Tensor) -> torch.Tensor:
    return ((stored.int() + _EXPONENT_OFFSET) << 20).view(torch.float32)
