"""Int4 or Int8 after subtracting each value channel's median, for groups of nearly equal tokens.

Int4 and Int8 make equal errors for equal tokens, which do not average out. Once the medians are subtracted, rounding
errors are negligible. Keys have a range per channel already.

    medians: FP16, [layer, head, dim] of the values | the codec's payload of the group less the medians

These codecs have no tracks. AC tracks use them for groups that `kvabr.codec.unusual` selects.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvabr.codec.base import Codec, GroupContext, codec
from kvabr.codec.payload import PayloadReader, finite, keys_and_values, place, raw
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX, KVSpec

CENTRED = "-centred"


_MIN_TOKENS = 16
"""Minimum tokens; with fewer, medians cost more than a bit per value."""


def centring_helps(group: torch.Tensor, spec: KVSpec) -> bool:
    """Return True if subtracting medians more than halves the range of values for most tokens.

    False for a class without values (`LayerClass.split`).
    """
    _, values = keys_and_values(group.float(), spec)
    if values.shape[2] < _MIN_TOKENS or not values.shape[3]:
        return False
    before, after = (part.amax(dim=3) - part.amin(dim=3) for part in (values, values - _medians(values).float()))
    return 2 * int((2 * after < before).sum()) > before.numel()


def _medians(values: torch.Tensor) -> torch.Tensor:
    """Return channel medians, [layer, head, 1, dim] float16, of values [layer, head, token, dim] float32."""
    low, high = values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True)
    # Keep differences within FP16's range; `+ 0.0` makes every zero positive.
    medians = values.median(dim=2, keepdim=True).values.clamp(high - FP16_MAX, low + FP16_MAX) + 0.0
    return medians.clamp(-FP16_MAX, FP16_MAX).half()


class Centred(Codec):
    """A codec that subtracts medians before another codec."""

    def __init__(self, plain: str) -> None:
        self.name, self._plain = plain + CENTRED, codec(plain)

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        numbers = group.to(torch.float32, copy=True)
        _, values = keys_and_values(numbers, context.spec)
        medians = _medians(values)
        values -= medians.float()
        return raw(medians) + self._plain.encode(numbers, context)

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        reader, spec = PayloadReader(payload, self.name), context.spec
        shape = spec.layers, spec.kv_heads, 1, spec.only.split[1]
        if not shape[3]:
            raise FormatError(f"{self.name}: {spec.only.title} has no values; the payload is corrupt")
        medians = finite(reader.tensor(torch.float16, shape), self.name).to(out.device).float()
        numbers = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._plain.decode(reader.rest(), context, numbers)
        _, values = keys_and_values(numbers, spec)
        values += medians
        place(out, numbers)
