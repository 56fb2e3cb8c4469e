"""Objects of LMCache's daemon, coded to a fixed length: kvabr's codecs for LMCache's own stores.

LMCache reads objects of known size. So each coded object has the size that a track of constant rate would have, or a
configured fraction of the object's size in memory. With the AC codec it is filled with layers: bases first, and each
layer for all groups or none.

    magic 4 | version 1 | kind 1 | frames 2 | position 8 | dims of a head 4 | CRC-32 of all before 4 | frames, each
    after its length 4 | zeros

Numbers are unsigned and little-endian. Frames are those of `kvabr.codec.container`. An object without suitable tracks
has one frame with its bytes and a CRC-32. Checksums cover the object's name, and frames contain its digest, so objects
and profiles cannot be confused. Does not need LMCache.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from pydantic import Field

from kvabr.codec.base import GroupContext, codec, payload_layout
from kvabr.codec.container import header_bytes, unpack
from kvabr.codec.group import check_holds, decode_payload, encode_payload, frame_header, framed, largest
from kvabr.codec.profile import Profile
from kvabr.engines.chunk_store import LOG, head_dim_of, profile_for
from kvabr.engines.lmcache.chunks import ObjectLayout, as_kv, object_spec
from kvabr.engines.settings import Count, EngineSettings, FilePath, SettingsTable, Text, TroubleLog
from kvabr.types.errors import ForeignError, FormatError, NotFiniteError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LAYERS

_MAGIC, _VERSION = b"KVLO", 1
_HEAD, _CRC, _LENGTH = struct.Struct("<4sBBHQI"), struct.Struct("<I"), struct.Struct("<I")
_TRACKS, _BYTES = 1, 2
_UNKNOWN_POSITION = (1 << 64) - 1
_MODEL = "object"
"""Model name in frames; the store's keys have the real name."""
_PROBE = KVSpec.uniform(_MODEL, "lmcache", 1, 1, 64, "float16")


class SerdeSettings(SettingsTable):
    """Keys of the table ``serde``."""

    track: Text | None = None
    """``layers``: those of the AC codec. Or a track of constant rate, such as Int8, Int4, FP8 or FP16. None: layers
    with a profile, otherwise Int8.
    """
    profile: FilePath | None = None
    """Codec profile of the model, for the layers."""
    share: Annotated[float | None, Field(gt=0, le=1)] = None
    """Size of an object with layers, as a share of its size in memory. None: that of ``fallback``."""
    fallback: Text = "Int4"
    """Track of constant rate for an object that is too small for layers, or has an unknown position."""
    max_workers: Count = 1
    """Threads that code objects."""


class _Plan(NamedTuple):
    spec: KVSpec
    size: int


@dataclass(frozen=True)
class _Head:
    kind: int
    frames: Sequence[memoryview]
    position: int | None
    head_dim: int


class ObjectCoder:
    """Encodes and decodes objects; thread-safe."""

    def __init__(self, settings: SerdeSettings) -> None:
        """Raise `UsageError` for a wrong track, or an error if the profile's file is unusable."""
        self._layers = settings.track == "layers" or (settings.track is None and settings.profile is not None)
        self._plain = settings.fallback if self._layers else settings.track or "Int8"
        self._share, self._trouble = settings.share, TroubleLog(LOG)
        self._engine = EngineSettings(profile=settings.profile)
        if self._layers and settings.profile is None:
            raise UsageError("serde: the layers need a profile of the model, from `kvabr calibrate`")
        if codec(self._plain).needs_profile or payload_layout(self._plain, _PROBE, 1) is None:
            raise UsageError(f"serde: {self._plain} has no constant rate; use Int8, Int4, FP8 or FP16")
        head_dim_of(_MODEL, 64, self._engine)
        self._plan = lru_cache(256)(self._planned)
        self._profile = lru_cache(64)(self._fitting)

    def size(self, layout: ObjectLayout) -> int:
        """Return the bytes of a coded object of this layout."""
        plan = self._plan(layout, None)
        return _bytes_size(layout) if plan is None else plan.size

    def encode(
        self, name: str, layout: ObjectLayout, data: memoryview, chunk: torch.Tensor | None, position: int | None
    ) -> bytes:
        """Return a coded object of `size` bytes.

        ``chunk`` is ``data`` as a tensor, or None if it is not one, see `as_kv`. Layers are used only if ``position``,
        that of the first token, is known.

        Raises:
            NotFiniteError: NaN or infinity; LMCache does not store the object.
            FormatError: the track cannot hold a number.
        """
        plan = self._plan(layout, None)
        if plan is None or chunk is None:
            crc = _CRC.pack(zlib.crc32(data, zlib.crc32(name.encode())))
            return _filled(_BYTES, [bytes(data) + crc], None, 0, _bytes_size(layout))
        kv = as_kv(chunk, plan.spec)
        try:
            magnitude = largest(kv, plan.spec, position or 0)
            check_holds(self._plain, plan.spec, magnitude)
        except (NotFiniteError, FormatError) as error:
            self._trouble.warn("an object is not stored", error)
            raise
        limit = plan.size - _HEAD.size - _CRC.size
        if self._layers and position is None:
            self._trouble.warn("objects are coded without layers", "the daemon did not hash their prompt's tokens")
        elif self._layers and (profile := self._profile(plan.spec)) is not None:
            frames = _layers_within(limit, name, _contexts(profile.spec, kv, position or 0, profile))
            if frames:
                return _filled(_TRACKS, frames, position, kv.shape[-1], plan.size)
            self._trouble.warn("objects are coded without layers", f"not even the base fits {plan.size} bytes")
        frames = [
            framed(
                encode_payload(part, self._plain, context), self._plain, context, _chunk(name, group, context), group
            )
            for group, (context, part) in enumerate(_contexts(plan.spec, kv))
        ]
        return _filled(_TRACKS, frames, None, kv.shape[-1], plan.size)

    def decode(
        self, name: str, layout: ObjectLayout, coded: memoryview, data: memoryview, chunk: torch.Tensor | None
    ) -> None:
        """Decode an untrusted object into ``data``, or into its tensor ``chunk``.

        Raise `FormatError` if it is damaged or of another layout, `ForeignError` if it is another object.
        """
        head = _parsed(coded)
        if head.kind == _BYTES:
            _write_bytes(name, head, data)
            return
        plan = self._plan(layout, head.head_dim)
        if plan is None or chunk is None:
            raise FormatError("a coded object of LMCache has other layers than this daemon's model")
        spec, profile, kv = plan.spec, None, as_kv(chunk, plan.spec)
        if head.position is not None:
            if not self._layers or (profile := self._profile(spec)) is None:
                raise FormatError(
                    "a coded object of LMCache has AC layers and needs the codec profile that it was coded with"
                )
            spec = profile.spec
        groups = _contexts(spec, kv, head.position or 0, profile)
        if not head.frames or len(head.frames) % len(groups):
            raise FormatError(f"a coded object of LMCache has {len(head.frames)} frames for {len(groups)} groups")
        for group, (context, part) in enumerate(groups):
            stack = head.frames[group :: len(groups)]
            tracks = LAYERS if profile is not None else (unpack(stack[0])[0].track,)
            if len(stack) > len(tracks):
                raise FormatError("a coded object of LMCache has more frames than tracks")
            below = [
                unpack(frame, frame_header(track, context, _chunk(name, group, context), group))[1]
                for track, frame in zip(tracks, stack, strict=False)
            ]
            decode_payload(below.pop(), tracks[len(stack) - 1], context, group, part, below)

    def _planned(self, layout: ObjectLayout, head_dim: int | None) -> _Plan | None:
        """Return how to code a layout (None: as plain bytes), given the ``head_dim`` of an existing object, if any."""
        try:
            spec = object_spec(_MODEL, layout, lambda width: head_dim or head_dim_of(_MODEL, width, self._engine))
        except FormatError:
            return None
        size = _HEAD.size + _CRC.size
        for first, last in _ranges(spec, layout.tokens):
            there = payload_layout(self._plain, spec, last - first)
            if there is not None:
                size += _LENGTH.size + header_bytes(self._plain) + there.payload_bytes
        if self._layers and self._share is not None:
            size = max(size, math.ceil(self._share * layout.nbytes))
        return _Plan(spec, size)

    def _fitting(self, spec: KVSpec) -> Profile | None:
        try:
            return profile_for(spec, self._engine)
        except ForeignError as error:
            self._trouble.warn("objects are coded without layers", error)
            return None


def _layers_within(limit: int, name: str, groups: Sequence[tuple[GroupContext, torch.Tensor]]) -> list[bytes]:
    """Return the frames of all layers that fit into ``limit`` bytes, base first; each layer has all groups."""
    frames: list[bytes] = []
    payloads: list[list[bytes]] = [[] for _ in groups]
    for track in LAYERS:
        level = []
        for group, (context, part) in enumerate(groups):
            payload = encode_payload(part, track, context, payloads[group])
            payloads[group].append(payload)
            level.append(framed(payload, track, context, _chunk(name, group, context), group))
        limit -= sum(_LENGTH.size + len(frame) for frame in level)
        if limit < 0:
            break
        frames += level
    return frames


def _contexts(
    spec: KVSpec, kv: torch.Tensor, position: int = 0, profile: Profile | None = None
) -> list[tuple[GroupContext, torch.Tensor]]:
    return [
        (GroupContext(spec, position + first, last - first, profile, memo={}), kv[:, :, :, first:last])
        for first, last in _ranges(spec, kv.shape[3])
    ]


def _ranges(spec: KVSpec, tokens: int) -> list[tuple[int, int]]:
    return [spec.group_range(group, tokens) for group in range(spec.groups(tokens))]


def _chunk(name: str, group: int, context: GroupContext) -> str:
    """Return the digest that binds a frame to its object, and layers to their profile."""
    profile = "" if context.profile is None else context.profile.digest
    return hashlib.sha256(f"kvabr.object/1\0{group}\0{profile}\0{name}".encode()).hexdigest()


def _bytes_size(layout: ObjectLayout) -> int:
    return _HEAD.size + _CRC.size + _LENGTH.size + layout.nbytes + _CRC.size


def _filled(kind: int, frames: Sequence[bytes], position: int | None, head_dim: int, size: int) -> bytes:
    head = _HEAD.pack(
        _MAGIC, _VERSION, kind, len(frames), _UNKNOWN_POSITION if position is None else position, head_dim
    )
    parts = [head, _CRC.pack(zlib.crc32(head))]
    for frame in frames:
        parts += [_LENGTH.pack(len(frame)), frame]
    made = b"".join(parts)
    if len(made) > size:
        raise FormatError(f"a coded object of LMCache has {len(made)} bytes, more than the {size} allowed")
    return made.ljust(size, b"\0")


def _write_bytes(name: str, head: _Head, data: memoryview) -> None:
    if len(head.frames) != 1 or len(head.frames[0]) != len(data) + _CRC.size:
        raise FormatError(f"a coded object of LMCache must have the {len(data)} bytes of its layout")
    body, crc = head.frames[0][: -_CRC.size], head.frames[0][-_CRC.size :]
    if zlib.crc32(body, zlib.crc32(name.encode())) != _CRC.unpack(crc)[0]:
        raise FormatError("a coded object of LMCache is damaged, or belongs to another key")
    data[:] = body


def _parsed(coded: memoryview) -> _Head:
    if len(coded) < _HEAD.size + _CRC.size:
        raise FormatError(f"a coded object of LMCache has {len(coded)} bytes, too few for its header")
    magic, version, kind, count, position, head_dim = _HEAD.unpack_from(coded)
    if magic != _MAGIC or version != _VERSION or kind not in (_TRACKS, _BYTES):
        raise FormatError("an object in LMCache's store was written by another serde, or by a newer kvabr")
    if zlib.crc32(coded[: _HEAD.size]) != _CRC.unpack_from(coded, _HEAD.size)[0]:
        raise FormatError("a coded object of LMCache: the header's checksum is wrong")
    at, frames = _HEAD.size + _CRC.size, []
    for _ in range(count):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(coded, at)[0] if begin <= len(coded) else len(coded) + 1
        if at > len(coded):
            raise FormatError("a coded object of LMCache was truncated")
        frames.append(coded[begin:at])
    return _Head(kind, frames, None if position == _UNKNOWN_POSITION else position, head_dim)
