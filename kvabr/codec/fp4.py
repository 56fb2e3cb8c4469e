"""FP4: E2M1 in blocks of 32 with one 8-bit scale each, 4.25 bits an element.

A block of keys is 32 tokens of one channel, a block of values 32 channels of one token, for the reason that the
integers of `kvabr.codec.affine` have. NVFP4's blocks of 16 would cost 12.5 %, MXFP4's power-of-two scales lose too
much; so the scale is a float of 5 exponent and 3 fraction bits without sign (as NVFP4's, but with a range that needs no
second scale), and each block takes the better of two scales: its largest element on 6, or on 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.bits import Reader, pack_nibbles, place, raw, unpack_nibbles

_BLOCK = 32
_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SIGNED = torch.cat((_LEVELS, -_LEVELS))
_MIDDLES = (_LEVELS[1:] + _LEVELS[:-1]) / 2
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
        rest = values[:, 1].transpose(1, 2).reshape(-1, spec.kv_heads * spec.head_dim)
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
        rest = _decode(reader, layers * tokens, heads * dim)
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
    largest = cut.abs().amax(dim=2, keepdim=True)
    best_codes, best_scale, best_error = None, None, None
    for top in (6.0, 4.0):
        stored = _store(largest / top)
        codes = _nearest(cut / _load(stored))
        error = ((_SIGNED[codes.long()] * _load(stored) - cut) ** 2).sum(dim=2, keepdim=True)
        if best_codes is None or best_scale is None or best_error is None:
            best_codes, best_scale, best_error = codes, stored, error
        else:
            better = error < best_error
            best_codes = torch.where(better, codes, best_codes)
            best_scale = torch.where(better, stored, best_scale)
    assert best_codes is not None  # noqa: S101
    assert best_scale is not None  # noqa: S101
    return raw(best_scale.to(torch.uint8)) + raw(pack_nibbles(best_codes.reshape(count, -1)[:, :length]))


def _decode(reader: Reader, count: int, length: int) -> torch.Tensor:
    blocks = -(-length // _BLOCK)
    scale = _load(reader.tensor(torch.uint8, (count, blocks, 1)).int())
    codes = unpack_nibbles(reader.tensor(torch.uint8, ((count * length + 1) // 2,)), count * length)
    values = _SIGNED[codes.int()].reshape(count, length)
    if length % _BLOCK:
        return values * scale.expand(count, blocks, _BLOCK).reshape(count, -1)[:, :length]
    return (values.reshape(count, blocks, _BLOCK) * scale).reshape(count, length)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """Code of the nearest level: magnitude in the low three bits, sign in the fourth."""
    magnitude = torch.bucketize(values.abs(), _MIDDLES).clamp_(max=7)
    return (magnitude | ((values < 0).long() << 3)).to(torch.uint8)


def _store(scale: torch.Tensor) -> torch.Tensor:
    """A positive float to its 8 bits: the float32's own exponent and first three fraction bits, rounded."""
    rounded = (scale.contiguous().view(torch.int32) + (1 << 19)) >> 20
    return (rounded - _EXPONENT_OFFSET).clamp(0, 255)


def _load(stored: torch.Tensor) -> torch.Tensor:
    return ((stored.int() + _EXPONENT_OFFSET) << 20).view(torch.float32)
