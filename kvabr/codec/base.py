"""The contract of a codec: one group of a KV cache to a payload, and back into the caller's tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvabr.codec.payload_layout import Layout
from kvabr.types.kv import KVSpec

if TYPE_CHECKING:
    from kvabr.codec.profile import Profile


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What a codec may know of a group beside its bytes."""

    spec: KVSpec
    first_token: int
    """Position of the group's first token in the prompt: what the rotary embedding and the sinks depend on."""
    tokens: int
    """Tokens in this group: `KVSpec.group_tokens`, or fewer in the last one."""
    profile: Profile | None = None
    """Side information of the model, for codecs that need it."""
    memo: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    """Where codecs keep, from one track to the next, what they found out about a group that they encode: give a dict of
    its own to every group that is encoded on several tracks, and do not change the group meanwhile."""


class Codec(ABC):
    """One compression level."""

    name: ClassVar[str]
    """Name of the track that it makes."""
    refines: ClassVar[str | None] = None
    """The track that must be decoded below this one; None if it stands alone."""
    needs_profile: ClassVar[bool] = False

    def layout(self, spec: KVSpec, tokens: int) -> Layout | None:  # noqa: ARG002
        """Where each token lies in the payload of a group of ``tokens`` tokens; None if tokens cannot be told apart."""
        return None

    def aside(self, payload: memoryview, context: GroupContext) -> int:  # noqa: ARG002
        """Tokens that an encoder found too unusual to code as the others, so that a payload has them whole."""
        return 0

    @abstractmethod
    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
        """Compress one group.

        Args:
            group: [layer, K/V, head, token, dim], any float dtype, any strides.
            context: what group it is.
            below: payloads of the tracks that this one refines, base first; empty if it stands alone.

        Returns:
            The payload, without the container's frame.
        """

    @abstractmethod
    def decode(
        self, payload: memoryview, context: GroupContext, out: torch.Tensor, below: Sequence[memoryview] = ()
    ) -> None:
        """Decompress one group into ``out``.

        Args:
            payload: what `encode` returned; hostile until checked.
            context: as for `encode`.
            out: [layer, K/V, head, token, dim], any float dtype, any strides; written whole or, on error, in part
                (the assembler decodes into scratch first, so that a cache is never half written).
            below: payloads of the tracks below, base first.

        Raises:
            FormatError: the payload is not one of this codec for this context.
        """
