"""Passages: texts with a cache that can be used anywhere in a prompt, and prompts that consist of passages.

A prompt of a retrieval assistant has exact text (`Exact`) and passages (`Passage`); each passage is an asset. A
passage's cache was computed without the rest of the prompt, so a joined cache is an approximation. Its *fusion loss* is
the KL divergence from a full prefill, in nats per generated token, without codec losses. Recomputing a *share* of the
passages' tokens reduces this loss. Names of passages are digest chains in a separate domain (`passage_chain`), and
their groups have keys before rotation (`kvabr.codec.base.GroupContext.free`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Annotated, Any

from msgspec import Meta

from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import GROUP_TOKENS, KVSpec
from kvabr.types.media import MediaTokens
from kvabr.types.naming import TrackNamespace, chained
from kvabr.types.records import check, convert

MAX_PASSAGE_TOKENS = 1 << 17
"""Maximum length of a passage in tokens; longer texts must be split."""
MAX_PARTS = 4096
MAX_CONTEXTS = 1 << 16
_Share = Annotated[float, Meta(ge=0, le=1)]
_FusionLoss = Annotated[float, Meta(ge=0, le=1e6)]
_ORDER_BYTES = 1536


@dataclass(frozen=True, slots=True)
class Exact:
    """Text of a prompt outside of passages, computed or played as a prefix."""

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _ids(self.ids))


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a prompt that may be played as a separate asset."""

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _ids(self.ids))
        if len(self.ids) > MAX_PASSAGE_TOKENS:
            raise UsageError(f"a passage must have at most {MAX_PASSAGE_TOKENS} tokens, got {len(self.ids)}; cut it")

    def name(self, spec: KVSpec, salt: bytes = b"") -> TrackNamespace:
        """Return the namespace of the passage published for a model."""
        model, tokenizer = spec.model, spec.tokenizer
        digests = passage_chain(self.ids, model=model, tokenizer=tokenizer, group_tokens=spec.group_tokens, salt=salt)
        return TrackNamespace(model, digests[-1])


Part = Exact | Passage


def check_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts of a prompt; raise `UsageError` if there are not 1 to 4,096."""
    found = tuple(parts)
    if not 0 < len(found) <= MAX_PARTS or not all(isinstance(part, Exact | Passage) for part in found):
        raise UsageError(f"a prompt must have 1 to {MAX_PARTS} parts, each an Exact or a Passage")
    return found


def passage_chain(
    tokens: Sequence[int],
    *,
    model: str,
    tokenizer: str,
    group_tokens: int = GROUP_TOKENS,
    salt: bytes = b"",
) -> list[str]:
    """Return the chained digest of every group of a passage; the last is its name. See `kvabr.types.naming.chain`.

    The last group may be short: passages are neither padded nor aligned with a prompt's groups.
    """
    return chained(b"kvabr.passage/1", tokens, model, tokenizer, group_tokens, salt)


def check_movable(spec: KVSpec) -> None:
    """Raise `FormatError` if this model's caches cannot be moved to other positions.

    Moving requires a single layer class with full attention or latents, and keys with a known rotation.
    """
    if len(spec.classes) != 1 or spec.only.kind not in ("full", "latent"):
        raise FormatError(
            f"{spec.model}: passages need full attention in every layer, but the model has {', '.join(spec.names)}"
        )
    if spec.only.rope is None:
        raise FormatError(f"{spec.model}: keys cannot be moved, because the spec does not say how they are rotated")


@dataclass(frozen=True, slots=True)
class PassageNotes:
    """A passage's facts in its catalog."""

    base: Annotated[str, Meta(min_length=1, max_length=256)]
    """How the cache was computed: ``alone``; ``behind``: after another text; ``mean``: averaged over contexts."""
    contexts: Annotated[int, Meta(ge=0, le=MAX_CONTEXTS)] = 0
    order: Annotated[bytes, Meta(max_length=MAX_PASSAGE_TOKENS)] = b""
    """Rank of each token, 255 for tokens that benefit most from recomputation; empty if unknown."""
    fusion: Annotated[tuple[tuple[_Share, _FusionLoss], ...], Meta(max_length=64)] = ()
    """Pairs (share of recomputed tokens, fusion loss of the prompt), shares ascending, measured after contexts that are
    not part of the base. Empty if not measured.
    """
    method: Annotated[str, Meta(max_length=4096)] = ""

    def __post_init__(self) -> None:
        check(self, "passage")
        if any(one[0] >= other[0] for one, other in pairwise(self.fusion)):
            raise FormatError("passage: the shares of its fusion losses must ascend")

    def check(self, spec: KVSpec, tokens: int) -> None:
        """Raise `FormatError` if these notes do not fit an asset."""
        check_movable(spec)
        if tokens > MAX_PASSAGE_TOKENS:
            raise FormatError(f"passage: must have at most {MAX_PASSAGE_TOKENS} tokens, got {tokens}")
        if len(self.order) not in (0, tokens):
            raise FormatError(f"passage: order must have {tokens} tokens, got {len(self.order)}")

    def fusion_loss(self, share: float) -> float | None:
        """Return the expected fusion loss if ``share`` of the tokens is recomputed; None if not measured.

        The loss is interpolated between measured shares, and from the highest share to 0 at 1.0; it is constant below
        the lowest share.
        """
        if not self.fusion:
            return None
        for one, other in pairwise((*self.fusion, (1.0, 0.0))):
            if share < other[0]:
                return one[1] + max(0.0, (share - one[0]) / (other[0] - one[0])) * (other[1] - one[1])
        return self.fusion[-1][1] if self.fusion[-1][0] == 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values for `from_json`."""
        cuts = range(0, len(self.order), _ORDER_BYTES)
        return {
            "base": self.base,
            "contexts": self.contexts,
            "method": self.method,
            "fusion": [list(pair) for pair in self.fusion],
            "order": [base64.b64encode(self.order[cut : cut + _ORDER_BYTES]).decode() for cut in cuts],
        }

    @classmethod
    def from_json(cls, value: Any) -> PassageNotes:
        """Parse an untrusted result of `to_json`; raise `FormatError` if a field is invalid."""
        fields = convert(value, dict[str, Any], "catalog", ".passage")
        listed = convert(fields.get("order", []), list[str], "catalog", ".passage.order")
        try:
            order = b"".join(base64.b64decode(each, validate=True) for each in listed)
        except ValueError as error:
            raise FormatError(f"passage: its order is not base64 ({error})") from error
        return convert({**fields, "order": order}, cls, "catalog", ".passage")


def _ids(ids: Iterable[int]) -> tuple[int, ...]:
    if isinstance(ids, MediaTokens):
        raise UsageError("parts of a prompt must be token ids without media (pictures, sound or film)")
    try:
        found = tuple(map(index, ids))
    except TypeError as error:
        raise UsageError(f"token ids must be whole numbers ({error})") from error
    if not found:
        raise UsageError("a part of a prompt must have at least 1 token, got 0")
    if min(found) < 0 or max(found) >= 1 << 32:
        raise UsageError("token ids must be whole numbers from 0 to 2**32 - 1")
    return found
