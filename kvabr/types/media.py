"""Prompts with pictures, sound or videos.

Among token ids, all pictures are the same few placeholder tokens. `MediaTokens` adds a digest of each medium. Use it in
place of plain ids for naming a prompt (`kvabr.types.naming.chain`), so that media change the names of groups.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import overload

from kvabr.types.errors import UsageError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture, sound or video in a prompt."""

    first: int
    """Position of its first placeholder token; negative in a piece of a prompt that starts inside the medium."""
    tokens: int
    digest: str
    """Digest of the model's input (after cropping and scaling), 64 hex digits."""


class MediaTokens(Sequence[int]):
    """Token ids of a prompt, with the media of the placeholder tokens.

    A slice has the media that it overlaps; without media it is a plain tuple.
    """

    __slots__ = ("ids", "media")

    def __init__(self, ids: Sequence[int], media: Sequence[Medium]) -> None:
        try:
            self.ids, self.media = tuple(map(index, ids)), tuple(media)
        except TypeError as error:
            raise UsageError(
                f"a prompt with media must have whole numbers as token ids and `Medium` objects as media: {error}"
            ) from error
        place = -_MAX_TOKENS
        for each in self.media:
            if not (isinstance(each, Medium) and _whole(each.first) and _whole(each.tokens)):
                raise UsageError(
                    f"a medium must be Medium(first, tokens, digest) with whole numbers, got {str(each)[:80]}"
                )
            if not isinstance(each.digest, str) or not _DIGEST.fullmatch(each.digest):
                raise UsageError(f"the digest of a medium must have 64 hex digits, got {str(each.digest)[:80]!r}")
            end = each.first + each.tokens
            if not place <= each.first < end <= _MAX_TOKENS or end <= 0 or each.first >= len(self.ids):
                raise UsageError(
                    f"a medium at tokens {each.first} to {end - 1} of {len(self.ids)}: media must have at least one "
                    "token, lie in the prompt, and not overlap"
                )
            place = end

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if not isinstance(at, slice):
            return self.ids[at]
        first, end, step = at.indices(len(self.ids))
        if step != 1:
            raise UsageError("a prompt with media cannot be sliced with a step")
        found = [
            replace(each, first=each.first - first)
            for each in self.media
            if each.first < end and each.first + each.tokens > first
        ]
        ids = self.ids[first:end]
        return MediaTokens(ids, found) if found and ids else ids

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MediaTokens) and (self.ids, self.media) == (other.ids, other.media)

    def __hash__(self) -> int:
        return hash((self.ids, self.media))

    def __repr__(self) -> str:
        return f"MediaTokens({len(self.ids)} tokens, {list(self.media)})"


def _whole(value: object) -> bool:
    return hasattr(value, "__index__")


def media_bytes(tokens: MediaTokens) -> bytes:
    """Return positions and digests of media for a group's name."""
    return b"".join(struct.pack("<qQ", each.first, each.tokens) + bytes.fromhex(each.digest) for each in tokens.media)
