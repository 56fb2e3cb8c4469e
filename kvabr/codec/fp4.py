"""FP4: E2M1 in blocks of 32 with one 8-bit scale each, 4.25 bits an element.

A block of keys is 32 tokens of one channel, a block of values 32 channels of one token, for the reason that the
integers of `kvabr.codec.affine` have. NVFP4's blocks of 16 would cost 12.5 %, MXFP4's power-of-two scales lose too
much; so the scale is a float of 5 exponent and 3 fraction bits without sign (as NVFP4's, but with a range that needs no
second scale). Each block takes the best of nine scales, from its largest element on 6 down to it on 3: that leaves a
sixth less error than a choice between 6 and 4, and 13 % less KL on SmolLM2. Scales that clip the largest element leave
less error still, but more KL.

    unit: scales of the keys, [layer, head, dim]; of the values, [layer, block]; codes, [layer, token, head, dim]

The unit's tokens are a block's. A byte holds the codes of a key (its low half) and of the value in the same place.
Where 32 does not divide a token's channels, blocks of values run on into the unit's next token, and the last is short.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import pad

from kvabr.codec.builtin import BLOCK
from kvabr.codec.payload import Separable, place

_EXPONENT = 0x7F800000
_ONE = 0x3F800000
"""Exponent bits of float32, and those of 1.0."""
_PLACES = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)
"""Which of the levels 0, 0.5, 1, 1.5, 2, 3, 4 and 6 a number is, by twice its value."""
_SCALES = 9
_EXPONENT_OFFSET = (127 - 18) << 3
"""The scale's smallest exponent is 2^-18: with 5 bits, elements from 2^-18 to beyond the largest FP16 are in range."""


class Fp4(Separable):
    """E2M1 with block scales."""

    name: ClassVar[str] = "FP4"

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int) -> torch.Tensor:  # noqa: ARG002
        """Quantise keys in blocks of tokens, values in blocks of channels."""
        layers, _, heads, tokens, dim = run.shape
        units, channels = tokens // unit_tokens, heads * dim
        # Axes: K/V, unit, layer, token, channel.
        values = run.float().view(layers, 2, heads, units, unit_tokens, dim).permute(1, 3, 0, 4, 2, 5).flatten(4)
        key_scales, keys = _encode(values[0].transpose(2, 3).reshape(-1, unit_tokens))
        rest_scales, rest = _encode(values[1].reshape(units * layers, -1))
        keys = keys.reshape(units, layers, channels, unit_tokens).transpose(2, 3)
        coded = keys.reshape(units, -1) | rest.reshape(units, -1) << 4
        return torch.cat((key_scales.reshape(units, -1), rest_scales.reshape(units, -1), coded), dim=1)

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> None:  # noqa: ARG002
        """Look up and scale back."""
        layers, _, heads, count, tokens, dim = out.shape
        channels = heads * dim
        blocks = -(-tokens * channels // BLOCK)
        sizes = [layers * channels, layers * blocks, layers * tokens * channels]
        key_scales, rest_scales, coded = units.split_with_sizes(sizes, dim=1)
        wide = coded.short()
        keys = _to_half(wide << 12, wide << 9).float().reshape(count, layers, tokens, channels)
        keys.mul_(_scale(key_scales).reshape(count, layers, 1, channels))
        place(out[:, 0], keys.reshape(count, layers, tokens, heads, dim).permute(1, 3, 0, 2, 4))
        rest = _to_half(wide << 8, wide << 5).float().reshape(count, layers, -1)
        scale = _scale(rest_scales).reshape(count, layers, blocks, 1)
        if rest.shape[2] % BLOCK:
            rest.mul_(scale.expand(-1, -1, -1, BLOCK).flatten(2)[:, :, : rest.shape[2]])
        else:
            rest.reshape(count, layers, blocks, BLOCK).mul_(scale)
        place(out[:, 1], rest.reshape(count, layers, tokens, heads, dim).permute(1, 3, 0, 2, 4))


def _encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of [row, element], each cut into blocks of which the last may be short: scales and codes, [row, ...]."""
    count, length = rows.shape
    cut = pad(rows, (0, -length % BLOCK)).reshape(count, -1, BLOCK)
    magnitude = cut.abs()
    smallest = _store(magnitude.amax(dim=2, keepdim=True) / 6.0)
    best, error = smallest, _error(magnitude, smallest)
    for wider in range(1, _SCALES):
        stored = (smallest + wider).clamp(max=255)
        found = _error(magnitude, stored)
        best = torch.where(found < error, stored, best)
        error = torch.minimum(found, error)
    # Twice a level is a whole number up to 12, which leads to its place among the levels.
    codes = _PLACES.to(rows.device)[(_nearest(magnitude / _load(best)) * 2).to(torch.uint8).int()]
    codes |= (cut < 0).to(torch.uint8) << 3
    return best.to(torch.uint8), codes.reshape(count, -1)[:, :length]


def _scale(stored: torch.Tensor) -> torch.Tensor:
    """Scales for what `_to_half` makes: it is 2^14 times too small, and 2^14 more of the scale make up for that."""
    return _load(stored) * 2.0**14


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


def _to_half(sign: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """E2M1 codes as float16, 2^14 times too small, of codes that were shifted to where float16 has these fields.

    Both formats have subnormals, so this is exact.

    Args:
        sign: int16, the sign in the highest bit; changed.
        rest: int16, exponent and fraction in the bits 9 to 11; changed.
    """
    return sign.bitwise_and_(-0x8000).bitwise_or_(rest.bitwise_and_(0x0E00)).view(torch.float16)


def _store(scale: torch.Tensor) -> torch.Tensor:
    """A positive float to its 8 bits: the float32's own exponent and first three fraction bits, rounded."""
    rounded = (scale.contiguous().view(torch.int32) + (1 << 19)) >> 20
    return (rounded - _EXPONENT_OFFSET).clamp(0, 255)


def _load(stored: torch.Tensor) -> torch.Tensor:
    return ((stored.int() + _EXPONENT_OFFSET) << 20).view(torch.float32)
