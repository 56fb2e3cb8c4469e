"""Spans: runs of groups on all tracks in one object, and the pointers into them.

A span has a head, which lists what is in it, and then all frames, track by track: the base of all its groups is one
range. Where the store has a head, a player can play it: frames are checked against the digests in it, and it against
the chained digests of the prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from kvabr.store.objects.layout import MAX_SPAN_BYTES, MAX_SPAN_GROUPS, SPAN_GROUPS, SPAN_NAME, StoreOffer
from kvabr.types.catalog import MAX_GROUPS, MAX_TRACKS, Catalog
from kvabr.types.digests import DIGEST, kind_of
from kvabr.types.errors import FormatError, UsageError, VersionError
from kvabr.types.naming import check_track_name
from kvabr.types.records import IN_MEMORY, Sha256, decode, to_json
from kvabr.types.tails import Loss
from kvabr.types.units import Unit, units_of

HEAD_BYTES = 16 << 10
"""Bytes to ask for first of a span: its head is in them unless the model has many layer classes."""
MAX_HEAD_BYTES = 512 << 10
"""Bytes of a span's header and packed head."""
_MAX_HEAD_JSON = 2 << 20
MAX_POINTER_BYTES = MAX_HEAD_BYTES + (1 << 10)
_Few = Meta(max_length=MAX_SPAN_GROUPS)
_Number = Annotated[int, Meta(ge=0, le=MAX_GROUPS)]

_SPAN = struct.Struct("<4sHHIQ32s")
"""Magic, version, 0, bytes of the packed head, bytes of the whole object, SHA-256 of the packed head."""
HEADER_BYTES = _SPAN.size
_SPAN_MAGIC, _SPAN_VERSION = b"KVSP", 1
_POINTER = struct.Struct("<4sHH")
"""Magic, version, bytes of the span's name; the name and the span's header and head follow."""
_POINTER_MAGIC, _POINTER_VERSION = b"KVPT", 1


@dataclass(frozen=True, slots=True)
class SpanTrack:
    """The units of one published track in one span, in order."""

    name: str
    first: _Number
    """Number of the first unit among those of its class."""
    bytes: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_SPAN_BYTES)], ...], _Few]
    digests: Annotated[tuple[Annotated[str, Meta(pattern=rf"^{DIGEST}\Z")], ...], _Few]
    """Digest of each frame, see `kvabr.types.digests`."""
    loss: Annotated[tuple[Loss, ...], _Few]


@dataclass(frozen=True)
class SpanHead:
    """What a span has, and where."""

    digests: Annotated[tuple[Sha256, ...], Meta(min_length=1, max_length=MAX_SPAN_GROUPS)]
    """Chained prompt digest of each group of tokens."""
    first: _Number
    """Number of the first group of tokens, a multiple of the offer's ``span_groups``."""
    tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    """Tokens of all its groups."""
    position: Annotated[int, Meta(ge=0, le=1 << 32)]
    """Tokens of the prompt before the asset that it belongs to, see `Catalog.position`."""
    tracks: Annotated[tuple[SpanTrack, ...], Meta(min_length=1, max_length=MAX_TRACKS * 16)]
    """Published tracks, base first, in the order of their frames. A class without units here is left out."""
    begin: int = field(default=0, metadata=IN_MEMORY)
    """Bytes before the first frame."""

    @cached_property
    def total(self) -> int:
        """Bytes of the whole object."""
        return self.begin + sum(sum(track.bytes) for track in self.tracks)

    @cached_property
    def by_name(self) -> dict[str, SpanTrack]:
        """Tracks by name."""
        return {track.name: track for track in self.tracks}

    @cached_property
    def _begins(self) -> dict[str, tuple[int, ...]]:
        begins, at = {}, self.begin
        for track in self.tracks:
            places = []
            for size in track.bytes:
                places.append(at)
                at += size
            begins[track.name] = (*places, at)
        return begins

    def place(self, track: str, group: int) -> tuple[int, int]:
        """Return where the frame of a unit begins and ends; ``group`` is its number in its class.

        Raises `FormatError` if it is not in this span.
        """
        found = self.by_name.get(track)
        if found is None or not 0 <= group - found.first < len(found.bytes):
            raise FormatError(f"span {self.digests[-1][:16]}: has no group {group} of {track[:80]}")
        begins = self._begins[track]
        return begins[group - found.first], begins[group - found.first + 1]


def encode_span(head: SpanHead, frames: Sequence[bytes | memoryview]) -> bytes:
    """Return a span; ``frames`` are those of ``head.tracks``, track by track. `SpanHead.begin` is not read."""
    packed = encode_head(head)
    return b"".join((packed, *frames))


def encode_head(head: SpanHead) -> bytes:
    """Return what comes before a span's frames: header and packed head. `SpanHead.begin` is not read."""
    packed = zlib.compress(json.dumps(to_json(head), separators=(",", ":")).encode(), 9)
    begin = _SPAN.size + len(packed)
    total = begin + sum(sum(track.bytes) for track in head.tracks)
    if len(packed) > MAX_HEAD_BYTES or total > MAX_SPAN_BYTES:
        raise UsageError(
            f"a span of {len(head.digests)} groups has {total:,} bytes, more than the {MAX_SPAN_BYTES:,} that a store "
            "takes in one request; use smaller groups or fewer tracks"
        )
    return _SPAN.pack(_SPAN_MAGIC, _SPAN_VERSION, 0, len(packed), total, hashlib.sha256(packed).digest()) + packed


def head_bytes(data: bytes | memoryview) -> int:
    """Return how many of a span's first bytes its head takes, given at least the first 52."""
    return _SPAN.size + _span_header(data)[0]


def parse_head(data: bytes | memoryview) -> SpanHead:
    """Parse the head of a span from its first `head_bytes` bytes or more, from an untrusted source."""
    length, total, digest = _span_header(data)
    packed = bytes(data[_SPAN.size : _SPAN.size + length])
    if len(packed) < length:
        raise FormatError(f"span: truncated, {len(packed)} of {length} bytes of its head")
    if hashlib.sha256(packed).digest() != digest:
        raise FormatError("span: its head is damaged (SHA-256 differs)")
    head = replace(decode(_unpacked(packed), SpanHead, "span"), begin=_SPAN.size + length)
    if len(head.by_name) < len(head.tracks):
        raise FormatError("span: has a track twice")
    for track in head.tracks:
        check_track_name(track.name)
        if not 0 < len(track.bytes) == len(track.digests) == len(track.loss) <= len(head.digests):
            raise FormatError(f"span: track {track.name} must list bytes, digest and loss of each of its groups")
    if head.total != total:
        raise FormatError(f"span: {total} bytes, but its head says {head.total}")
    return head


def check_span(head: SpanHead, offer: StoreOffer, digests: Sequence[str] | None = None) -> None:
    """Raise `FormatError` unless a span's head fits its offer, and has the chained digests that are wanted (or any)."""
    if digests is not None and head.digests != tuple(digests):
        raise FormatError(f"span {head.digests[-1][:16]}: is that of another prompt")
    if head.first % offer.span_groups or len(head.digests) > offer.span_groups:
        raise FormatError(
            f"span {head.digests[-1][:16]}: begins at group {head.first}, not where spans of its offer do"
        )
    whole, size = len(head.digests) * offer.spec.group_tokens, offer.spec.group_tokens
    if not whole - size < head.tokens <= whole:
        raise FormatError(f"span {head.digests[-1][:16]}: {head.tokens} tokens do not make {len(head.digests)} groups")
    _check_kind(head, offer)
    names = [track.name for track in head.tracks]
    if [name for name in offer.published if name in head.by_name] != names:
        raise FormatError(f"span {head.digests[-1][:16]}: has other tracks than its offer")
    for level in offer.tracks:
        for part in offer.spec.parts:
            if part.only.kind == "state":
                continue
            track = head.by_name.get(part.track_name(level.name))
            if track is None or track.first != head.first or len(track.bytes) != len(head.digests):
                raise FormatError(f"span {head.digests[-1][:16]}: lacks groups of {part.track_name(level.name)}")


def _check_kind(head: SpanHead, offer: StoreOffer) -> None:
    if any(kind_of(digest) != offer.digest for track in head.tracks for digest in track.digests):
        raise FormatError(f"span {head.digests[-1][:16]}: has digests of another kind than its offer")


def units_by_span(catalog: Catalog, span_groups: int = SPAN_GROUPS) -> list[list[tuple[int, Unit]]]:
    """Return the units of each span of an asset, with their indices in the catalog."""
    spans: list[list[tuple[int, Unit]]] = [[] for _ in range(0, len(catalog.chunks), span_groups)]
    for index, unit in enumerate(units_of(catalog.spec, catalog.tokens)):
        spans[unit.chunk // span_groups].append((index, unit))
    return spans


def head_of(catalog: Catalog, span: int, units: Sequence[tuple[int, Unit]], span_groups: int = SPAN_GROUPS) -> SpanHead:
    """Return the head of one span of an asset; ``units`` are those of `units_by_span`."""
    first, size = span * span_groups, catalog.spec.group_tokens
    digests = catalog.chunks[first : first + span_groups]
    tracks = []
    for track in catalog.tracks:
        for number, part in enumerate(catalog.spec.parts):
            own = [(index, unit.group) for index, unit in units if unit.part == number]
            if own:
                places = [index for index, _ in own]
                tracks.append(
                    SpanTrack(
                        part.track_name(track.name),
                        own[0][1],
                        tuple(track.bytes[index] for index in places),
                        tuple(track.digests[index] for index in places),
                        tuple(track.loss[index] for index in places),
                    )
                )
    tokens = min((first + len(digests)) * size, catalog.tokens) - first * size
    return SpanHead(digests, first, tokens, catalog.position, tuple(tracks))


def listing(catalog: Catalog, heads: Sequence[SpanHead]) -> Catalog:
    """Return the catalog of an asset with the sizes, digests and losses that the heads of its spans have."""
    units, size, spec = units_of(catalog.spec, catalog.tokens), len(heads[0].digests), catalog.spec
    tracks = []
    for track in catalog.tracks:
        names = [part.track_name(track.name) for part in spec.parts]
        places = [(heads[unit.chunk // size].by_name[names[unit.part]], unit.group) for unit in units]
        tracks.append(
            replace(
                track,
                bytes=tuple(found.bytes[group - found.first] for found, group in places),
                digests=tuple(found.digests[group - found.first] for found, group in places),
                loss=tuple(found.loss[group - found.first] for found, group in places),
            )
        )
    return replace(catalog, tracks=tuple(tracks))


# ------------------------------------------------------- pointers


def pointed(head: SpanHead, span_groups: int = SPAN_GROUPS) -> tuple[str, ...]:
    """Return the chained digests of the groups of a span that have a pointer: all but that which names a full span."""
    return head.digests[: span_groups - 1]


def encode_pointer(name: str, head: bytes) -> bytes:
    """Return the pointer to a span, given its name and what `encode_head` made of its head."""
    return _POINTER.pack(_POINTER_MAGIC, _POINTER_VERSION, len(name)) + name.encode() + head


def parse_pointer(data: bytes | memoryview) -> tuple[str, SpanHead]:
    """Parse a pointer from an untrusted source: the name of its span, and the span's head."""
    if len(data) < _POINTER.size or len(data) > MAX_POINTER_BYTES:
        raise FormatError(f"pointer: {len(data)} bytes cannot be one")
    magic, version, length = _POINTER.unpack_from(data)
    _check_magic(magic, version, _POINTER_MAGIC, _POINTER_VERSION, "pointer")
    name = bytes(data[_POINTER.size : _POINTER.size + length]).decode("ascii", "replace")
    if not re.fullmatch(SPAN_NAME, name):
        raise FormatError("pointer: names no span")
    head = parse_head(data[_POINTER.size + length :])
    if not name.startswith(head.digests[-1][:16]):
        raise FormatError("pointer: names another span than the one whose head it has")
    return name, head


def _span_header(data: bytes | memoryview) -> tuple[int, int, bytes]:
    if len(data) < _SPAN.size:
        raise FormatError(f"span: truncated, {len(data)} bytes")
    magic, version, _, length, total, digest = _SPAN.unpack_from(data)
    _check_magic(magic, version, _SPAN_MAGIC, _SPAN_VERSION, "span")
    if not 0 < length <= MAX_HEAD_BYTES or not _SPAN.size + length < total <= MAX_SPAN_BYTES:
        raise FormatError(f"span: a head of {length} bytes in an object of {total} cannot be")
    return length, total, digest


def _check_magic(magic: bytes, version: int, ours: bytes, newest: int, what: str) -> None:
    if magic != ours:
        raise FormatError(f"{what}: begins with {magic!r}, so it is none")
    if version != newest:
        raise VersionError(
            f"{what}: version {version}, this one reads {newest}; it was written by another kvabr, upgrade"
        )


def _unpacked(packed: bytes) -> bytes:
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(packed, _MAX_HEAD_JSON)
    except zlib.error as error:
        raise FormatError(f"span: its head cannot be unpacked ({error})") from error
    if not reader.eof or reader.unused_data:
        raise FormatError("span: its head is truncated, too long, or followed by something else")
    return data
