"""The tracks of a catalog: per level, the bytes, expected loss and digest of every group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from typing import Any

from kvabr.types.catalog_json import all_within
from kvabr.types.errors import FormatError
from kvabr.types.naming import check_track_name
from kvabr.types.tails import MOST_LOSS, TailLoss, check_tails


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of the whole cache on one track, as measured with the real model."""

    kl: float
    """Mean KL divergence against the exact cache, nats per token of the continuation."""
    dnll: float
    """Change of the mean negative log-likelihood of the true continuation, nats per token."""
    top1: float
    """Share of continuation tokens where the most likely next token is the same."""
    kl8: float | None = None
    """The KL divergence over the first 8 tokens of the continuation; None if it is not longer, or of an older asset."""
    kl32: float | None = None
    """The same over the first 32 tokens."""

    @property
    def loss(self) -> float:
        """Expected loss of an answer, nats per token: as long as the continuation, 32 or 8 tokens, equally likely.

        The first tokens of an answer suffer most, and a mean over all tokens of a long one hides that.
        """
        lengths = [kl for kl in (self.kl8, self.kl32, self.kl) if kl is not None]
        return sum(lengths) / len(lengths)


@dataclass(frozen=True)
class Track:
    """One compression level of one asset."""

    name: str
    bytes: tuple[int, ...]
    """Size of each group's frame, including its header."""
    loss: tuple[float, ...]
    """Expected loss of each group on this track (including the layers below, if it refines one)."""
    digests: tuple[str, ...]
    """Digest of each group's frame, see `kvabr.types.digests`; all are of one kind."""
    refines: str | None = None
    """The track that must be in place for this one to decode; None for a track that stands alone."""
    decode_s: float = 0.0
    """Seconds that one worker of the publisher took to verify and decode a full group; 0.0 if it was not measured."""
    measured: Quality | None = None
    tails: tuple[TailLoss, ...] = ()
    """What is left of the loss where an engine computes tokens behind the cache, see `kvabr.types.tails`."""

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

    tracks: tuple[str, ...]
    """Track of each group; ``recomputed`` if the model computed the group from those before it."""
    predicted: float
    measured: float


def groups_of(track: Track, groups: Sequence[int], alike: Sequence[int]) -> Track:
    """Return some groups of a track, with the losses of those that are ``alike``."""
    sizes, digests = tuple(track.bytes[group] for group in groups), tuple(track.digests[group] for group in groups)
    return replace(track, bytes=sizes, loss=tuple(track.loss[each] for each in alike), digests=digests, measured=None)


def check_track(track: Track, groups: int, before: set[str]) -> None:
    """Raise a `FormatError` unless a track fits an asset with ``groups`` groups and these tracks ``before`` it."""
    name = check_track_name(track.name)
    if name in before:
        raise FormatError(f"catalog: track {name} is listed twice")
    if track.refines is not None and track.refines not in before:
        raise FormatError(f"catalog: track {name} refines {track.refines!r}, which is not listed before it")
    if not len(track.bytes) == len(track.loss) == len(track.digests) == groups:
        raise FormatError(f"catalog: track {name} must list bytes, loss and digest of each of {groups} groups")
    if not all_within(track.bytes, 1, 1 << 40):
        raise FormatError(f"catalog: track {name} has a group whose size is not positive")
    if not all_within(track.loss, 0, MOST_LOSS):
        raise FormatError(f"catalog: track {name} has a group whose loss is negative or not a number")
    if not (math.isfinite(track.decode_s) and track.decode_s >= 0):
        raise FormatError(f"catalog: track {name} has a decode time that is negative or not a number")
    quality = track.measured
    if quality is not None and not all(math.isfinite(value) for value in astuple(quality) if value is not None):
        raise FormatError(f"catalog: track {name} has a measured quality that is not a number")
    check_tails(track.tails, f"catalog: track {name}")


def track_to_json(track: Track) -> dict[str, Any]:
    """Return plain JSON values."""
    quality = track.measured
    return {
        "name": track.name,
        "refines": track.refines,
        "decode_s": track.decode_s,
        "measured": None if quality is None else {k: v for k, v in asdict(quality).items() if v is not None},
        **({"tails": [list(tail) for tail in track.tails]} if track.tails else {}),
        "bytes": list(track.bytes),
        "loss": list(track.loss),
        "digests": list(track.digests),
    }


def track_from_json(value: dict[str, Any]) -> Track:
    """Return the track with the fields that `kvabr.types.catalog_json` has read."""
    return Track(**value | {"measured": None if value["measured"] is None else Quality(*value["measured"])})
