"""Int8 and Int4: asymmetric integers, keys per channel over the group's tokens, values per token (KIVI).

Keys have channels far larger than the rest at every token, so each channel has its own scale; values have none, but
tokens differ. A scale serves the tokens of a group (keys), or at least 128 channels of one token where the cache has so
many (values, several heads together; neighbouring tokens where one token has fewer): two half-precision numbers then
cost a quarter of a bit an element at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.bits import Reader, finite, pack_nibbles, place, raw, unpack_nibbles
from kvabr.kv import KVSpec

_SPAN = 128
"""Channels that share a scale of the values, at least."""


def head_blocks(spec: KVSpec) -> int:
    """Into how many blocks of whole heads the values of one token are cut: as many as have `_SPAN` channels each."""
    blocks = max(1, spec.kv_heads * spec.head_dim // _SPAN)
    while spec.kv_heads % blocks:
        blocks -= 1
    return blocks


def value_rows(spec: KVSpec, tokens: int) -> tuple[int, int, int]:
    """How the values of one layer are cut into rows with a scale each.

    Returns:
        Rows along the tokens, blocks of heads, and tokens in a row: 1, but in a cache whose tokens have fewer than
        `_SPAN` channels. There the last row may reach beyond the group's tokens.
    """
    together = -(-_SPAN // (spec.kv_heads * spec.head_dim))
    return -(-tokens // together), head_blocks(spec), together


class Affine(Codec):
    """Integers with a scale and an offset."""

    bits: ClassVar[int]

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """Quantise keys along tokens, values along channels."""
        values = group.float()
        keys = self._quantise(values[:, 0], dim=2)
        spec, tokens = context.spec, context.tokens
        rows, blocks, together = value_rows(spec, tokens)
        by_token = values[:, 1].permute(0, 2, 1, 3)
        if rows * together > tokens:
            # Copies of the last token fill the last row: they leave its range as it is.
            by_token = by_token[:, torch.arange(rows * together).clamp(max=tokens - 1)]
        return b"".join((*keys, *self._quantise(by_token.reshape(spec.layers, rows, blocks, -1), dim=3)))

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        """Scale back."""
        spec = context.spec
        rows, blocks, together = value_rows(spec, context.tokens)
        layers, heads, tokens, dim = spec.layers, spec.kv_heads, context.tokens, spec.head_dim
        reader = Reader(payload, self.name)
        place(out[:, 0], self._restore(reader, (layers, heads, tokens, dim), dim=2))
        by_token = self._restore(reader, (layers, rows, blocks, heads // blocks * dim * together), dim=3)
        reader.end()
        place(out[:, 1], by_token.reshape(layers, -1, heads, dim)[:, :tokens].permute(0, 2, 1, 3))

    def _quantise(self, values: torch.Tensor, dim: int) -> tuple[bytes, bytes, bytes]:
        top = 2**self.bits - 1
        low = values.amin(dim=dim, keepdim=True).clamp(-65504, 65504).half()
        span = values.amax(dim=dim, keepdim=True) - low.float()
        scale = (span / top).clamp(2.0**-24, 65504).half()
        coded = ((values - low.float()) / scale.float()).round_().clamp_(0, top).to(torch.uint8)
        return raw(low), raw(scale), raw(coded if self.bits == 8 else pack_nibbles(coded))

    def _restore(self, reader: Reader, shape: tuple[int, ...], dim: int) -> torch.Tensor:
        shared = tuple(1 if axis == dim else size for axis, size in enumerate(shape))
        low = finite(reader.tensor(torch.float16, shared), self.name).float()
        scale = finite(reader.tensor(torch.float16, shared), self.name).float()
        if self.bits == 8:
            coded = reader.tensor(torch.uint8, shape)
        else:
            count = torch.Size(shape).numel()
            coded = unpack_nibbles(reader.tensor(torch.uint8, ((count + 1) // 2,)), count).reshape(shape)
        return coded.float().mul_(scale).add_(low)


class Int8(Affine):
    """8 bits."""

    name: ClassVar[str] = "Int8"
    bits: ClassVar[int] = 8


class Int4(Affine):
    """4 bits."""

    name: ClassVar[str] = "Int4"
    bits: ClassVar[int] = 4
