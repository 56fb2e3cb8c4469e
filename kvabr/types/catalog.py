"""The catalog of an asset: size, expected loss and digest of each group on each track, as versioned JSON.

Players need only the catalog for decisions. Annotations are the validation rules for untrusted catalogs
(`kvabr.types.records`). Add new fields to `Catalog`, or to `CommonFacts` if prefixes that are found by a store's pages
also need them. With several layer classes, "group" means a unit (`kvabr.types.units`): a track lists all units in order
and is published as one track per class.

Loss is the expected KL divergence from the exact cache, in nats per generated token; losses of groups add up.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from kvabr.types.cost import PrefillCost
from kvabr.types.digests import kind_of
from kvabr.types.errors import AssetError, FormatError, MissingAssetError, UsageError, did_you_mean
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LOOKUP_RUN, TrackNamespace, check_track_name
from kvabr.types.passage import PassageNotes
from kvabr.types.records import IN_MEMORY, Number, Sha256, check, fields_of, own_state, read, to_json
from kvabr.types.tails import MAX_LOSS, Loss, Tails, check_tails, losses_with_tail, share_after_tail, tails_after
from kvabr.types.units import COMPUTED, Span, Unit, count_of, cuts, hit, prefix_units, units_of

T = TypeVar("T")

_TRACK_ORDER = ("name", "refines", "decode_s", "measured", "tails", "packs", "bytes", "loss", "digests")


@dataclass(frozen=True, slots=True)
class Quality:
    """Measured quality of the whole cache on one track."""

    kl: Number
    """Mean KL divergence from the exact cache, nats per token of the continuation."""
    dnll: Number
    """Change of the mean negative log-likelihood of the true continuation, nats per token."""
    top1: Number
    """Fraction of continuation tokens for which the most likely token is unchanged."""
    kl8: Number | None = None
    """KL divergence over the first 8 tokens; None for a shorter continuation."""
    kl32: Number | None = None
    """KL divergence over the first 32 tokens; None for a shorter continuation."""

    def __post_init__(self) -> None:
        check(self, "measured quality")

    @property
    def loss(self) -> float:
        """Expected loss of an answer, nats per token: the mean of `kl8`, `kl32` and `kl`.

        The first tokens of an answer lose most, which the mean over a long answer hides.
        """
        lengths = [kl for kl in (self.kl8, self.kl32, self.kl) if kl is not None]
        return sum(lengths) / len(lengths)


@dataclass(frozen=True)
class Level:
    """A compression level: a track without its groups."""

    name: str
    refines: str | None = field(default=None, kw_only=True)
    """Track to decode first; None if this track is self-contained."""
    decode_s: Annotated[float, Meta(ge=0, le=1e9)] = field(default=0.0, kw_only=True)
    """Seconds for one thread of the publisher to verify and decode a full group; 0.0 if not measured."""
    tails: Tails = field(default=(), kw_only=True)
    """Remaining loss after computed tails, see `kvabr.types.tails`."""
    packs: Annotated[tuple[Annotated[int, Meta(ge=1, le=LOOKUP_RUN)], ...], Meta(max_length=16)] = field(
        default=(), kw_only=True
    )
    """Number of consecutive groups per object, by layer class; empty means 1 (`docs/design/store.md`)."""

    def __post_init__(self) -> None:
        check_track_name(self.name)
        check(self, f"track {self.name}")
        check_tails(self.tails, f"track {self.name}")
        if any(pack & (pack - 1) for pack in self.packs):
            raise FormatError(f"track {self.name}: groups per object must be powers of two, got {self.packs}")

    def __getstate__(self) -> dict[str, Any]:
        return own_state(self)

    def pack(self, part: int) -> int:
        """Return the number of groups per object for a layer class."""
        return self.packs[part] if part < len(self.packs) else 1

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return to_json(self, "refines", "decode_s", "measured", last=_TRACK_ORDER)


@dataclass(frozen=True)
class Track(Level):
    """One compression level of one asset."""

    bytes: tuple[Annotated[int, Meta(ge=1, le=1 << 40)], ...]
    """Size of each group's frame in bytes, with header."""
    loss: tuple[Loss, ...]
    """Expected loss of each group, decoded with the layers below."""
    digests: tuple[Annotated[str, Meta(max_length=80)], ...]
    """Digest of each group's frame, all of one kind (`kvabr.types.digests`)."""
    measured: Quality | None = field(default=None, kw_only=True)

    @cached_property  # policies read this at every decision
    def total_bytes(self) -> int:
        """Bytes of the whole track."""
        return sum(self.bytes)

    @cached_property
    def total_loss(self) -> float:
        """Expected loss of the whole cache, nats per generated token."""
        return sum(self.loss)


@dataclass(frozen=True, slots=True)
class Mix:
    """A cache of groups from several tracks, with predicted and measured loss."""

    tracks: tuple[Annotated[str, Meta(max_length=64)], ...]
    """Track of each group, or ``recomputed``."""
    predicted: Number
    measured: Number

    def __post_init__(self) -> None:
        check(self, "mix")


def level_of(track: Level) -> Level:
    """Return a track without its groups."""
    return Level(**fields_of(track, Level))


def groups_of(track: Track, groups: Sequence[int], alike: Sequence[int]) -> Track:
    """Return a track with only some groups; the groups ``alike`` determine the losses."""
    sizes, digests, loss = _some(track.bytes, groups), _some(track.digests, groups), _some(track.loss, alike)
    return replace(track, bytes=sizes, loss=loss, digests=digests, measured=None)


def _some(values: Sequence[T], places: Sequence[int]) -> tuple[T, ...]:
    if isinstance(places, range) and places.step == 1:
        return tuple(values[places.start : places.stop])
    return tuple(values[place] for place in places)


def check_tracks(tracks: Sequence[Level], what: str) -> None:
    """Raise `FormatError` if a track is listed twice, or before the track that it refines."""
    seen: set[str] = set()
    for track in tracks:
        if track.name in seen:
            raise FormatError(f"{what}: track {track.name} is listed twice")
        if track.refines is not None and track.refines not in seen:
            raise FormatError(f"{what}: track {track.name} refines {track.refines!r}, which is not listed before it")
        seen.add(track.name)


__all__ = [
    "MAX_CATALOG_BYTES",
    "MAX_GROUPS",
    "MAX_PROFILE_BYTES",
    "MAX_TRACKS",
    "RECOMPUTED",
    "Catalog",
    "CommonFacts",
    "Mix",
    "Quality",
    "Track",
]

MAX_CATALOG_BYTES = 32 << 20
"""Maximum size of a catalog in bytes. 11 tracks of a million tokens in groups of 128 take 11 MB."""
MAX_PROFILE_BYTES = 1 << 29
MAX_GROUPS = 1 << 20
MAX_TRACKS = 64
SCHEMA = "kvabr.catalog/1"
_ORDER = (
    *("namespace", "spec", "tokens", "position", "passage", "source", "chunks", "profile", "profile_bytes", "prefill"),
    *("loss_method", "mixes", "tracks"),
)
_ALWAYS = "source", "profile", "profile_bytes", "prefill", "loss_method", "mixes"
"""Fields that are written even at their default value."""
RECOMPUTED = "recomputed"


@dataclass(frozen=True)
class CommonFacts:
    """Facts that all assets of one publisher with the same spec and tracks have in common."""

    profile: Sha256 | None = field(default=None, kw_only=True)
    """SHA-256 of the codec profile file, hex; None if no track needs one."""
    profile_bytes: Annotated[int, Meta(ge=0, le=MAX_PROFILE_BYTES)] = field(default=0, kw_only=True)
    prefill: PrefillCost | None = field(default=None, kw_only=True)
    """Cost of a prefill on the publisher's machine; replays use it by default."""
    loss_method: Annotated[str, Meta(max_length=1 << 15)] = field(default="", kw_only=True)
    estimated: bool = field(default=False, kw_only=True)
    """True if the losses are estimated from another asset, as engines do. Such an asset may be replaced."""


@dataclass(frozen=True)
class Catalog(CommonFacts):
    """An asset as a player sees it."""

    namespace: TrackNamespace
    spec: KVSpec
    tokens: Annotated[int, Meta(ge=1)]
    chunks: tuple[Annotated[str, Meta(max_length=64)], ...]
    """Chained prompt digest of each group, see `kvabr.types.naming.chain`."""
    tracks: Annotated[tuple[Track, ...], Meta(min_length=1, max_length=MAX_TRACKS)]
    mixes: Annotated[tuple[Mix, ...], Meta(max_length=256)] = ()
    asked: tuple[Loss, ...] = ()
    """Share of each group in the loss after questions about the text, for any track; empty if not measured."""
    source: Annotated[str, Meta(max_length=1 << 15)] = ""
    position: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    """Tokens of the prompt before this asset; positive for an asset named by key or a placed passage (`at`)."""
    passage: PassageNotes | None = None
    offset: int = field(default=0, metadata=IN_MEMORY)
    """Number of published groups before this catalog's first group: group ``g`` is published as ``offset + g``."""
    chosen: tuple[Unit, ...] | None = field(default=None, metadata=IN_MEMORY)
    """Units of the catalog, if it does not have all units; None: all units."""
    sources: tuple[Catalog, ...] = field(default=(), metadata=IN_MEMORY)
    """Passages of a joined catalog (`kvabr.types.joined`). Its groups are the units in `chosen`, of any length, each
    with a chunk.
    """
    tail: int = field(default=0, metadata=IN_MEMORY)
    """Number of tokens that the engine computes after this catalog. The losses are those after these tokens."""
    whole: Catalog | None = field(default=None, compare=False, repr=False, metadata=IN_MEMORY)

    def __post_init__(self) -> None:
        check(self, "catalog")
        chunks = self.spec.groups(self.tokens)
        if self.sources and self.chosen is not None:
            chunks = len(self.chosen)
        if not 0 < chunks <= MAX_GROUPS:
            raise FormatError(f"catalog: must have 1 to {MAX_GROUPS} groups, got {chunks} with {self.tokens} tokens")
        if self.spec.part_of is not None:
            raise FormatError("catalog: the spec describes only one layer class of the model")
        if self.position and not self.every_token:
            raise FormatError(f"catalog: {self.spec.model}: an asset cannot begin at token {self.position} of a prompt")
        if self.passage is not None:
            self.passage.check(self.spec, self.tokens)
        if len(self.chunks) != chunks:
            raise FormatError(f"catalog: {chunks} groups but {len(self.chunks)} prompt digests")
        check_tracks(self.tracks, "catalog")
        self._check_groups()

    def _check_groups(self) -> None:
        for track in self.tracks:
            if not len(track.bytes) == len(track.loss) == len(track.digests) == self.groups:
                raise FormatError(
                    f"catalog: track {track.name} must list bytes, loss and digest of each of {self.groups} groups"
                )
        if self.asked and len(self.asked) != self.groups:
            raise FormatError(f"catalog: asked must list shares of {self.groups} groups, got {len(self.asked)}")
        if all(track.refines is not None for track in self.tracks):
            raise FormatError("catalog: every track refines another one; at least one track must stand alone")

    def check_frame_sizes(self) -> None:
        """Raise `FormatError` if a group is larger than a cache can need."""
        for track in self.tracks:
            self.spec.check_frame_sizes(f"catalog: track {track.name}", track.bytes)

    @cached_property
    def groups(self) -> int:
        """Number of groups (units)."""
        # `_check_groups` compares the count before building untrusted units.
        return count_of(self.spec, self.tokens) if self.chosen is None else len(self.chosen)

    @property
    def digest_kind(self) -> str:
        """See `kvabr.types.digests`."""
        return kind_of(self.tracks[0].digests[0])

    @cached_property
    def every_token(self) -> bool:
        """True if there is a single class that needs every group."""
        return len(self.spec.classes) == 1 and self.spec.only.kind in ("full", "latent")

    @cached_property
    def even(self) -> bool:
        """True if all groups except the last have the same length and belong to one asset."""
        return self.every_token and not self.sources

    @property
    def computed(self) -> tuple[int, ...]:
        """Groups that only the engine can provide."""
        if not self.sources:
            return ()
        return tuple(group for group, unit in enumerate(self.units) if unit.source == COMPUTED)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Unit of each group; if groups are `even`, `unit` is faster."""
        return units_of(self.spec, self.tokens) if self.chosen is None else self.chosen

    def unit(self, group: int) -> Unit:
        """Return the unit of a group; its ``chunk`` is an index into `chunks`."""
        if not self.even:
            return self.units[group]
        first, last = self.spec.group_range(group, self.tokens)
        free = None if self.passage is None else first
        return Unit(0, self.offset + group, group, self.first_token + first, last - first, free)

    def title(self, group: int) -> str:
        """Return a group's name for messages: ``group 3``, or ``window512 #3`` with several layer classes."""
        unit = self.unit(group)
        if self.sources:
            own = "text" if unit.source == COMPUTED else f"passage {unit.source} group {unit.group}"
            return f"{own} at token {unit.first}"
        return f"{self.spec.names[unit.part]} #{unit.group}" if len(self.spec.classes) > 1 else f"group {unit.group}"

    @property
    def titles(self) -> tuple[str, ...]:
        """The `title` of every group if there are several layer classes; otherwise empty."""
        return tuple(map(self.title, range(self.groups))) if len(self.spec.classes) > 1 else ()

    @property
    def spans(self) -> tuple[Span, ...]:
        """For each layer class, the tokens that a play of this `to_play` catalog delivers."""
        if self.every_token:
            return (Span(self.first_token, self.tokens),)
        found = []
        for part in range(len(self.spec.parts)):
            own = [unit for unit in self.units if unit.part == part]
            first = min((unit.first for unit in own), default=self.first_token + self.tokens)
            found.append(Span(first, sum(unit.tokens for unit in own)))
        return tuple(found)

    @cached_property
    def published(self) -> dict[str, Track]:
        """Tracks by published name, one per class and level. In a play's catalog, some groups are missing."""
        if len(self.spec.parts) == 1:
            return self.by_name
        found = {}
        for number, part in enumerate(self.spec.parts):
            own = [index for index, unit in enumerate(self.units) if unit.part == number]
            for track in self.tracks:
                name, lower = part.track_name(track.name), track.refines
                lower = None if lower is None else part.track_name(lower)
                found[name] = replace(groups_of(track, own, own), name=name, refines=lower)
        return found

    def known_digests(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield each published track name with its group digests; "" for groups that this catalog does not have."""
        for track in self.tracks:
            if self.every_token:
                yield track.name, track.digests
                continue
            listed: dict[str, list[str]] = {}
            for group, digest in enumerate(track.digests):
                name, number = self.address(group, track.name)
                digests = listed.setdefault(name, [])
                digests += [""] * (number + 1 - len(digests))
                digests[number] = digest
            yield from listed.items()

    def published_track(self, name: str) -> Track:
        """Return the track published under ``name``; raise `FormatError` if there is none."""
        return self.published.get(name) or self.track(name)

    def namespace_of(self, group: int) -> TrackNamespace:
        """Return the namespace of a published group; that of the prompt if the group is in no asset."""
        source = self.units[group].source if self.sources else COMPUTED
        return self.namespace if source == COMPUTED else self.sources[source].namespace

    def address(self, group: int, track: str) -> tuple[str, int]:
        """Return the published name of a group's track on a level, and the group's number in that track."""
        if self.even:
            return track, self.offset + group
        unit = self.units[group]
        return self.spec.parts[unit.part].track_name(track), unit.group

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the contents, hex; identifies the catalog in processes of the same kvabr version."""
        return hashlib.sha256(pickle.dumps(self, pickle.HIGHEST_PROTOCOL)).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        known = vars(self).get("digest")
        return own_state(self) | ({} if known is None else {"digest": known})

    @cached_property
    def by_name(self) -> dict[str, Track]:
        """Tracks by name."""
        return {track.name: track for track in self.tracks}

    @cached_property
    def fp16_bytes(self) -> int:
        """Bytes of the exact cache at 16 bits per element."""
        if self.every_token:
            return self.spec.fp16_bytes(self.tokens)
        return sum(2 * unit.tokens * self.spec.parts[unit.part].elements_per_token for unit in self.units)

    def track(self, name: str) -> Track:
        """Return the track named ``name``; raise `FormatError` with the existing tracks if there is none."""
        try:
            return self.by_name[name]
        except KeyError:
            known = self.by_name
            raise FormatError(
                f"no track {name!r} in this asset{did_you_mean(name, known)}; choose from {', '.join(known)}"
            ) from None

    def group_tokens(self, group: int) -> int:
        """Return the number of tokens in ``group`` (rows for a snapshot)."""
        if not self.even:
            return self.units[group].tokens
        first, last = self.spec.group_range(group, self.tokens)
        return last - first

    def share(self, group: int) -> float:
        """Return the size of a group relative to the largest full group, to which `Track.decode_s` refers."""
        if self.even:
            return self.group_tokens(group) / self.spec.group_tokens
        unit, largest = self.units[group], self.spec.largest
        elements = unit.tokens * self.spec.parts[unit.part].elements_per_token
        return elements / (largest.rows * largest.elements_per_token)

    @property
    def shares(self) -> list[float]:
        """The `share` of every group."""
        if self.even:
            return [1.0] * (self.groups - 1) + [self.share(self.groups - 1)]
        return list(map(self.share, range(self.groups)))

    def tokens_before(self, group: int) -> int:
        """Return the number of this catalog's tokens before a group, or before the end if ``group`` is `groups`."""
        if self.even:
            return min(group * self.spec.group_tokens, self.tokens)
        if group >= self.groups:
            return self.tokens
        if self.sources:
            return self.units[group].first - self.first_token
        return self.units[group].chunk * self.spec.group_tokens if group else 0

    def group_at(self, token: int) -> int:
        """Return the group that contains a token of the prompt."""
        place = token - self.first_token
        if not self.sources:
            return place // self.spec.group_tokens
        return bisect_right(range(self.groups), place, key=self.tokens_before) - 1

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        return tuple(cuts(self.spec, self.units, self.offset, self.first_token + self.tokens))

    def cut(self, group: int) -> int:
        """Return the last group, at most ``group``, from which an engine can compute the rest of the prompt.

        The engine needs every unit of the prefix before this group; group 0 is always possible.
        """
        return group if self.every_token else self._cuts[bisect_right(self._cuts, group) - 1]

    def playable(self, groups: int) -> tuple[int, str | None]:
        """Return the longest playable prefix of at most ``groups`` groups, and the limiting class; see `units.hit`."""
        if self.every_token:
            return min(groups, len(self.chunks)), None
        asset = self.whole or self
        found, limit = hit(self.spec, self.offset + min(groups, len(self.chunks)), asset.first_token + asset.tokens)
        return max(0, found - self.offset), limit

    def prefix(self, groups: int, end: int | None = None) -> Catalog:
        """Return the catalog of the first ``groups`` groups of tokens (1 to all), to continue a prompt after them.

        It has the same published namespace, no measurements of the whole cache, and only the units needed
        (`kvabr.types.units.needed`). For engines that accept only whole blocks, ``end`` is the token in the last group
        where the prompt continues (None: after the group). Raise `UsageError` if there is no such prefix, or if this is
        a passage.
        """
        size = self.spec.group_tokens
        if self.passage is not None:
            raise UsageError(f"{self.namespace.prompt[:12]}... is a passage; play it as a part of a prompt")
        if not 1 <= groups <= len(self.chunks):
            raise UsageError(f"cannot take a prefix of {groups} groups: the asset has {len(self.chunks)}")
        tokens = self.tokens_before(groups) if self.every_token else min(groups * size, self.tokens)
        if end is not None and not tokens - size < end <= tokens:
            raise UsageError(
                f"a prefix of {groups} groups must end after token {tokens - size} and at most at {tokens}, got {end}"
            )
        if groups == len(self.chunks) and (self.every_token or (self.chosen is not None and end is None)):
            return self
        if self.every_token:
            shorter = self._slice(0, groups)
            if not (self.even and any(track.tails for track in self.tracks)):
                return shorter
            laid = (losses_with_tail(track.loss, track.tails, groups, 0, size) for track in self.tracks)
            return replace(shorter, tracks=tuple(map(_with_losses, shorter.tracks, laid)))
        if self.whole is not None:
            skipped = self.first_token
            shorter = self.whole.prefix(self.offset + groups, None if end is None else skipped + end)
            return shorter.suffix(self.offset)
        playable, limit = self.playable(groups)
        inside = end is not None and end < tokens and any(each.kind == "state" for each in self.spec.classes)
        if playable < groups or inside:
            what = f"no snapshot of {limit or 'its states'}"
            raise UsageError(f"cannot take a prefix of {groups} groups: there is {what} at its end")
        pairs = prefix_units(self.spec, self.units, self.tokens, tokens, end or tokens)
        picked, alike = zip(*pairs, strict=True)
        tracks = tuple(
            replace(groups_of(track, picked, alike), measured=track.measured if tokens == self.tokens else None)
            for track in self.tracks
        )
        units, chunks = tuple(self.units[index] for index in picked), self.chunks[:groups]
        return replace(self, tokens=tokens, chunks=chunks, tracks=tracks, mixes=(), asked=(), chosen=units, whole=self)

    def with_tail(self, groups: int, tail: int) -> Catalog:
        """Return the catalog of a prefix, followed by ``tail`` tokens that the engine computes.

        Generation begins after the tail; losses are those after it, see `kvabr.types.tails`. Errors as for `prefix`.
        """
        if not tail:
            return self.prefix(groups)
        shorter = self._slice(0, groups) if self.even and 0 < groups < len(self.chunks) else self.prefix(groups)
        tracks = []
        for track, whole in zip(shorter.tracks, self.tracks, strict=True):
            if self.even:
                losses = losses_with_tail(whole.loss, whole.tails, groups, tail, self.spec.group_tokens, self.asked)
            else:
                scale = share_after_tail(whole.tails, tail)
                losses = tuple(min(MAX_LOSS, scale * loss) for loss in track.loss)
            tracks.append(replace(track, loss=losses, measured=None, tails=tails_after(whole.tails, tail)))
        return replace(shorter, tracks=tuple(tracks), mixes=(), asked=(), tail=self.tail + tail)

    @cached_property
    def to_play(self) -> Catalog:
        """The part of this catalog that a play of the whole cache needs."""
        return self.prefix(len(self.chunks))

    def suffix(self, groups: int) -> Catalog:
        """Return the catalog to play for an engine that already has the first ``groups`` groups (0 to all but one).

        Groups are renumbered from 0, `offset` is increased by the skipped groups, and measurements of the whole cache
        are dropped.
        """
        if not 0 <= groups < len(self.chunks):
            raise UsageError(f"groups to skip must be 0 to {len(self.chunks) - 1}, got {groups}")
        if not groups:
            return self
        if self.every_token:
            return self._slice(groups, self.groups)
        play, tokens = self.to_play, self.tokens - groups * self.spec.group_tokens
        left = [index for index, unit in enumerate(play.units) if unit.chunk >= groups]
        return replace(
            play,
            tokens=tokens,
            chunks=self.chunks[groups:],
            tracks=tuple(groups_of(track, left, left) for track in play.tracks),
            offset=self.offset + groups,
            chosen=tuple(play.units[index]._replace(chunk=play.units[index].chunk - groups) for index in left),
        )

    def at(self, position: int) -> Catalog:
        """Return this passage, placed after ``position`` tokens of a prompt; raise `UsageError` for other assets."""
        if self.passage is None:
            raise UsageError(
                f"{self.namespace.prompt[:12]}...: the cache of a prompt cannot be moved; only passages can"
            )
        return replace(self, position=position)

    def with_tracks(self, names: Container[str]) -> Catalog:
        """Return this catalog with only the named tracks."""
        tracks = tuple(track for track in self.tracks if track.name in names)
        whole = None if self.whole is None else self.whole.with_tracks(names)
        return self if len(tracks) == len(self.tracks) else replace(self, tracks=tracks, whole=whole)

    @property
    def first_token(self) -> int:
        """Number of the prompt's tokens before this catalog's first token."""
        return self.position + self.offset * self.spec.group_tokens

    def _slice(self, first: int, last: int) -> Catalog:
        if self.passage is not None:
            raise UsageError("a passage cannot be cut: it is played whole")
        tokens = self.tokens_before(last) - self.tokens_before(first)
        tracks = tuple(groups_of(track, range(first, last), range(first, last)) for track in self.tracks)
        offset, position, units = self.offset + first, self.position, self.chosen
        if self.sources:
            offset, position = 0, self.units[first].first
            units = tuple(unit._replace(chunk=unit.chunk - first) for unit in self.units[first:last])
        return replace(
            self,
            tokens=tokens,
            chunks=self.chunks[first:last],
            tracks=tracks,
            mixes=(),
            asked=self.asked[first:last],
            offset=offset,
            position=position,
            chosen=units,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, equal for equal catalogs; raise `UsageError` for a joined catalog."""
        if self.sources:
            raise UsageError("a prompt that is joined from passages is not published")
        return {"schema": SCHEMA, **to_json(self, *_ALWAYS, last=_ORDER)}

    def dumps(self) -> str:
        """Return the catalog as JSON text."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    @classmethod
    def loads(cls, text: str | bytes) -> Catalog:
        """Parse an untrusted result of `dumps`; raise `FormatError` if it is invalid. Does not block other threads."""
        if len(text) > MAX_CATALOG_BYTES:
            raise FormatError(f"catalog: {len(text)} bytes, more than the {MAX_CATALOG_BYTES} allowed")
        data = text.encode(errors="replace") if isinstance(text, str) else text
        catalog = read(data, cls, "catalog", SCHEMA)
        if catalog.passage is not None and catalog.position:
            raise FormatError(f"catalog: a passage cannot have a position, got {catalog.position}")
        return catalog

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Catalog:
        """Read a catalog file; raise `AssetError` if it cannot be read, and the errors of `loads`."""
        try:
            with Path(path).open("rb") as file:
                return cls.loads(file.read(MAX_CATALOG_BYTES + 1))
        except FileNotFoundError as error:
            raise MissingAssetError(f"{path}: there is no catalog; is this an asset?") from error
        except OSError as error:
            raise AssetError(f"{path}: cannot read the catalog ({error.strerror}); is this an asset?") from error
        except FormatError as error:
            raise type(error)(f"{path}: {error}") from error


def _with_losses(track: Track, losses: tuple[float, ...]) -> Track:
    return replace(track, loss=losses)
