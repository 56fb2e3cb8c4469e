"""FP16 and BF16: the cache as it is, in 16 bits an element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.bits import Reader, finite, place, raw


class Cast(Codec):
    """Elements cast to a 16-bit float. What is out of its range becomes its largest number."""

    dtype: ClassVar[torch.dtype]

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """Cast and copy."""
        top = torch.finfo(self.dtype).max
        return raw(group.float().clamp(-top, top).to(self.dtype))

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        """Copy and cast."""
        reader = Reader(payload, self.name)
        values = reader.tensor(self.dtype, context.spec.shape(context.tokens))
        reader.end()
        place(out, finite(values, self.name))


class Fp16(Cast):
    """IEEE half precision."""

    name: ClassVar[str] = "FP16"
    dtype: ClassVar[torch.dtype] = torch.float16


class Bf16(Cast):
    """bfloat16."""

    name: ClassVar[str] = "BF16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
