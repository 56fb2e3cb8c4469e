"""FP4: E2M1 in blocks of 32 with one 8-bit scale each, 4.25 bits per element.

A block of keys is 32 tokens of one channel, a block of values 32 channels of one token, as in `kvabr.codec.affine`. The
scale is an unsigned float of 5 exponent and 3 fraction bits. Each block takes the best of nine scales, which map its
largest element to between 6 and 3: a sixth less error than with 6 or 4, and 13 % less KL on SmolLM2.

    unit: scales of the keys, [layer, head, dim]; of the values, [layer, block]; codes, [layer, token, head, dim]

A unit holds the tokens of a block. A byte holds the codes of a key (low half) and of the value in the same place; a
single vector per token is coded as a key (`kvabr.codec.payload.join_codes`). If 32 does not divide a token's channels,
blocks of values continue in the unit's next token, and the last one is short.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import pad

from kvabr.codec.builtin import BLOCK
from kvabr.codec.native import placing
from kvabr.codec.payload import Separable, by_unit, join_codes, keys_and_values, split_codes, to_layers
from kvabr.types.kv import KVSpec

_EXPONENT = 0x7F800000
_ONE = 0x3F800000
_PLACES = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)
"""Index of each level (0, 0.5, 1, 1.5, 2, 3, 4, 6), by twice the level."""
_SCALES = 9
_EXPONENT_OFFSET = (127 - 18) << 3
"""The smallest scale is 2^-18; 5 exponent bits reach beyond FP16's largest number."""


class Fp4(Separable):
    """E2M1 with block scales."""

    name = "FP4"
    has_kernel: ClassVar[bool] = True

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int, spec: KVSpec) -> torch.Tensor:  # noqa: ARG002
        units = run.shape[3] // unit_tokens
        keys, values = (by_unit(part, units) for part in keys_and_values(run, spec))
        key_scales, coded = _encode(keys.transpose(2, 3).reshape(-1, unit_tokens))
        coded = coded.reshape(units, spec.layers, -1, unit_tokens).transpose(2, 3)
        rest_scales, rest = _encode(values.reshape(units * spec.layers, -1))
        codes = join_codes(coded, rest.reshape(units, spec.layers, -1), 4)
        return torch.cat((key_scales.reshape(units, -1), rest_scales.reshape(units, -1), codes), dim=1)

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor, spec: KVSpec) -> None:  # noqa: ARG002
        layers, _, heads, count, tokens, _ = out.shape
        if placing.places(out):
            flat = out.view(*out.shape[:3], -1, out.shape[5])
            placing.dequantise(units, "FP4", tokens, spec.only.split[0], flat)
            return
        channels, others = (heads * dim for dim in spec.only.split)
        blocks = -(-tokens * others // BLOCK)
        own = layers * channels, layers * blocks
        key_scales, rest_scales, coded = units.split_with_sizes([*own, units.shape[1] - sum(own)], dim=1)
        key_codes, rest_codes = split_codes(coded, layers, (tokens * channels, tokens * others), 4)
        key_places, value_places = keys_and_values(out, spec)
        keys = _to_half(key_codes).float().reshape(count, layers, tokens, channels)
        to_layers(keys.mul_(_scale(key_scales).reshape(count, layers, 1, channels)), key_places)
        if not others:
            return
        rest = _to_half(rest_codes).float().reshape(count, layers, -1)
        scale = _scale(rest_scales).reshape(count, layers, blocks, 1)
        if rest.shape[2] % BLOCK:
            rest.mul_(scale.expand(-1, -1, -1, BLOCK).flatten(2)[:, :, : rest.shape[2]])
        else:
            rest.reshape(count, layers, blocks, BLOCK).mul_(scale)
        to_layers(rest, value_places)


def _encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count, length = rows.shape
    if not rows.numel():
        return rows.new_empty(0, dtype=torch.uint8), rows.new_empty((count, length), dtype=torch.uint8)
    cut = pad(rows, (0, -length % BLOCK)).reshape(count, -1, BLOCK).movedim(2, 0).contiguous()
    magnitude = cut.abs()
    smallest = _store(magnitude.amax(dim=0) / 6.0)
    best, error = smallest, _error(magnitude, smallest)
    for wider in range(1, _SCALES):
        stored = (smallest + wider).clamp(max=255)
        found = _error(magnitude, stored)
        best = torch.where(found < error, stored, best)
        error = torch.minimum(found, error)
    codes = _PLACES.to(rows.device)[(_nearest(magnitude / _load(best)) * 2).to(torch.uint8).int()]
    codes |= (cut < 0).to(torch.uint8) << 3
    return best.to(torch.uint8), codes.movedim(0, 2).reshape(count, -1)[:, :length]


def _scale(stored: torch.Tensor) -> torch.Tensor:
    return _load(stored) * 2.0**14


def _error(magnitude: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    scale = _load(stored)
    error = (_nearest(magnitude / scale).mul_(scale) - magnitude).square_()
    # In a fixed order: a library's sum depends on the processor, and the choice of a scale on the last bit.
    while len(error) > 1:
        half = len(error) // 2
        error = error[:half].add_(error[half:])
    return error[0]


def _nearest(magnitude: torch.Tensor) -> torch.Tensor:
    """Round to the nearest level: spacing 0.5 below 2, 1 below 4, and 2 above."""
    # Half of the power of two at or below the magnitude, clamped, is the spacing.
    power = (magnitude.view(torch.int32) & _EXPONENT).clamp_(_ONE, _ONE + (2 << 23))
    spacing = (power - (1 << 23)).view(torch.float32)
    return (magnitude / spacing).round_().mul_(spacing).clamp_(max=6.0)


def _to_half(codes: torch.Tensor) -> torch.Tensor:
    """Convert E2M1 codes, uint8, to float16 numbers 2^14 times too small. This is exact, as both have subnormals."""
    wide = codes.short()
    sign = (wide << 12).bitwise_and_(-0x8000)
    return wide.bitwise_left_shift_(9).bitwise_and_(0x0E00).bitwise_or_(sign).view(torch.float16)


def _store(scale: torch.Tensor) -> torch.Tensor:
    """Convert positive floats to 8 bits: float32's exponent and first three fraction bits, rounded."""
    rounded = (scale.contiguous().view(torch.int32) + (1 << 19)) >> 20
    return (rounded - _EXPONENT_OFFSET).clamp(0, 255)


def _load(stored: torch.Tensor) -> torch.Tensor:
    return ((stored.int() + _EXPONENT_OFFSET) << 20).view(torch.float32)
