"""FP16 and BF16: the cache as it is, in 16 bits an element.

    unit: one token, [layer, K/V, head, dim]

There is no head: nothing is shared.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kvabr.codec.bits import finite, place
from kvabr.codec.payload_layout import Layout, cast
from kvabr.codec.separable import Separable
from kvabr.types.kv import KVSpec


class Cast(Separable):
    """Elements cast to a 16-bit float. What is out of its range becomes its largest number."""

    dtype: ClassVar[torch.dtype]

    def layout(self, spec: KVSpec, tokens: int) -> Layout:
        """A token a unit."""
        return cast(spec, tokens)

    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int) -> torch.Tensor:  # noqa: ARG002
        """Cast, token by token."""
        if run.dtype != self.dtype:
            top = torch.finfo(self.dtype).max
            run = run.float().clamp(-top, top).to(self.dtype)
        return run.permute(3, 0, 1, 2, 4)

    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> None:  # noqa: ARG002
        """Cast back."""
        layers, both, heads, tokens, _, dim = out.shape
        values = finite(units.view(self.dtype), self.name).reshape(tokens, layers, both, heads, dim)
        place(out[:, :, :, :, 0], values.permute(1, 2, 3, 0, 4))


class Fp16(Cast):
    """IEEE half precision."""

    name: ClassVar[str] = "FP16"
    dtype: ClassVar[torch.dtype] = torch.float16


class Bf16(Cast):
    """bfloat16."""

    name: ClassVar[str] = "BF16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
