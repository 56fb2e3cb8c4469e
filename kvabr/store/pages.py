"""Pages: catalog entries of up to 16 consecutive groups, so that a lookup does not need a catalog. No I/O.

A page can be found by the chained digest of any of its groups, so a player finds it from a prompt. The player checks
frames against the page's digests, and the page against the prompt's digests.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Annotated, Any

from msgspec import Meta

from kvabr.store.names import PAGE_GROUPS, FramePlace, place
from kvabr.types.catalog import (
    MAX_GROUPS,
    MAX_TRACKS,
    Catalog,
    CommonFacts,
    Level,
    check_tracks,
    level_of,
)
from kvabr.types.digests import DIGEST, kind_of
from kvabr.types.errors import FormatError
from kvabr.types.kv import MAX_FRAME_BYTES, KVSpec
from kvabr.types.naming import check_track_name
from kvabr.types.records import Sha256, check, fields_of, read, to_json
from kvabr.types.tails import Loss
from kvabr.types.units import Unit, units_of, with_snapshots_of

SCHEMA = "kvabr.page/1"
MAX_PAGE_BYTES = 512 << 10
_MAX_JSON_BYTES = 4 << 20
_Few = Meta(max_length=PAGE_GROUPS * 4)
_Number = Annotated[int, Meta(ge=0, le=MAX_GROUPS)]


@dataclass(frozen=True, slots=True)
class PageTrack:
    """Consecutive groups of one published track."""

    name: str
    first: _Number
    """Number of the first group within its layer class."""
    bytes: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_FRAME_BYTES)], ...], _Few]
    digests: Annotated[tuple[Annotated[str, Meta(pattern=rf"^{DIGEST}\Z")], ...], _Few]
    loss: Annotated[tuple[Loss, ...], _Few]


@dataclass(frozen=True)
class Page(CommonFacts):
    """Facts about consecutive groups of tokens. It may be from an untrusted source."""

    spec: KVSpec
    levels: Annotated[tuple[Level, ...], Meta(min_length=1, max_length=MAX_TRACKS)]
    """Levels, base first, each after the level that it refines."""
    chunks: Annotated[tuple[Sha256, ...], Meta(min_length=1, max_length=PAGE_GROUPS)]
    first: _Number
    """Number of the first group, a multiple of `PAGE_GROUPS`."""
    tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    tracks: Annotated[tuple[PageTrack, ...], Meta(min_length=1, max_length=MAX_TRACKS * 16)]
    """Published tracks, except those of layer classes without groups in this page."""
    position: Annotated[int, Meta(ge=0, le=1 << 32)] = 0

    def __post_init__(self) -> None:
        check(self, "page")
        check_tracks(self.levels, "page")
        size, groups = self.spec.group_tokens, len(self.chunks)
        if self.spec.part_of is not None or self.first % PAGE_GROUPS:
            raise FormatError(f"page: cannot begin at group {self.first}, or has only one layer class of its model")
        if not (groups - 1) * size < self.tokens <= groups * size:
            raise FormatError(f"page: {self.tokens} tokens do not fill {groups} groups")
        if len(self.by_name) < len(self.tracks) or not self.by_name.keys() <= self._levels_by_track.keys():
            raise FormatError("page: a track is listed twice, or has no data")
        for track in self.tracks:
            check_track_name(track.name)
            if not 0 < len(track.bytes) == len(track.digests) == len(track.loss):
                raise FormatError(f"page: track {track.name} must list bytes, digest and loss of each group")
            if any(kind_of(digest) != self.digest_kind for digest in track.digests):
                raise FormatError(f"page: track {track.name} has digests of several kinds")
        self._check_parts()

    def _check_parts(self) -> None:
        for level, (number, part) in itertools.product(self.levels, enumerate(self.spec.parts)):
            if part.only.kind == "state":
                if level.pack(number) > 1:
                    raise FormatError(f"page: {level.name}: a page cannot have snapshots of a state")
                continue
            track = self.by_name.get(name := part.track_name(level.name))
            if track is None or track.first != self.first or len(track.bytes) != len(self.chunks):
                raise FormatError(f"page: groups of track {name} are missing")

    @cached_property
    def by_name(self) -> dict[str, PageTrack]:
        """Published tracks by name."""
        return {track.name: track for track in self.tracks}

    @cached_property
    def _levels_by_track(self) -> dict[str, tuple[Level, int]]:
        parts = list(enumerate(self.spec.parts))
        return {part.track_name(level.name): (level, number) for level in self.levels for number, part in parts}

    @property
    def digest_kind(self) -> str:
        """Kind of the frames' digests."""
        return kind_of(self.tracks[0].digests[0])

    @cached_property
    def kind(self) -> str:
        """Digest that is equal for pages that can be played together, see `page_kind`."""
        return page_kind(self.spec, self.levels, self.profile, self.digest_kind)

    @property
    def whole(self) -> bool:
        """True if the page is full."""
        return self.tokens == PAGE_GROUPS * self.spec.group_tokens

    def pack_of(self, track: str) -> int:
        """Return the number of a track's groups in one object."""
        level, part = self._levels_by_track[track]
        return level.pack(part)

    def place(self, track: str, group: int) -> FramePlace | None:
        """Return where a published frame is, or None."""
        found = self.by_name.get(track)
        if found is None:
            return None
        return place(found.first, found.bytes, found.digests, self.pack_of(track), group)

    @cached_property
    def base_objects(self) -> frozenset[str]:
        """Names of the objects with base frames."""
        names = (part.track_name(self.levels[0].name) for part in self.spec.parts)
        tracks = (track for name in names if (track := self.by_name.get(name)) is not None)
        places = (self.place(track.name, track.first + at) for track in tracks for at in range(len(track.bytes)))
        return frozenset(place.name for place in places if place is not None)

    def shared(self, digests: Sequence[str]) -> int:
        """Return the number of groups in common with a prompt, given its chained digests or prefixes of these."""
        pairs = zip(self.chunks, digests[self.first :], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0].startswith(pair[1]), pairs))

    def fits(self, spec: KVSpec, *, any_dtype: bool) -> bool:
        """Return True if an engine with this spec can play the page."""
        wanted = with_snapshots_of(spec, self.spec)
        wanted = wanted.with_dtypes(self.spec) if any_dtype else wanted
        return wanted.digest() == self.spec.digest()

    def dumps(self) -> bytes:
        """Return the stored form of the page."""
        always = ("profile", "profile_bytes", "prefill", "loss_method")
        value = {"schema": SCHEMA, **to_json(self, *always)}
        return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)

    @classmethod
    def loads(cls, data: bytes | memoryview) -> Page:
        """Parse a stored page from an untrusted source; raise `FormatError` if it is damaged."""
        reader = zlib.decompressobj()
        try:
            text = reader.decompress(data, _MAX_JSON_BYTES)
        except zlib.error as error:
            raise FormatError(f"page: cannot be unpacked ({error})") from error
        if not reader.eof or reader.unused_data:
            raise FormatError("page: truncated, too long, or with trailing bytes")
        return read(text, cls, "page", SCHEMA)


def page_kind(spec: KVSpec, levels: Iterable[Level], profile: str | None, digest: str) -> str:
    """Return a digest of everything that affects decoding: spec, levels, profile, kind of digests."""
    decides = [spec.digest().hex(), [[level.name, level.refines] for level in levels], profile, digest]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def pages_of(catalog: Catalog) -> list[Page]:
    """Return the pages of an asset."""
    units: list[list[tuple[int, Unit]]] = [[] for _ in range(0, len(catalog.chunks), PAGE_GROUPS)]
    for index, unit in enumerate(units_of(catalog.spec, catalog.tokens)):
        units[unit.chunk // PAGE_GROUPS].append((index, unit))
    levels, facts = tuple(map(level_of, catalog.tracks)), fields_of(catalog, CommonFacts)
    pages = []
    for number, own in enumerate(units):
        first, size = number * PAGE_GROUPS, catalog.spec.group_tokens
        chunks = catalog.chunks[first : first + PAGE_GROUPS]
        tokens = min((first + len(chunks)) * size, catalog.tokens) - first * size
        tracks = tuple(_tracks(catalog, own))
        pages.append(Page(catalog.spec, levels, chunks, first, tokens, tracks, catalog.position, **facts))
    return pages


def _tracks(catalog: Catalog, units: Sequence[tuple[int, Unit]]) -> list[PageTrack]:
    found = []
    for track in catalog.tracks:
        for number, part in enumerate(catalog.spec.parts):
            own = [(index, unit.group) for index, unit in units if unit.part == number]
            if own:
                places = [index for index, _ in own]
                lists = ([values[index] for index in places] for values in (track.bytes, track.digests, track.loss))
                found.append(PageTrack(part.track_name(track.name), own[0][1], *map(tuple, lists)))  # type: ignore[arg-type]
    return found


def with_pages(catalog: Catalog, pages: Sequence[Page]) -> Catalog:
    """Return the catalog with the sizes, digests and losses of these pages."""
    entries, units = Entries(pages), units_of(catalog.spec, catalog.tokens)
    tracks = [replace(track, **entries.listing(catalog.spec, track, units)) for track in catalog.tracks]
    return replace(catalog, tracks=tuple(tracks))


class Entries(dict[tuple[str, int], tuple[int, str, float]]):
    """Bytes, digest and loss of each published group, by track and group."""

    def __init__(self, pages: Sequence[Page]) -> None:
        super().__init__()
        for page in pages:
            for track in page.tracks:
                for at, entry in enumerate(zip(track.bytes, track.digests, track.loss, strict=True)):
                    self[track.name, track.first + at] = entry

    def listing(self, spec: KVSpec, level: Level, units: Sequence[Unit]) -> dict[str, Any]:
        """Return bytes, digests and losses of units on a level; raise `FormatError` if a unit is missing."""
        names = [part.track_name(level.name) for part in spec.parts]
        try:
            found = [self[names[unit.part], unit.group] for unit in units]
        except KeyError as error:
            raise FormatError(f"pages: {level.name} lacks a group of {spec.names[0]} or another class") from error
        sizes, digests, losses = zip(*found, strict=True)
        return {"bytes": sizes, "digests": digests, "loss": losses}


def placed(catalog: Catalog, track: str, group: int) -> FramePlace | None:
    """Return where a published frame of an asset is, or None."""
    found = catalog.published.get(track)
    if found is None:
        return None
    return place(0, found.bytes, found.digests, found.pack(catalog.spec.level_of(track)[1]), group)
