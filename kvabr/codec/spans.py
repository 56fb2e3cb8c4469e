"""How a group's frame is cut into objects: what a relay forwards, and a player receives, piece by piece.

The objects of a group, put end to end in the order of their IDs, are its frame; nothing is copied or coded anew. An
object's ID is the index, within the prompt, of the first token that it holds (draft-shi-moq-kvcache-00). A level that
is not token-separable, such as AC, is cut into slices, numbered from the group's first token on.
"""

from __future__ import annotations

from dataclasses import dataclass

SLICE_BYTES = 1 << 16
"""Size of an object, about: large enough that its header costs nothing, small enough to show progress."""


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """One object: a byte range of its group."""

    object_id: int
    begin: int
    end: int


def slices(first_id: int, size: int) -> tuple[ObjectSpan, ...]:
    """Cut ``size`` bytes into objects of `SLICE_BYTES`, numbered from ``first_id``; at least one, even of no bytes."""
    count = max(1, -(-size // SLICE_BYTES))
    return tuple(
        ObjectSpan(first_id + index, index * SLICE_BYTES, min(size, (index + 1) * SLICE_BYTES))
        for index in range(count)
    )
