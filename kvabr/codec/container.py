"""The frame around every group on every track, and how it is cut into objects. Importing this does not load torch.

    magic 4 | version 1 | track length 1 | spec digest 16 | chunk digest 32 | group 4 | first token 8 | tokens 4 |
    payload length 8 | CRC-32 of the payload 4 | track name | CRC-32 of all before 4 | payload

The highest bit of the version says that the payload is sealed (`kvabr.types.sealing`), bound to all of the header but
the checksums. All numbers are unsigned and little-endian. The checksums detect accidents, the catalog's digest of every
frame manipulation; a reader that compares it need not compute the payload's CRC. The chunk digest binds a frame to one
prompt and one place in it.

The objects of a group, concatenated in the order of their IDs, are its frame. An object's ID is the index within the
prompt of its first token (draft-shi-moq-kvcache-00). It holds one token, or a run of small ones; the first also holds
what all tokens share. A level that is not token-separable, like AC, is cut into slices, numbered from the group's first
token.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from kvabr.codec.base import OLDEST_VERSION, payload_layout
from kvabr.types import digests
from kvabr.types.errors import ForeignError, FormatError, SealedError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import check_track_name
from kvabr.types.sealing import SEAL_BYTES, AssetKey

MAGIC = b"KVAB"
VERSION = 8
"""Newest version of frames and payloads that is read. Frames have the oldest version whose readers understand them:
`kvabr.codec.base.OLDEST_VERSION`; of AC's payloads, 4 if the group is unusual (`kvabr.codec.unusual`), 5 if tokens
refer to others (`kvabr.codec.referring`) or values have biases (`kvabr.codec.bias`), 6 if the group is coded about
medians (`kvabr.codec.centred`), 7 if the coded part is cut into streams (`kvabr.codec.native.streams`), and 8 if
tokens that are stored separately are in parts (`kvabr.codec.stored`)."""
MAX_PAYLOAD = 1 << 40
_SEALED = 0x80
"""Bit of the version."""
_FIXED = struct.Struct("<4sBB16s32sIQIQI")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CRC = struct.Struct("<I")


HasDigest = Callable[[str], bool]
"""Whether a frame has this digest, see `kvabr.types.digests`."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The fields of a frame's header."""

    track: str
    spec_digest: bytes
    """16 bytes, see `KVSpec.digest`."""
    chunk: str
    """Chained prompt digest of the group, 64 hex digits."""
    group: int
    first_token: int
    tokens: int
    payload_bytes: int = 0


def pack(
    payload: bytes | memoryview, header: FrameHeader, version: int = OLDEST_VERSION, key: AssetKey | None = None
) -> bytes:
    """Frame a payload, whatever ``header.payload_bytes`` says; raise a `FormatError` if a field is out of range.

    ``version`` is that of the frame, see `kvabr.codec.base.Codec.frame_version`; ``key`` seals the payload.
    """
    size = len(payload) + (SEAL_BYTES if key is not None else 0)
    name, it = check_track_name(header.track).encode(), header
    if len(it.spec_digest) != 16 or not _DIGEST.fullmatch(it.chunk):
        raise FormatError("a frame needs a spec digest of 16 bytes and a chunk digest of 64 hex digits")
    numbers = it.group, it.first_token, it.tokens, size
    if (
        not (0 <= it.group < 1 << 32 and 0 <= it.first_token < 1 << 64 and 0 < it.tokens < 1 << 32)
        or size > MAX_PAYLOAD
    ):
        raise FormatError(f"no frame can hold group {it.group}: {it.tokens} tokens from {it.first_token}, {size} bytes")
    fixed = MAGIC, version | (_SEALED if key is not None else 0), len(name), it.spec_digest, bytes.fromhex(it.chunk)
    if key is not None:
        payload = key.seal(payload, _FIXED.pack(*fixed, *numbers, 0) + name)
    head = _FIXED.pack(*fixed, *numbers, zlib.crc32(payload)) + name
    return b"".join((head, _CRC.pack(zlib.crc32(head)), payload))


def header_bytes(track: str) -> int:
    """Return the bytes of a frame before its payload."""
    return _FIXED.size + len(track.encode()) + _CRC.size


def unpack(
    frame: bytes | memoryview,
    expect: FrameHeader | None = None,
    digest: str | None = None,
    has_digest: HasDigest | None = None,
) -> tuple[FrameHeader, memoryview]:
    """Check an untrusted frame and return its header and a view of its payload, which may be sealed: see `opened`.

    Args:
        frame: the bytes.
        expect: the expected header, except ``payload_bytes``; None accepts any.
        digest: expected digest of the frame (`kvabr.types.digests`); None to rely on the payload's checksum.
        has_digest: compares ``digest`` for a caller that knows the frame's; None to compute it here.

    Raises:
        FormatError: not a frame, another version, truncated, too long, corrupt, or a different digest.
        ForeignError: a valid frame of something else.
    """
    view = memoryview(frame)
    header, begin, crc = _header(view)
    payload = view[begin:]
    if len(payload) != header.payload_bytes:
        there, said = len(payload), header.payload_bytes
        raise FormatError(f"frame: {there} bytes of payload, but its header says {said}; truncated or padded")
    if expect is not None:
        _compare(header, expect)
    # Last, since only this takes time: a frame of something else has been rejected by its header.
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


def opened(frame: bytes | memoryview, payload: memoryview, key: AssetKey | None) -> memoryview:
    """Return the payload of a frame, both as `unpack` was given and returned them, opened if it is sealed.

    Raises:
        SealedError: it is sealed, and there is no key, or another; or it should be sealed, and is not.
    """
    view = memoryview(frame)
    head = view[: len(view) - len(payload) - _CRC.size]
    sealed = bool(head[len(MAGIC)] & _SEALED)
    if sealed != (key is not None):
        what = "is sealed, and there is no key" if sealed else "is not sealed, but the catalog is"
        raise SealedError(f"frame: it {what}")
    if key is None:
        return payload
    bound = bytearray(head)
    bound[_FIXED.size - _CRC.size : _FIXED.size] = bytes(_CRC.size)
    try:
        return key.open(payload, bytes(bound))
    except SealedError as error:
        raise SealedError(f"frame: {error}") from error


def _header(view: memoryview) -> tuple[FrameHeader, int, int]:
    """Return a frame's header, where its payload begins, and the payload's checksum."""
    if len(view) < _FIXED.size + _CRC.size:
        raise FormatError(f"frame: {len(view)} bytes are too few for a header; it was truncated")
    magic, version, name_length, spec, chunk, group, first, tokens, size, crc = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(f"frame: starts with {bytes(magic)!r} instead of {MAGIC!r}; this is not a kvabr group")
    version &= ~_SEALED
    if not OLDEST_VERSION <= version <= VERSION:
        hint = "upgrade kvabr" if version > VERSION else "an older kvabr wrote it: encode the asset again"
        raise FormatError(f"frame: version {version}, this kvabr reads versions {OLDEST_VERSION} to {VERSION}; {hint}")
    begin = _FIXED.size + name_length + _CRC.size
    if len(view) < begin:
        raise FormatError("frame: truncated within its header")
    (head_crc,) = _CRC.unpack_from(view, begin - _CRC.size)
    if zlib.crc32(view[: begin - _CRC.size]) != head_crc:
        raise FormatError("frame: the header's checksum is wrong; it is corrupt, fetch it again")
    try:
        track = check_track_name(bytes(view[_FIXED.size : _FIXED.size + name_length]).decode())
    except UnicodeDecodeError as error:
        raise FormatError("frame: its track name is not text") from error
    if not tokens or size > MAX_PAYLOAD:
        raise FormatError(f"frame: {tokens} tokens and {size} bytes of payload, which no encoder writes")
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
            raise ForeignError(f"frame: its {what} is {_show(got)}, wanted {_show(want)}; it belongs to something else")


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


SLICE_BYTES = 1 << 16
"""Target size of an object: large enough that its header costs nothing, small enough to show progress."""


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """One object: a byte range of its group's frame."""

    object_id: int
    begin: int
    end: int


def object_spans(spec: KVSpec, track: str, first_token: int, tokens: int, frame_bytes: int) -> tuple[ObjectSpan, ...]:
    """Cut the frame of a group of ``tokens`` tokens from ``first_token`` on into objects of whole tokens.

    ``spec`` is that of the group's class, ``track`` the level. The spans have ascending IDs and cover the frame without
    gaps. Each holds as many units of tokens as fit `SLICE_BYTES`, but at least one. The first also holds the frame's
    header and the payload's head.
    """
    layout = payload_layout(track, spec, tokens)
    if layout is None or frame_bytes != header_bytes(spec.track_name(track)) + layout.payload_bytes:
        return slices(first_token, frame_bytes)  # not token-separable, or made by an unknown codec
    units = max(1, SLICE_BYTES // layout.unit_bytes)
    begin = frame_bytes - layout.payload_bytes + layout.head_bytes
    cuts = [begin + unit * layout.unit_bytes for unit in range(units, layout.units, units)]
    return tuple(
        ObjectSpan(first_token + index * units * layout.unit_tokens, start, end)
        for index, (start, end) in enumerate(zip([0, *cuts], [*cuts, frame_bytes], strict=True))
    )


def slices(first_id: int, size: int) -> tuple[ObjectSpan, ...]:
    """Cut ``size`` bytes into objects of `SLICE_BYTES`, numbered from ``first_id``; at least one, even if empty."""
    count = max(1, -(-size // SLICE_BYTES))
    return tuple(
        ObjectSpan(first_id + index, index * SLICE_BYTES, min(size, (index + 1) * SLICE_BYTES))
        for index in range(count)
    )
