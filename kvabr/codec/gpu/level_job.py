"""Jobs for expanding a cast or integer level. Importing this needs no Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvabr.codec.builtin import BUILTIN, PayloadLayout
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

LEVELS = {"FP16": 0, "BF16": 1, "FP8": 2, "Int8": 3, "Int4": 4, "FP4": 5}


@dataclass(frozen=True, eq=False)
class LevelJob:
    """A payload of a cast or integer level, and its destination."""

    level: str
    payload: memoryview
    spec: KVSpec
    out: torch.Tensor
    """[layer, K/V, head, token, dim]."""
    decode: Callable[[torch.Tensor], None]
    """Decodes the payload on the processor to a tensor of the same shape; may raise `FormatError`."""

    @property
    def layout(self) -> PayloadLayout:
        """The payload's layout."""
        layout = BUILTIN[self.level].layout
        assert layout is not None  # noqa: S101  # those levels have one
        return layout(self.spec, self.out.shape[3])

    def check(self, wanted: int) -> None:
        """Raise `FormatError` unless the payload has `PayloadLayout.payload_bytes` bytes."""
        if len(self.payload) != wanted:
            raise FormatError(
                f"{self.level}: {len(self.payload)} bytes of payload, expected {wanted}; truncated, or of another "
                "version"
            )
