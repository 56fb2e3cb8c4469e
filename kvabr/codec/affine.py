"""Int8 and Int4: asymmetric integers, keys per channel over the group's tokens, values per token (KIVI).

Some key channels are far larger than others at every token, so each channel has one scale for the whole group. Values
have no such channels, but their range differs between tokens. A value scale covers at least 128 channels: several heads
of one token, or several neighbouring tokens. Its two half-precision numbers then cost at most a quarter of a bit per
element.

    head: offsets, then scales, of the keys as FP16, each [layer, head, dim]
    unit: offsets, then scales, of the values as FP16, each [layer, block of heads] | codes, [layer, K/V, token, head,
        dim]

A unit holds the tokens that share value scales. With 4 bits, a byte holds the code of a key element in its low half and
the code of the value element at the same index in its high half (`kvabr.codec.payload.join_codes`). A single vector per
token is coded as a key, and a row of a state as a value.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kvabr.codec.builtin import head_blocks
from kvabr.codec.native import placing
from kvabr.codec.payload import (
    Separable,
    by_unit,
    finite,
    half_scale,
    join_codes,
    keys_and_values,
    not_finite,
    split_codes,
    to_layers,
)
from kvabr.types.kv import FP16_MAX, KVSpec


class Affine(Separable):
    """Integers with a scale and an offset."""

    bits: ClassVar[int]

    def head(self, group: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        keys, _ = keys_and_values(group, spec)
        return self._range(keys.amin(dim=2).float(), keys.amax(dim=2).float(), spec)

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int, spec: KVSpec) -> torch.Tensor:
        units = run.shape[3] // unit_tokens
        keys, values = (by_unit(part, units) for part in keys_and_values(run, spec))
        low, scale = head.float().flatten(2)[:, :, None]
        coded = self._quantise(keys, low, scale)
        if not values.shape[3]:
            return join_codes(coded, coded[..., :0], self.bits)
        rows = values.reshape(units, spec.layers, head_blocks(spec.kv_heads, spec.only.split[1]), -1)
        shared = self._range(rows.amin(dim=3), rows.amax(dim=3), spec)
        low, scale = shared.float()[..., None]
        scales = shared.transpose(0, 1).contiguous().view(torch.uint8)
        return torch.cat(
            (scales.reshape(units, -1), join_codes(coded, self._quantise(rows, low, scale), self.bits)), dim=1
        )

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor, spec: KVSpec) -> None:
        layers, _, heads, count, tokens, _ = out.shape
        dims = spec.only.split
        blocks = head_blocks(heads, dims[1])
        if placing.places(out):
            flat = out.view(*out.shape[:3], -1, out.shape[5])
            if not placing.dequantise(units, f"Int{self.bits}", tokens, dims[0], flat, head=head, blocks=blocks):
                raise not_finite(self.name)
            return
        own = 4 * layers * blocks
        sizes = tokens * heads * dims[0], tokens * heads * dims[1]
        keys, rest = split_codes(units[:, own:], layers, sizes, self.bits)
        key_places, value_places = keys_and_values(out, spec)
        if dims[0]:
            low, scale = head.float().reshape(2, layers, 1, -1)
            to_layers(keys.reshape(count, layers, tokens, -1).float().mul_(scale).add_(low), key_places)
        if blocks:
            shared = finite(units[:, :own].flatten().view(torch.float16), self.name).float()
            low, scale = shared.reshape(count, 2, layers, blocks, 1).unbind(1)
            to_layers(rest.reshape(count, layers, blocks, -1).float().mul_(scale).add_(low), value_places)

    def _range(self, low: torch.Tensor, high: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        low = low.clamp(-FP16_MAX, FP16_MAX).half()
        scale = ((high - low.float()) / (2**self.bits - 1)).clamp(2.0**-24, FP16_MAX)
        return torch.stack((low, half_scale(scale, spec)))

    def _quantise(self, values: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((values - low) / scale).round_().clamp_(0, 2**self.bits - 1).to(torch.uint8)


class Int8(Affine):
    """8 bits."""

    name = "Int8"
    has_kernel: ClassVar[bool] = True
    bits: ClassVar[int] = 8


class Int4(Affine):
    """4 bits."""

    name = "Int4"
    has_kernel: ClassVar[bool] = True
    bits: ClassVar[int] = 4
