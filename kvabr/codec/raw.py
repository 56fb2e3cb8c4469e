"""Raw: exact elements in the element type of their layer class, without a head.

    unit: one token, or one row of a state, [layer, K/V, head, dim]

For 16-bit classes, FP16 and BF16 do the same. Raw is for other types: states are mostly float32, and some engines'
caches are FP8 (`kvabr.codec.quantised`). FP8 codes are copied into tensors of that type; for other tensors they are
converted to numbers. Packed data is unchanged.
"""

from __future__ import annotations

import torch

from kvabr.codec.floats import place_numbers
from kvabr.codec.native import placing
from kvabr.codec.payload import Separable, not_finite, place
from kvabr.codec.quantised import any_special, codes_of, is_quantised, scales_of
from kvabr.types.kv import KVSpec


class Raw(Separable):
    """Elements in their own type."""

    name = "Raw"
    takes_codes = True

    def largest(self, spec: KVSpec) -> float:
        """Return the largest number of the class's type; conversion saturates, as in the engine."""
        own = spec.torch_dtype
        return float(torch.finfo(torch.float32 if is_quantised(own) else own).max)

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int, spec: KVSpec) -> torch.Tensor:  # noqa: ARG002
        own = spec.torch_dtype
        if run.dtype != own and is_quantised(own):
            run = codes_of(run, spec)
        elif run.dtype != own:
            top = torch.finfo(own).max
            run = run.float().clamp(-top, top).to(own)
        return run.permute(3, 0, 1, 2, 4)

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor, spec: KVSpec) -> None:  # noqa: ARG002
        own = spec.torch_dtype
        if not is_quantised(own):
            place_numbers(units, own, out, self.name)
            return
        flat = out[:, :, :, :, 0]  # a unit is one token
        if own == torch.float8_e4m3fn and placing.places(flat):
            if not placing.cast_scaled(units, scales_of(spec), flat):
                raise not_finite(self.name)
            return
        codes = units.view(own)
        if any_special(codes):
            raise not_finite(self.name)
        codes = _codes(codes, flat)
        if out.dtype == own:
            _copy(codes, flat)
        else:
            place(flat, codes.float().mul_(scales_of(spec).to(out.device)))


def _codes(units: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    layers, both, heads, tokens, dim = flat.shape
    return units.reshape(tokens, layers, both, heads, dim).permute(1, 2, 3, 0, 4)


def _copy(codes: torch.Tensor, out: torch.Tensor) -> None:
    steps = ((each.shape[-1], each.storage_offset(), *each.stride()[:-1]) for each in (codes, out))
    if codes.stride(-1) == out.stride(-1) == 1 and not any(step % 8 for every in steps for step in every):
        codes, out = codes.view(torch.int64), out.view(torch.int64)
    out.copy_(codes)
