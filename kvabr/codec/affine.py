"""Int8 and Int4: asymmetric integers, keys per channel over the group's tokens, values per token (KIVI).

Keys have channels far larger than the rest at every token, so each channel has its own scale; values have none, but
tokens differ. A scale serves the tokens of a group (keys), or at least 128 channels of one token where the cache has so
many (values, several heads together; neighbouring tokens where one token has fewer): two half-precision numbers then
cost a quarter of a bit an element at most.

    head: offsets, then scales, of the keys as FP16, each [layer, head, dim]
    unit: offsets, then scales, of the values as FP16, each [layer, block of heads]
          codes, [layer, K/V, token, head, dim]

The unit's tokens are those that share the scales of the values. With 4 bits, a byte holds the codes of a key (its low
half) and of the value in the same place.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kvabr.codec.builtin import head_blocks
from kvabr.codec.payload import Separable, finite, place


class Affine(Separable):
    """Integers with a scale and an offset."""

    bits: ClassVar[int]

    def head(self, group: torch.Tensor) -> torch.Tensor:
        """The keys' range over the tokens."""
        return self._range(group[:, 0].amin(dim=2).float(), group[:, 0].amax(dim=2).float())

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int) -> torch.Tensor:
        """Quantise keys along tokens, values along channels."""
        layers, _, heads, tokens, dim = run.shape
        blocks = head_blocks(heads, dim)
        units = tokens // unit_tokens
        # Axes: K/V, unit, layer, token, head, dim.
        values = run.float().view(layers, 2, heads, units, unit_tokens, dim).permute(1, 3, 0, 4, 2, 5)
        low, scale = head.float()[:, :, None]
        keys = self._quantise(values[0], low, scale)
        rows = values[1].reshape(units, layers, blocks, -1)
        shared = self._range(rows.amin(dim=3), rows.amax(dim=3))
        low, scale = shared.float()[..., None]
        rest = self._quantise(rows, low, scale).reshape(keys.shape)
        coded = torch.stack((keys, rest), dim=2) if self.bits == 8 else keys | rest << 4
        scales = shared.transpose(0, 1).contiguous().view(torch.uint8)
        return torch.cat((scales.reshape(units, -1), coded.reshape(units, -1)), dim=1)

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> None:
        """Scale back."""
        layers, _, heads, count, tokens, dim = out.shape
        blocks = head_blocks(heads, dim)
        own = 4 * layers * blocks
        shared = finite(units[:, :own].flatten().view(torch.float16), self.name).float()
        keys, rest = self._codes(units[:, own:].view(count, layers, -1))
        low, scale = head.float().reshape(2, layers, 1, -1)
        keys = keys.reshape(count, layers, tokens, -1).float().mul_(scale).add_(low)
        place(out[:, 0], keys.reshape(count, layers, tokens, heads, dim).permute(1, 3, 0, 2, 4))
        low, scale = shared.reshape(count, 2, layers, blocks, 1).unbind(1)
        rest = rest.reshape(count, layers, blocks, -1).float().mul_(scale).add_(low)
        place(out[:, 1], rest.reshape(count, layers, tokens, heads, dim).permute(1, 3, 0, 2, 4))

    def _range(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Offset and scale for numbers between two bounds, [offset/scale, ...] float16."""
        low = low.clamp(-65504, 65504).half()
        span = high - low.float()
        return torch.stack((low, (span / (2**self.bits - 1)).clamp(2.0**-24, 65504).half()))

    def _quantise(self, values: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((values - low) / scale).round_().clamp_(0, 2**self.bits - 1).to(torch.uint8)

    def _codes(self, coded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of keys and of values, from [unit, layer, byte]."""
        if self.bits == 8:
            keys, rest = coded.chunk(2, dim=2)
            return keys, rest
        return coded & 15, coded >> 4


class Int8(Affine):
    """8 bits."""

    name: ClassVar[str] = "Int8"
    bits: ClassVar[int] = 8


class Int4(Affine):
    """4 bits."""

    name: ClassVar[str] = "Int4"
    bits: ClassVar[int] = 4
