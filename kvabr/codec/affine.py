"""Int8 and Int4: asymmetric integers, keys per channel over the group's tokens, values per token (KIVI).

Some key channels are far larger than the rest at every token, so each key channel has its own scale. Values have no
such channels, but tokens differ. A key scale serves all tokens of a group. A value scale serves at least 128 channels:
several heads of one token, or several neighbouring tokens if one token has fewer. Two half-precision numbers then cost
at most a quarter of a bit per element.

    head: offsets, then scales, of the keys as FP16, each [layer, head, dim]
    unit: offsets, then scales, of the values as FP16, each [layer, block of heads]
          codes, [layer, K/V, token, head, dim]

A unit holds the tokens that share value scales. With 4 bits, a byte holds the codes of a key (low half) and of the
value in the same place.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kvabr.codec.builtin import head_blocks
from kvabr.codec.native import placing
from kvabr.codec.payload import Separable, finite, not_finite, place
from kvabr.types.kv import FP16_MAX


class Affine(Separable):
    """Integers with a scale and an offset."""

    bits: ClassVar[int]

    def head(self, group: torch.Tensor) -> torch.Tensor:
        """Return the range of each key channel over the tokens."""
        return self._range(group[:, 0].amin(dim=2).float(), group[:, 0].amax(dim=2).float())

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int) -> torch.Tensor:
        """Quantise keys along tokens and values along channels."""
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
        """Dequantise."""
        layers, _, heads, count, tokens, dim = out.shape
        blocks = head_blocks(heads, dim)
        if placing.places(out):
            flat = out.view(layers, 2, heads, count * tokens, dim)
            if not placing.affine(units, head, self.bits, tokens, blocks, flat):
                raise not_finite(self.name)
            return
        own = 4 * layers * blocks
        shared = finite(units[:, :own].flatten().view(torch.float16), self.name).float()
        coded = units[:, own:].view(count, layers, -1)
        keys, rest = coded.chunk(2, dim=2) if self.bits == 8 else (coded & 15, coded >> 4)
        low, scale = head.float().reshape(2, layers, 1, -1)
        keys = keys.reshape(count, layers, tokens, -1).float().mul_(scale).add_(low)
        place(out[:, 0], keys.reshape(count, layers, tokens, heads, dim).permute(1, 3, 0, 2, 4))
        low, scale = shared.reshape(count, 2, layers, blocks, 1).unbind(1)
        rest = rest.reshape(count, layers, blocks, -1).float().mul_(scale).add_(low)
        place(out[:, 1], rest.reshape(count, layers, tokens, heads, dim).permute(1, 3, 0, 2, 4))

    def _range(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Return offset and scale for numbers between two bounds, [offset/scale, ...] float16."""
        low = low.clamp(-FP16_MAX, FP16_MAX).half()
        span = high - low.float()
        return torch.stack((low, (span / (2**self.bits - 1)).clamp(2.0**-24, FP16_MAX).half()))

    def _quantise(self, values: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((values - low) / scale).round_().clamp_(0, 2**self.bits - 1).to(torch.uint8)


class Int8(Affine):
    """8 bits."""

    name = "Int8"
    bits: ClassVar[int] = 8


class Int4(Affine):
    """4 bits."""

    name = "Int4"
    bits: ClassVar[int] = 4
