"""Token-separable codecs: what they share is how a payload is cut into a head and units (`kvabr.codec.payload_layout`).

A codec of this kind only says what the head holds, and turns a run of tokens into units and back. It sees one run at a
time, so that what it works on stays in the processor's cache however large the group is; and since it sees nothing
else, a run decodes from the head and its own units.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.bits import Reader, finite, raw
from kvabr.codec.payload_layout import Layout
from kvabr.types.kv import KVSpec

_RUN_ELEMENTS = 1 << 20
"""Elements that are coded at once, about: few enough for the cache, many enough that calling torch costs little."""


class Separable(Codec):
    """A codec whose payload is a head and units."""

    @abstractmethod
    def layout(self, spec: KVSpec, tokens: int) -> Layout:
        """The sizes of the parts of a payload; a function of `kvabr.codec.payload_layout`."""

    def head(self, group: torch.Tensor) -> torch.Tensor:
        """What all tokens share.

        Args:
            group: [layer, K/V, head, token, dim], any float dtype, any strides; all of the group.

        Returns:
            Of any shape, float16; nothing, unless a codec has scales that serve the whole group.
        """
        return group.new_empty(0, dtype=torch.float16)

    @abstractmethod
    def encode_units(self, run: torch.Tensor, head: torch.Tensor, unit_tokens: int) -> torch.Tensor:
        """Compress a run of whole units.

        Args:
            run: [layer, K/V, head, token, dim], any float dtype, any strides.
            head: what `head` returned.
            unit_tokens: tokens in each unit of this run.

        Returns:
            [unit, ...] of any dtype and shape: the bytes of each unit.
        """

    @abstractmethod
    def decode_units(self, units: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> None:
        """Decompress a run of whole units.

        Args:
            units: [unit, byte] uint8, as many as the layout says; hostile beyond that. Not to be changed.
            head: float16, flat, finite, as many numbers as the layout says.
            out: [layer, K/V, head, unit, token, dim], any float dtype, any strides; the tokens of each unit.

        Raises:
            FormatError: no encoder writes such units.
        """

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:  # noqa: ARG002
        """The head, then the units run by run."""
        layout = self.layout(context.spec, context.tokens)
        head = self.head(group)
        parts = [raw(head)]
        for first, last in layout.runs(_most_tokens(context, group.device)):
            run = group[:, :, :, first:last]
            parts.append(raw(self.encode_units(run, head, min(layout.unit_tokens, last - first))))
        return b"".join(parts)

    def decode(
        self,
        payload: memoryview,
        context: GroupContext,
        out: torch.Tensor,
        below: Sequence[memoryview] = (),  # noqa: ARG002
    ) -> None:
        """The head, then the units run by run."""
        layout = self.layout(context.spec, context.tokens)
        reader = Reader(payload, self.name)
        reader.expect(layout.payload_bytes)
        # The payload goes to where the cache is, not what comes of it. The head is checked here: asking a device waits.
        head = finite(reader.tensor(torch.float16, (layout.head_bytes // 2,)), self.name).to(out.device)
        for first, last in layout.runs(_most_tokens(context, out.device)):
            tokens = min(layout.unit_tokens, last - first)
            size = layout.unit_bytes if tokens == layout.unit_tokens else layout.last_bytes
            units = reader.tensor(torch.uint8, ((last - first) // tokens, size)).to(out.device)
            run = out[:, :, :, first:last]
            self.decode_units(units, head, run.view(*run.shape[:3], -1, tokens, run.shape[4]))


def _most_tokens(context: GroupContext, device: torch.device) -> int:
    if device.type != "cpu":
        return context.tokens  # one copy, one check
    return max(1, _RUN_ELEMENTS // context.spec.elements_per_token)
