"""Prompts with pictures, sound or films: tokens that stand for one carry a digest of it.

In a prompt of token ids every picture is the same few placeholder tokens. `MediaTokens` says what they stand for. It
takes the place of the ids wherever a prompt has a name (`kvabr.types.naming.chain`): the digest of a medium is in the
names of the groups that it touches, and so in those of all groups behind them.
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
"""Bound on places in a prompt."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture, sound or film in a prompt."""

    first: int
    """Place of the first token that stands for it. In a piece of a prompt that it goes on into, negative."""
    tokens: int
    """How many tokens stand for it."""
    digest: str
    """Digest of all that the model sees of it, 64 hex digits: after the processor's cropping and scaling."""


class MediaTokens(Sequence[int]):
    """Token ids of a prompt, and the media that some of them stand for.

    A slice has the media that it touches; one that touches none is a plain tuple.
    """

    __slots__ = ("ids", "media")

    def __init__(self, ids: Sequence[int], media: Sequence[Medium]) -> None:
        """Take ids and media; `UsageError` unless these follow one another, and touch the ids."""
        try:
            self.ids, self.media = tuple(map(index, ids)), tuple(media)
        except TypeError as error:
            raise UsageError(f"a prompt with media is whole numbers, and `Medium`s: {error}") from error
        place = -_MAX_TOKENS
        for each in self.media:
            if not (isinstance(each, Medium) and _whole(each.first) and _whole(each.tokens)):
                raise UsageError(f"a medium is Medium(first, tokens, digest), with whole numbers, not {str(each)[:80]}")
            if not isinstance(each.digest, str) or not _DIGEST.fullmatch(each.digest):
                raise UsageError(f"the digest of a medium has 64 hex digits, not {str(each.digest)[:80]!r}")
            end = each.first + each.tokens
            if not place <= each.first < end <= _MAX_TOKENS or end <= 0 or each.first >= len(self.ids):
                raise UsageError(
                    f"a medium at tokens {each.first} to {end - 1} of {len(self.ids)}: media have at least one token, "
                    "lie in the prompt, and follow one another"
                )
            place = end

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        """Return a token, or a piece of the prompt, without gaps."""
        if not isinstance(at, slice):
            return self.ids[at]
        first, end, step = at.indices(len(self.ids))
        if step != 1:
            raise UsageError("a prompt with media is cut into pieces without gaps")
        found = [
            replace(each, first=each.first - first)
            for each in self.media
            if each.first < end and each.first + each.tokens > first
        ]
        ids = self.ids[first:end]
        return MediaTokens(ids, found) if found and ids else ids

    def __iter__(self) -> Iterator[int]:
        """Yield the ids."""
        return iter(self.ids)

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same ids with the same media."""
        return isinstance(other, MediaTokens) and (self.ids, self.media) == (other.ids, other.media)

    def __hash__(self) -> int:
        """Return the same of equal ones."""
        return hash((self.ids, self.media))

    def __repr__(self) -> str:
        """Return the number of tokens, and the media."""
        return f"MediaTokens({len(self.ids)} tokens, {list(self.media)})"


def _whole(value: object) -> bool:
    return hasattr(value, "__index__")


def media_bytes(tokens: Sequence[int]) -> bytes:
    """Return what the name of a group says of the media in it: where they begin and end, and their digests."""
    media = getattr(tokens, "media", ())
    return b"".join(struct.pack("<qQ", each.first, each.tokens) + bytes.fromhex(each.digest) for each in media)
