"""The catalog of an asset: its tracks with their bytes, expected loss and digests, group by group. Versioned JSON.

A player decides by the catalog alone and never looks into a group. A catalog may come from a network, so every field is
checked when it is read.

Loss is the expected KL divergence against the exact cache, in nats per generated token, given per group and track, and
attributed such that the losses of the played groups add up to the loss of the whole cache.

A recomputed group is exact if everything before it is exact. Behind lossy groups it inherits part of their error: 5 %
to 30 % of what it would cost on the tracks before it, whatever the track (SmolLM2-135M, 8 groups of three texts; 4, 3
and 2 bits, and the draft's seven levels). The model here is `INHERITED` times their weighted mean, in which near groups
weigh more, as the shape of a track's own losses tells. (21 recomputed groups behind 42 lossy ones of 8,064 tokens:
measured 0.00042; a plain mean predicts 0.0031, this model 0.0005.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvabr.types.cost import PrefillCost
from kvabr.types.errors import AssetError, FormatError, UsageError, did_you_mean
from kvabr.types.json_pieces import JsonPieces
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace, check_track_name

SCHEMA = "kvabr.catalog/1"
MAX_CATALOG_BYTES = 32 << 20
"""Bound on every catalog: 11 tracks of a million tokens in groups of 128 take 11 MB."""
_MAX_GROUPS = 1 << 20
_MAX_TRACKS = 64
_MAX_MIXES = 256
_HEAD_BYTES = 256 << 10
"""Bytes of a catalog that its number of groups says nothing about: spec, words, measurements."""
_ENTRY_BYTES = 128
"""Bytes of a catalog for one group of one track, at most: size, loss and digest, each on a line; and for its chunk."""
_LEAST_GROUP_BYTES = 128
"""Bytes of a catalog for one group, at least: two SHA-256 in hex."""
_LEAST_GROUPS = 1024
"""Groups for which a catalog always has room, as the longest cached prefix of a short prompt may be that of a long
asset."""
_AT_A_TIME = 8192
"""Values that are checked at a time, so that other threads can run in between."""
MAX_PROFILE_BYTES = 1 << 29
"""Bytes of a codec profile, wherever it comes from."""
_MAX_LOSS = 1e6


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of the whole cache on one track, as measured with the real model."""

    kl: float
    """Mean KL divergence against the exact cache, nats per token of the continuation."""
    dnll: float
    """Change of the mean negative log-likelihood of the true continuation, nats per token."""
    top1: float
    """Share of continuation tokens where the most likely next token is the same."""


@dataclass(frozen=True, slots=True)
class Track:
    """One compression level of one asset."""

    name: str
    bytes: tuple[int, ...]
    """Size of each group's frame, including its header."""
    loss: tuple[float, ...]
    """Expected loss of each group on this track (including the layers below, if it refines one)."""
    digests: tuple[str, ...]
    """SHA-256 of each group's frame, hex."""
    refines: str | None = None
    """The track that must be in place for this one to decode; None for a track that stands alone."""
    decode_s: float = 0.0
    """Seconds that one worker of the publisher took to verify and decode a full group; 0.0 if it was not measured."""
    measured: Quality | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole track."""
        return sum(self.bytes)


@dataclass(frozen=True, slots=True)
class Mix:
    """A cache made of groups from several tracks: predicted loss against measured loss."""

    tracks: tuple[str, ...]
    """Track of each group; ``recomputed`` if the model computed the group from those before it."""
    predicted: float
    measured: float


@dataclass(frozen=True)
class Catalog:
    """An asset as a player sees it."""

    namespace: TrackNamespace
    spec: KVSpec
    tokens: int
    chunks: tuple[str, ...]
    """Chained prompt digest of each group, see `kvabr.types.naming.chain`."""
    tracks: tuple[Track, ...]
    profile: str | None = None
    """SHA-256 of the codec profile's file, hex; None if no track needs one."""
    profile_bytes: int = 0
    prefill: PrefillCost | None = None
    """Prefill cost on the publisher's machine: a default for replays without an engine."""
    loss_method: str = ""
    """How the losses were measured and attributed to groups, in words."""
    mixes: tuple[Mix, ...] = ()
    source: str = ""
    """What the asset was made from, in words."""
    offset: int = 0
    """Published groups before this catalog's first: its group ``g`` is published as ``offset + g``. Not in the JSON."""

    def __post_init__(self) -> None:
        groups = self.spec.groups(self.tokens) if self.tokens > 0 else 0
        if not 0 < groups <= _MAX_GROUPS:
            raise FormatError(f"catalog: {self.tokens} tokens make {groups} groups; 1 to {_MAX_GROUPS} are allowed")
        if not 0 <= self.profile_bytes <= MAX_PROFILE_BYTES:
            raise FormatError(f"catalog: a profile of {self.profile_bytes} bytes, not 0 to {MAX_PROFILE_BYTES}")
        if any(not (math.isfinite(mix.predicted) and math.isfinite(mix.measured)) for mix in self.mixes):
            raise FormatError("catalog: a mix has a loss that is not a number")
        if len(self.chunks) != groups:
            raise FormatError(f"catalog: {groups} groups but {len(self.chunks)} prompt digests")
        if not 0 < len(self.tracks) <= _MAX_TRACKS:
            raise FormatError(f"catalog: {len(self.tracks)} tracks; 1 to {_MAX_TRACKS} are allowed")
        seen: set[str] = set()
        for track in self.tracks:
            _check_track(track, groups, seen)
            seen.add(track.name)
        if all(track.refines is not None for track in self.tracks):
            raise FormatError("catalog: every track refines another; one must stand alone")

    @cached_property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.chunks)

    @cached_property
    def by_name(self) -> dict[str, Track]:
        """Tracks by name."""
        return {track.name: track for track in self.tracks}

    @cached_property
    def fp16_bytes(self) -> int:
        """Bytes of the exact cache at 16 bits an element."""
        return self.spec.fp16_bytes(self.tokens)

    def track(self, name: str) -> Track:
        """Return the track called ``name``; a `FormatError` lists the tracks that exist if there is none."""
        try:
            return self.by_name[name]
        except KeyError:
            known = self.by_name
            raise FormatError(
                f"no track {name!r} in this asset{did_you_mean(name, known)}; it has {', '.join(known)}"
            ) from None

    def group_tokens(self, group: int) -> int:
        """Return the number of tokens in ``group``."""
        first, last = self.spec.group_range(group, self.tokens)
        return last - first

    def prefix(self, groups: int) -> Catalog:
        """Return the catalog of the first ``groups`` (1 to all): what this asset offers to a prompt that begins alike.

        It keeps the namespace under which the groups are published, and drops measurements of the whole cache.
        """
        if not 1 <= groups <= self.groups:
            raise UsageError(f"cannot take a prefix of {groups} groups: the asset has {self.groups}")
        if groups == self.groups:
            return self
        return self._slice(0, groups, groups * self.spec.group_tokens)

    def suffix(self, groups: int) -> Catalog:
        """Return the catalog of what lies behind the first ``groups`` groups, not all, numbered from 0 again.

        Its `offset` says where its first group is published. It omits measurements of the whole cache.
        """
        if not 0 <= groups < self.groups:
            raise UsageError(f"skipping {groups} of {self.groups} groups leaves nothing to play")
        if not groups:
            return self
        return self._slice(groups, self.groups, self.tokens - groups * self.spec.group_tokens)

    @property
    def first_token(self) -> int:
        """Tokens of the published asset that come before this catalog's first token."""
        return self.offset * self.spec.group_tokens

    def _slice(self, first: int, last: int, tokens: int) -> Catalog:
        part = slice(first, last)
        tracks = tuple(
            replace(
                track,
                bytes=track.bytes[part],
                loss=track.loss[part],
                digests=track.digests[part],
                measured=None,
            )
            for track in self.tracks
        )
        return replace(
            self, tokens=tokens, chunks=self.chunks[part], tracks=tracks, mixes=(), offset=self.offset + first
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; equal catalogs give equal values."""
        return {
            "schema": SCHEMA,
            "namespace": {"model": self.namespace.model, "prompt": self.namespace.prompt},
            "spec": self.spec.to_json(),
            "tokens": self.tokens,
            "source": self.source,
            "chunks": list(self.chunks),
            "profile": self.profile,
            "profile_bytes": self.profile_bytes,
            "prefill": None if self.prefill is None else self.prefill.to_json(),
            "loss_method": self.loss_method,
            "mixes": [{"tracks": list(m.tracks), "predicted": m.predicted, "measured": m.measured} for m in self.mixes],
            "tracks": [_track_to_json(track) for track in self.tracks],
        }

    def dumps(self) -> str:
        """Return the catalog as JSON text."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    @classmethod
    def loads(cls, text: str | bytes) -> Catalog:
        """Parse the output of `dumps` from an untrusted source; raise a `FormatError` if a field is bad.

        Other threads run meanwhile, whatever the text is: none of it is decoded in long calls (`JsonPieces`).
        """
        if len(text) > MAX_CATALOG_BYTES:
            raise FormatError(f"catalog: {len(text)} bytes, more than the {MAX_CATALOG_BYTES} allowed")
        try:
            pieces = JsonPieces(text.encode() if isinstance(text, str) else text, "catalog")
            value = _read_fields(pieces)
            pieces.finish()
            return cls._from_fields(value)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"catalog: a field is missing or has the wrong type ({error!r})") from error

    @classmethod
    def _from_fields(cls, value: dict[str, Any]) -> Catalog:
        _check_schema(value.get("schema"))
        prefill, profile = value["prefill"], value["profile"]
        return cls(
            namespace=TrackNamespace(str(value["namespace"]["model"]), str(value["namespace"]["prompt"])),
            spec=KVSpec.from_json(value["spec"]),
            tokens=int(value["tokens"]),
            source=str(value["source"]),
            chunks=value["chunks"],
            profile=None if profile is None else str(profile),
            profile_bytes=int(value["profile_bytes"]),
            prefill=None if prefill is None else PrefillCost.from_json(prefill),
            loss_method=str(value["loss_method"]),
            mixes=value["mixes"],
            tracks=value["tracks"],
        )

    @classmethod
    def read(cls, path: Path) -> Catalog:
        """Read a catalog from a file; raise an `AssetError` if it cannot be read, or as `loads`."""
        try:
            with path.open("rb") as file:
                return cls.loads(file.read(MAX_CATALOG_BYTES + 1))
        except OSError as error:
            raise AssetError(f"{path}: cannot read the catalog ({error.strerror}); is this an asset?") from error
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error


def _check_track(track: Track, groups: int, before: set[str]) -> None:
    name = check_track_name(track.name)
    if name in before:
        raise FormatError(f"catalog: track {name} is listed twice")
    if track.refines is not None and track.refines not in before:
        raise FormatError(f"catalog: track {name} refines {track.refines!r}, which is not listed before it")
    if not len(track.bytes) == len(track.loss) == len(track.digests) == groups:
        raise FormatError(f"catalog: track {name} must list bytes, loss and digest of each of {groups} groups")
    if not _all_within(track.bytes, 1, 1 << 40):
        raise FormatError(f"catalog: track {name} has a group whose size is not positive")
    if not _all_within(track.loss, 0, _MAX_LOSS):
        raise FormatError(f"catalog: track {name} has a group whose loss is negative or not a number")
    if not (math.isfinite(track.decode_s) and track.decode_s >= 0):
        raise FormatError(f"catalog: track {name} has a decode time that is negative or not a number")
    quality = track.measured
    if quality is not None and not all(map(math.isfinite, (quality.kl, quality.dnll, quality.top1))):
        raise FormatError(f"catalog: track {name} has a measured quality that is not a number")


def _all_within(values: Sequence[float], least: float, most: float) -> bool:
    """Return whether all values are numbers within bounds."""
    for first in range(0, len(values), _AT_A_TIME):
        part = values[first : first + _AT_A_TIME]
        if not (least <= min(part) and max(part) <= most and math.isfinite(sum(part))):  # a sum with a NaN is one
            return False
    return True


def _track_to_json(track: Track) -> dict[str, Any]:
    quality = track.measured
    return {
        "name": track.name,
        "refines": track.refines,
        "decode_s": track.decode_s,
        "measured": None if quality is None else {"kl": quality.kl, "dnll": quality.dnll, "top1": quality.top1},
        "bytes": list(track.bytes),
        "loss": list(track.loss),
        "digests": list(track.digests),
    }


def catalog_limit(groups: int) -> int:
    """Return the bytes that a catalog may have which is asked for with a prompt of ``groups`` groups."""
    return min(MAX_CATALOG_BYTES, _HEAD_BYTES + max(groups, _LEAST_GROUPS) * (_MAX_TRACKS + 1) * _ENTRY_BYTES)


def _check_schema(schema: object) -> None:
    if schema != SCHEMA:
        newer = str(schema).startswith("kvabr.catalog/")
        hint = "it was written by another version: upgrade kvabr" if newer else "is this a catalog?"
        raise FormatError(f"catalog: schema is {str(schema)[:80]!r}, this version reads {SCHEMA!r}; {hint}")


def _read_fields(pieces: JsonPieces) -> dict[str, Any]:
    """Return the fields of a catalog's JSON; those with long lists are complete, the others plain JSON."""
    most = min(_MAX_GROUPS, len(pieces) // _LEAST_GROUP_BYTES)
    value: dict[str, Any] = {}
    for name in pieces.members():
        if name == "chunks":
            value[name] = tuple(pieces.scalars({str}, most))
        elif name == "tracks":
            value[name] = tuple(_read_track(pieces, most) for _ in pieces.elements(_MAX_TRACKS))
        elif name == "mixes":
            value[name] = tuple(_read_mix(pieces, most) for _ in pieces.elements(_MAX_MIXES))
        elif name in _PLAIN:
            value[name] = pieces.value()
            if name == "schema":
                _check_schema(value[name])  # before what another version may have added
        else:
            pieces.skip()
    return value


def _read_track(pieces: JsonPieces, groups: int) -> Track:
    value: dict[str, Any] = {}
    for name in pieces.members():
        if name in _LISTS:
            value[name] = tuple(pieces.scalars(_LISTS[name], groups))
        elif name in {"name", "refines", "decode_s", "measured"}:
            value[name] = pieces.value()
        else:
            pieces.skip()
    quality = value["measured"]
    return Track(
        name=value["name"],
        refines=value["refines"],
        decode_s=float(value["decode_s"]),
        measured=None if quality is None else Quality(*(float(quality[key]) for key in ("kl", "dnll", "top1"))),
        bytes=value["bytes"],
        loss=value["loss"],
        digests=value["digests"],
    )


def _read_mix(pieces: JsonPieces, groups: int) -> Mix:
    value: dict[str, Any] = {}
    for name in pieces.members():
        if name == "tracks":
            value[name] = tuple(pieces.scalars({str}, groups))
        elif name in {"predicted", "measured"}:
            value[name] = float(pieces.value())
        else:
            pieces.skip()
    return Mix(value["tracks"], value["predicted"], value["measured"])


_PLAIN = frozenset(
    ("schema", "namespace", "spec", "tokens", "source", "profile", "profile_bytes", "prefill", "loss_method")
)
"""Fields of a catalog that are small."""
_LISTS: dict[str, set[type]] = {"bytes": {int}, "loss": {int, float}, "digests": {str}}
"""Fields of a track with a value for each group, and the types of their values."""


RECOMPUTED = "recomputed"
"""Stands in a list of tracks for a group that the engine computed from the groups before it."""

INHERITED = 0.2
"""Share of the loss on the tracks before it that a recomputed group inherits."""


def predicted_loss(catalog: Catalog, tracks: Sequence[str]) -> float:
    """Return the expected loss of a cache whose group g was played on ``tracks[g]``, in nats per generated token.

    ``tracks`` names the highest track in place of each group, or `RECOMPUTED`.
    """
    if len(tracks) != catalog.groups:
        raise FormatError(f"{len(tracks)} tracks for an asset of {catalog.groups} groups")
    return _total(catalog, tracks, {})


def played_loss(catalog: Catalog, steps: Iterable[tuple[str, int, int | str]]) -> float:
    """Return the expected loss of a cache that was assembled in these steps, in nats per generated token.

    A recomputed group inherits the errors that the groups before it had at that time. Upgrading them later improves
    only them. Steps are as in `PlayRecord.steps`: ("fetch", group, track) and ("compute", first, last); a `FormatError`
    says which group they leave out.
    """
    tracks = [""] * catalog.groups
    behind: dict[int, Sequence[str]] = {}
    for kind, where, what in steps:
        last = what if isinstance(what, int) else where + 1
        if kind not in {"fetch", "compute"} or not 0 <= where < last <= len(tracks):
            raise FormatError(f"invalid step {(kind, where, what)!r} in a play of {catalog.groups} groups")
        for group in range(where, last):
            tracks[group] = what if isinstance(what, str) else RECOMPUTED
            behind[group] = tracks[:group]
    if "" in tracks:
        raise FormatError(f"group {tracks.index('')} is neither fetched nor computed")
    return _total(catalog, tracks, behind)


def _total(catalog: Catalog, tracks: Sequence[str], behind: Mapping[int, Sequence[str]]) -> float:
    """Sum the losses; ``behind`` maps computed groups to the tracks before them at that time."""
    total = 0.0
    for group, name in enumerate(tracks):
        if name != RECOMPUTED:
            total += catalog.track(name).loss[group]
        else:
            before = behind.get(group, tracks[:group])
            total += INHERITED * sum(
                _handed_on(catalog, other, before, group, len(tracks)) for other in sorted(set(before))
            )
    return total


def _handed_on(catalog: Catalog, name: str, before: Sequence[str], group: int, groups: int) -> float:
    """Return the loss that a recomputed group would inherit in full from the groups before it on track ``name``."""
    if name == RECOMPUTED:
        return 0.0
    losses = catalog.track(name).loss
    # These groups are as far from the end of the prompt as the first groups are from this one.
    nearness = losses[groups - group :]
    everything = sum(nearness)
    if not everything:
        return 0.0
    share = sum(near for near, other in zip(nearness, before, strict=True) if other == name) / everything
    return losses[group] * share
