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
from kvabr.types.kv import FP16_MAX, KVSpec

CENTRED = "-centred"
"""End of the names."""


_LEAST_TOKENS = 16
"""Of fewer the medians would be more than a bit per value."""


def centring_helps(group: torch.Tensor, spec: KVSpec) -> bool:
    """Return whether most tokens' values have less than half their range without the medians of their channels.

    A class whose tokens have no values (`LayerClass.split`) gains nothing.
    """
    _, values = keys_and_values(group.float(), spec)
    if values.shape[2] < _LEAST_TOKENS or not values.shape[3]:
        return False
    before, after = (part.amax(dim=3) - part.amin(dim=3) for part in (values, values - _medians(values).float()))
    return 2 * int((2 * after < before).sum()) > before.numel()


def _medians(values: torch.Tensor) -> torch.Tensor:
    """Return the median of each channel, [layer, head, 1, dim] float16, of values [layer, head, token, dim] float32."""
    low, high = values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True)
    # Within FP16's range of both ends, so that differences are, too. Of the two zeros always the positive one.
    medians = values.median(dim=2, keepdim=True).values.clamp(high - FP16_MAX, low + FP16_MAX) + 0.0
    return medians.clamp(-FP16_MAX, FP16_MAX).half()


class Centred(Codec):
    """See above."""

    def __init__(self, plain: str) -> None:
        """Make it of the codec of a track."""
        self.name, self._plain = plain + CENTRED, codec(plain)

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """Write the medians, which are the same everywhere, then what differs from them."""
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
