"""The frame of every group on every track, and its division into objects. Does not import torch.

    magic 4 | version 1 | track length 1 | spec digest 16 | chunk digest 32 | group 4 | first token 8 | tokens 4 |
    payload length 8 | CRC-32 of the payload 4 | track name | CRC-32 of all before 4 | payload

All numbers are unsigned and little-endian. The checksums detect accidental corruption. The catalog's digest of a frame
also detects manipulation; with it the payload's CRC is not checked. The chunk digest binds a frame to one prompt and
position.

The objects of a group, concatenated in the order of their IDs, are its frame. An object's ID is the prompt index of its
first token (draft-shi-moq-kvcache-00). It holds one token, or a run of small tokens; the first object also holds the
frame's header and the payload's head. A payload that is not token-separable, like AC, is cut into slices, numbered from
the group's first token.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from kvabr.codec.base import payload_layout
from kvabr.types import digests
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import check_track_name

MAGIC = b"KVAB"
VERSION = 1
MAX_PAYLOAD = 1 << 40
_FIXED = struct.Struct("<4sBB16s32sIQIQI")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CRC = struct.Struct("<I")


HasDigest = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A frame's header."""

    track: str
    spec_digest: bytes
    """16 bytes, see `KVSpec.digest`."""
    chunk: str
    """Chained prompt digest up to the group's end, 64 hex digits."""
    group: int
    first_token: int
    tokens: int
    payload_bytes: int = 0


def pack(payload: bytes | memoryview, header: FrameHeader) -> bytes:
    """Frame a payload (ignoring ``header.payload_bytes``); raise `FormatError` if a field is out of range."""
    name, it, size = check_track_name(header.track).encode(), header, len(payload)
    if len(it.spec_digest) != 16 or not _DIGEST.fullmatch(it.chunk):
        raise FormatError("a frame needs a spec digest of 16 bytes and a chunk digest of 64 hex digits")
    numbers = it.group, it.first_token, it.tokens, size
    if (
        not (0 <= it.group < 1 << 32 and 0 <= it.first_token < 1 << 64 and 0 < it.tokens < 1 << 32)
        or size > MAX_PAYLOAD
    ):
        raise FormatError(
            f"frame: a field is out of range: group {it.group}, {it.tokens} tokens from {it.first_token}, {size} bytes"
        )
    fixed = MAGIC, VERSION, len(name), it.spec_digest, bytes.fromhex(it.chunk)
    head = _FIXED.pack(*fixed, *numbers, zlib.crc32(payload)) + name
    return b"".join((head, _CRC.pack(zlib.crc32(head)), payload))


def header_bytes(track: str) -> int:
    """Return the number of bytes before a frame's payload."""
    return _FIXED.size + len(track.encode()) + _CRC.size


def unpack(
    frame: bytes | memoryview,
    expect: FrameHeader | None = None,
    digest: str | None = None,
    has_digest: HasDigest | None = None,
) -> tuple[FrameHeader, memoryview]:
    """Check an untrusted frame; return its header and a view of its payload.

    Args:
        frame: the bytes.
        expect: the expected header, except ``payload_bytes``; None accepts any.
        digest: expected digest (`kvabr.types.digests`); None to rely on the payload's checksum.
        has_digest: compares an already computed digest with ``digest``; None to compute it here.

    Raises:
        FormatError: not a frame, another version, truncated, too long, corrupt, or a different digest.
        ForeignError: a valid frame with another header.
    """
    view = memoryview(frame)
    header, begin, crc = _header(view)
    payload = view[begin:]
    if len(payload) != header.payload_bytes:
        there, said = len(payload), header.payload_bytes
        raise FormatError(f"frame: {there} bytes of payload, but its header says {said}; truncated or padded")
    if expect is not None:
        _compare(header, expect)
    # Check the payload last, since only this takes time.
    if digest is None:
        good = False
    elif has_digest is not None:
        good = has_digest(digest)
    else:
        good = digests.has_digest(digest, view)
    if not good and zlib.crc32(payload) != crc:
        raise FormatError("frame: the payload's checksum is wrong; it is corrupt, fetch it again")
    if not good and digest is not None:
        raise FormatError(
            f"frame: its {digests.TITLES[digests.kind_of(digest)]} is not the one in the catalog; "
            "fetch the catalog again, or use another peer"
        )
    return header, payload


def _header(view: memoryview) -> tuple[FrameHeader, int, int]:
    if len(view) < _FIXED.size + _CRC.size:
        raise FormatError(f"frame: {len(view)} bytes are too few for a header; truncated")
    magic, version, name_length, spec, chunk, group, first, tokens, size, crc = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(f"frame: starts with {bytes(magic)!r} instead of {MAGIC!r}; this is not a kvabr group")
    if version != VERSION:
        raise FormatError(f"frame: version {version}, this kvabr reads version {VERSION}; upgrade kvabr")
    begin = _FIXED.size + name_length + _CRC.size
    if len(view) < begin:
        raise FormatError("frame: truncated within its header")
    (head_crc,) = _CRC.unpack_from(view, begin - _CRC.size)
    if zlib.crc32(view[: begin - _CRC.size]) != head_crc:
        raise FormatError("frame: the header's checksum is wrong; it is corrupt, fetch it again")
    try:
        track = check_track_name(bytes(view[_FIXED.size : _FIXED.size + name_length]).decode())
    except UnicodeDecodeError as error:
        raise FormatError("frame: its track name must be UTF-8") from error
    if not tokens or size > MAX_PAYLOAD:
        raise FormatError(f"frame: must have at least 1 token and at most {MAX_PAYLOAD} bytes, got {tokens} and {size}")
    return FrameHeader(track, spec, chunk.hex(), group, first, tokens, size), begin, crc


def _compare(header: FrameHeader, expect: FrameHeader) -> None:
    for field, what in (
        ("spec_digest", "model or cache shape"),
        ("chunk", "prompt"),
        ("group", "group"),
        ("track", "track"),
        ("first_token", "first token"),
        ("tokens", "number of tokens"),
    ):
        got, want = getattr(header, field), getattr(expect, field)
        if got != want:
            raise ForeignError(
                f"frame: its {what} must be {_show(want)}, got {_show(got)}; it belongs to another cache"
            )


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


SLICE_BYTES = 1 << 16
"""Target bytes of an object: large enough for negligible header overhead, small enough to show progress."""


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """A byte range of a group's frame, sent as one object."""

    object_id: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ObjectSpans(Sequence[ObjectSpan]):
    """The objects of a group. Computed when read, since a group may have tens of thousands."""

    first_id: int
    id_step: int
    head: int
    """Bytes before the first unit; the first object also holds them."""
    step: int
    """Bytes of each object after the head; the last may be shorter."""
    size: int

    def __len__(self) -> int:
        return max(1, -(-(self.size - self.head) // self.step))

    @overload
    def __getitem__(self, index: int) -> ObjectSpan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ObjectSpan, ...]: ...
    def __getitem__(self, index: int | slice) -> ObjectSpan | tuple[ObjectSpan, ...]:
        if isinstance(index, slice):
            return tuple(map(self.__getitem__, range(len(self))[index]))
        place = range(len(self))[index]
        begin = self.head + place * self.step
        end = min(self.size, begin + self.step)
        return ObjectSpan(self.first_id + place * self.id_step, begin if place else 0, end)


def object_spans(spec: KVSpec, track: str, first_token: int, tokens: int, frame_bytes: int) -> ObjectSpans:
    """Cut the frame of a group of ``tokens`` tokens from ``first_token`` on into objects of whole tokens.

    Spans have ascending IDs and cover the frame without gaps. Each holds as many units as fit in `SLICE_BYTES`, but at
    least one; the first also holds the header and the payload's head.
    """
    layout = payload_layout(track, spec, tokens)
    if layout is None or frame_bytes != header_bytes(spec.track_name(track)) + layout.payload_bytes:
        return slices(first_token, frame_bytes)  # not token-separable, or made by an unknown codec
    units = max(1, SLICE_BYTES // layout.unit_bytes)
    head = frame_bytes - layout.payload_bytes + layout.head_bytes
    return ObjectSpans(first_token, units * layout.unit_tokens, head, units * layout.unit_bytes, frame_bytes)


def slices(first_id: int, size: int) -> ObjectSpans:
    """Cut ``size`` bytes into objects of `SLICE_BYTES`, numbered from ``first_id``; at least one, even if empty."""
    return ObjectSpans(first_id, 1, 0, SLICE_BYTES, size)
