"""What an origin serves under one track name: groups of objects, straight from the asset's files.

A server of whatever transport asks for a group and sends its objects; it never learns what is in them. Frames are
mapped into memory, not read: sending one touches each byte once, in the transport.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from kvabr.codec.container import ObjectSpan, object_spans, slices
from kvabr.store.asset import Asset, frame_path
from kvabr.types.errors import AssetError

PROPERTY_GROUP_BYTES = 0x38
"""Object property, on a group's first object: bytes of the whole group (an application's code point, moq-transport)."""
PROPERTY_GROUP_DIGEST = 0x39
"""Object property, on a group's first object: SHA-256 of the whole group."""


@dataclass(frozen=True, slots=True)
class PublishedGroup:
    """One group, ready to send."""

    data: memoryview
    """All of its objects end to end."""
    objects: tuple[ObjectSpan, ...]
    """Ascending IDs; they cover ``data`` without gaps."""
    digest: bytes
    """SHA-256 of ``data``, for receivers that have no catalog at hand."""


class Publication(ABC):
    """One track."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """How many groups it has, numbered from 0; all of them are there."""

    @abstractmethod
    def size(self, group: int) -> int:
        """Bytes of a group.

        Raises:
            IndexError: there is no such group.
        """

    @abstractmethod
    def open(self, group: int) -> PublishedGroup:
        """A group's objects.

        Raises:
            IndexError: there is no such group.
            AssetError: its file is gone, or has another size than the catalog says.
        """


class LevelPublication(Publication):
    """One compression level of an asset."""

    def __init__(self, asset: Asset, track: str) -> None:
        """Serve ``track`` of ``asset``.

        Raises:
            FormatError: the asset has no such track.
        """
        self._asset, self._track = asset, asset.catalog.track(track)

    @property
    def groups(self) -> int:
        """As many as the asset has."""
        return self._asset.catalog.groups

    def size(self, group: int) -> int:
        """What the catalog says."""
        return self._track.bytes[self._checked(group)]

    def open(self, group: int) -> PublishedGroup:
        """Map the frame's file."""
        size = self.size(group)
        path = frame_path(self._asset.path, group, self._track.name)
        try:
            data = _mapped(path)
        except (OSError, ValueError) as error:
            raise AssetError(f"{path}: cannot be read ({error})") from error
        if len(data) != size:
            raise AssetError(f"{path}: has {len(data)} bytes, its catalog says {size}; encode the asset again")
        catalog = self._asset.catalog
        first, last = catalog.spec.group_range(group, catalog.tokens)
        objects = object_spans(catalog.spec, self._track.name, first, last - first, size)
        return PublishedGroup(data, objects, bytes.fromhex(self._track.digests[group]))

    def _checked(self, group: int) -> int:
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} is outside an asset of {self.groups} groups")
        return group


def _mapped(path: Path) -> memoryview:
    """Map a file of an asset: an ordinary one that lies where it seems to, since a link might lead anywhere."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("not an ordinary file")
        return memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(handle)


class BytesPublication(Publication):
    """One group of bytes that are at hand: a catalog, a profile."""

    def __init__(self, data: bytes) -> None:
        self._group = PublishedGroup(memoryview(data), slices(0, len(data)), hashlib.sha256(data).digest())

    @property
    def groups(self) -> int:
        """One."""
        return 1

    def size(self, group: int) -> int:
        """Of the bytes."""
        return len(self.open(group).data)

    def open(self, group: int) -> PublishedGroup:
        """The bytes, in slices."""
        if group != 0:
            raise IndexError(f"group {group} of a track that has only group 0")
        return self._group
