"""How a group's frame is cut into objects: what a relay forwards, and a player receives, piece by piece.

The objects of a group, put end to end in the order of their IDs, are its frame; nothing is copied or coded anew. An
object's ID is the index, within the prompt, of the first token that it holds (draft-shi-moq-kvcache-00): a token, or a
run of tokens if they are small. The first object also has what all tokens share. A level that is not token-separable,
such as AC, is cut into slices, numbered from the group's first token on.

An origin imports this room to serve, so nothing here may load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.codec.container import header_bytes
from kvabr.codec.payload_layout import level_layout
from kvabr.types.kv import KVSpec

SLICE_BYTES = 1 << 16
"""Size of an object, about: large enough that its header costs nothing, small enough to show progress."""


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """One object: a byte range of its group."""

    object_id: int
    begin: int
    end: int


def object_spans(spec: KVSpec, track: str, first_token: int, tokens: int, frame_bytes: int) -> tuple[ObjectSpan, ...]:
    """Cut the frame of a group into objects of whole tokens.

    Args:
        spec: the cache's spec.
        track: name of the track.
        first_token: the group's first token.
        tokens: tokens in the group.
        frame_bytes: size of the frame.

    Returns:
        Ascending IDs; the spans cover the frame without gaps. Each has as many units of tokens as `SLICE_BYTES` holds,
        but one at least; the first, beside its own, the frame's header and the payload's head.
    """
    layout = level_layout(track, spec, tokens)
    if layout is None or frame_bytes != header_bytes(track) + layout.payload_bytes:
        return slices(first_token, frame_bytes)  # not token-separable, or made by a codec that we do not know
    units = max(1, SLICE_BYTES // layout.unit_bytes)
    begin = frame_bytes - layout.payload_bytes + layout.head_bytes
    cuts = [begin + unit * layout.unit_bytes for unit in range(units, layout.units, units)]
    return tuple(
        ObjectSpan(first_token + index * units * layout.unit_tokens, start, end)
        for index, (start, end) in enumerate(zip([0, *cuts], [*cuts, frame_bytes], strict=True))
    )


def slices(first_id: int, size: int) -> tuple[ObjectSpan, ...]:
    """Cut ``size`` bytes into objects of `SLICE_BYTES`, numbered from ``first_id``; at least one, even of no bytes."""
    count = max(1, -(-size // SLICE_BYTES))
    return tuple(
        ObjectSpan(first_id + index, index * SLICE_BYTES, min(size, (index + 1) * SLICE_BYTES))
        for index in range(count)
    )
