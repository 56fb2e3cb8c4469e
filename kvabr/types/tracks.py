"""The tracks of a catalog: per level, the bytes, expected loss and digest of every group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from kvabr.types.errors import FormatError
from kvabr.types.naming import check_track_name
from kvabr.types.records import Number, Positive, check, fields_of, to_json
from kvabr.types.tails import Loss, Tails, check_tails

T = TypeVar("T")

_ORDER = ("name", "refines", "decode_s", "measured", "tails", "bytes", "loss", "digests")
"""Fields of a track in the order in which they have always been written; others come before them."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of the whole cache on one track, as measured with the real model."""

    kl: Number
    """Mean KL divergence against the exact cache, nats per token of the continuation."""
    dnll: Number
    """Change of the mean negative log-likelihood of the true continuation, nats per token."""
    top1: Number
    """Share of continuation tokens where the most likely next token is the same."""
    kl8: Number | None = None
    """The KL divergence over the first 8 tokens of the continuation; None if it is not longer, or of an older asset."""
    kl32: Number | None = None
    """The same over the first 32 tokens."""

    def __post_init__(self) -> None:
        check(self, "measured quality")

    @property
    def loss(self) -> float:
        """Expected loss of an answer, nats per token: as long as the continuation, 32 or 8 tokens, equally likely.

        The first tokens of an answer suffer most, and a mean over all tokens of a long one hides that.
        """
        lengths = [kl for kl in (self.kl8, self.kl32, self.kl) if kl is not None]
        return sum(lengths) / len(lengths)


@dataclass(frozen=True)
class Level:
    """A level of compression: what a track is, whichever groups it has."""

    name: str
    refines: str | None = field(default=None, kw_only=True)
    """The track that must be in place for this one to decode; None for a track that stands alone."""
    decode_s: Positive = field(default=0.0, kw_only=True)
    """Seconds that one worker of the publisher took to verify and decode a full group; 0.0 if it was not measured."""
    tails: Tails = field(default=(), kw_only=True)
    """What is left of the loss where an engine computes tokens behind the cache, see `kvabr.types.tails`."""

    def __post_init__(self) -> None:
        check_track_name(self.name)
        check(self, f"track {self.name}")
        check_tails(self.tails, f"track {self.name}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return to_json(self, "refines", "decode_s", "measured", last=_ORDER)


@dataclass(frozen=True)
class Track(Level):
    """One compression level of one asset."""

    bytes: tuple[Annotated[int, Meta(ge=1, le=1 << 40)], ...]
    """Size of each group's frame, including its header."""
    loss: tuple[Loss, ...]
    """Expected loss of each group on this track (including the layers below, if it refines one)."""
    digests: tuple[Annotated[str, Meta(max_length=80)], ...]
    """Digest of each group's frame, see `kvabr.types.digests`; all are of one kind."""
    measured: Quality | None = field(default=None, kw_only=True)

    @cached_property  # policies ask at every decision
    def total_bytes(self) -> int:
        """Bytes of the whole track."""
        return sum(self.bytes)

    @cached_property
    def total_loss(self) -> float:
        """Expected loss of the whole cache on this track, nats per generated token."""
        return sum(self.loss)


@dataclass(frozen=True, slots=True)
class Mix:
    """A cache made of groups from several tracks: predicted loss against measured loss."""

    tracks: tuple[Annotated[str, Meta(max_length=64)], ...]
    """Track of each group; ``recomputed`` if the model computed the group from those before it."""
    predicted: Number
    measured: Number

    def __post_init__(self) -> None:
        check(self, "mix")


def level_of(track: Level) -> Level:
    """Return what a track is, without its groups."""
    return Level(**fields_of(track, Level))


def groups_of(track: Track, groups: Sequence[int], alike: Sequence[int]) -> Track:
    """Return some groups of a track, with the losses of those that are ``alike``."""
    sizes, digests, loss = _some(track.bytes, groups), _some(track.digests, groups), _some(track.loss, alike)
    return replace(track, bytes=sizes, loss=loss, digests=digests, measured=None)


def _some(values: Sequence[T], places: Sequence[int]) -> tuple[T, ...]:
    if isinstance(places, range) and places.step == 1:
        return tuple(values[places.start : places.stop])  # a long prompt has thousands
    return tuple(values[place] for place in places)


def check_tracks(tracks: Sequence[Level], what: str) -> None:
    """Raise a `FormatError` unless each of some levels is there once, and behind the one that it refines."""
    seen: set[str] = set()
    for track in tracks:
        if track.name in seen:
            raise FormatError(f"{what}: track {track.name} is listed twice")
        if track.refines is not None and track.refines not in seen:
            raise FormatError(f"{what}: track {track.name} refines {track.refines!r}, which is not listed before it")
        seen.add(track.name)
