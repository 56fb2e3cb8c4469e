"""Int4 or Int8 of what values differ by from their channel's median: for groups whose tokens are nearly all equal.

These codecs give the values of a token one range, and round equal tokens to equal errors, which a model's averages over
many tokens keep. Once the medians are subtracted nearly nothing is left to round. Keys have a range for each channel
anyway.

    medians: FP16, [layer, head, dim] of the values | the codec's payload of the group with its values less these

They are no tracks: `kvabr.codec.unusual` says which groups of the AC tracks they code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvabr.codec.base import Codec, GroupContext, codec
from kvabr.codec.payload import PayloadReader, finite, keys_and_values, place, raw
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX

CENTRED = "-centred"
"""End of the names."""


class Centred(Codec):
    """See above. A class whose tokens have no values (`LayerClass.split`) gains nothing from it."""

    def __init__(self, plain: str) -> None:
        """Make it of the codec of a track."""
        self.name, self._plain = plain + CENTRED, codec(plain)

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """Write the medians, which are the same everywhere, then what differs from them."""
        numbers = group.float().clone()
        _, values = keys_and_values(numbers, context.spec)
        low, high = values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True)
        # Within this of both ends, so that differences are in FP16's range, too.
        medians = values.median(dim=2, keepdim=True).values.clamp(high - FP16_MAX, low + FP16_MAX).half()
        values -= medians.float()
        return raw(medians) + self._plain.encode(numbers, context)

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        """Decode what differs, and add the medians."""
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
