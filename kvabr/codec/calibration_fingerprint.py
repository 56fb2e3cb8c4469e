"""Fingerprints of calibration texts in a profile, to check that a text is "unseen".

Marks identify parts of a text. They are hashes of runs of `RUN` token ids; winnowing (Schleimer et al., 2003) keeps the
smallest of every `WINDOW` neighbours. Sequences that share `RUN` + `WINDOW` - 1 tokens share a mark. Marks reveal no
text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvabr.types.errors import FormatError

RUN = 32
WINDOW = 64
MAX_MARKS = 1 << 14
"""Maximum number of marks; the smallest hashes are kept."""
_MAX_TEXTS = 256
_MAX_LETTERS = 80
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class SeenText:
    """One calibration text."""

    name: str
    sha256: str
    """Digest of the text's UTF-8 bytes, hex."""
    contexts: int

    def __post_init__(self) -> None:
        good = isinstance(self.name, str) and len(self.name) <= _MAX_LETTERS
        good = good and isinstance(self.sha256, str) and len(self.sha256) == 64 and set(self.sha256) <= _HEX
        if not good or type(self.contexts) is not int or not 0 <= self.contexts < 1 << 32:
            raise FormatError("profile: a calibration text must have a name, a SHA-256 in hex and a number of contexts")


@dataclass(frozen=True, eq=False)
class Seen:
    """Fingerprints of the calibration texts."""

    texts: tuple[SeenText, ...]
    marks: NDArray[np.uint64]
    """Sorted marks, [mark]."""

    @classmethod
    def of(cls, texts: Mapping[str, str], contexts: Iterable[tuple[str, Sequence[int]]]) -> Seen:
        """Return the fingerprints of texts by name; ``contexts`` are pairs of a text's name and token ids."""
        counts = dict.fromkeys(texts, 0)
        found: list[NDArray[np.uint64]] = []
        for name, ids in contexts:
            counts[name] += 1
            found.append(marks_of(ids))
        listed = tuple(
            SeenText(name[-_MAX_LETTERS:], hashlib.sha256(text.encode()).hexdigest(), counts[name])
            for name, text in list(texts.items())[:_MAX_TEXTS]
        )
        return cls(listed, np.unique(np.concatenate(found))[:MAX_MARKS])

    def share(self, tokens: Sequence[int]) -> float:
        """Return the fraction of a text's marks that occur in the calibration, 0 to 1."""
        own = marks_of(tokens)
        return float(np.isin(own, self.marks).mean()) if len(own) else 0.0

    @cached_property
    def digests(self) -> frozenset[str]:
        """SHA-256 digests of the texts, hex."""
        return frozenset(text.sha256 for text in self.texts)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values for `from_json`."""
        return {
            "texts": [[text.name, text.sha256, text.contexts] for text in self.texts],
            "marks": base64.b64encode(self.marks.astype("<u8").tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, value: Any) -> Seen:
        """Parse untrusted output of `to_json`; raise `FormatError` if malformed."""
        try:
            texts, data = value["texts"], base64.b64decode(value["marks"], validate=True)
            if len(texts) > _MAX_TEXTS or len(data) > 8 * MAX_MARKS or len(data) % 8:
                raise FormatError(
                    f"profile: {len(texts)} calibration texts and {len(data)} bytes of marks, more than allowed"
                )
            return cls(tuple(SeenText(*text) for text in texts), np.frombuffer(data, "<u8").astype(np.uint64))
        except (LookupError, TypeError, ValueError) as error:
            raise FormatError(f"profile: its calibration texts cannot be read ({error!r})") from error


def marks_of(tokens: Sequence[int]) -> NDArray[np.uint64]:
    """Return the distinct marks of a sequence of token ids; none for fewer than `RUN`."""
    data = np.asarray(tokens, dtype="<u4").tobytes()
    hashes = [
        int.from_bytes(hashlib.blake2b(data[4 * first : 4 * (first + RUN)], digest_size=8).digest(), "little")
        for first in range(len(tokens) - RUN + 1)
    ]
    every = np.array(hashes, dtype=np.uint64)
    if not len(every):
        return every
    return np.unique(np.lib.stride_tricks.sliding_window_view(every, min(WINDOW, len(every))).min(axis=1))
