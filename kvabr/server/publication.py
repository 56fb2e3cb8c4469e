"""What a server sends under one track name: groups of objects, straight from the store.

A transport asks for a group and sends its objects; it does not know what is in them. Frames of a folder are mapped into
memory, not read: sending one touches each byte once, in the transport.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvabr.codec.container import ObjectSpan, object_spans, slices
from kvabr.server.grants import Grant
from kvabr.store.asset import Asset
from kvabr.types.errors import AssetError, TransportError
from kvabr.types.naming import TrackNamespace

PROPERTY_GROUP_BYTES = 0x38
"""Object property of a group's first object: bytes of the whole group (an application's code point, moq-transport)."""
PROPERTY_GROUP_DIGEST = 0x39
"""Object property of a group's first object: SHA-256 of the whole group."""


@dataclass(frozen=True, slots=True)
class PublishedGroup:
    """One group, ready to send."""

    data: memoryview
    """All of its objects end to end."""
    objects: tuple[ObjectSpan, ...]
    """Ascending IDs; they cover ``data`` without gaps."""
    digest: bytes
    """SHA-256 of ``data``, for receivers that have no catalog."""


class ArrivingGroup(ABC):
    """A group of which more bytes are still to come, as a relay forwards it. Its reader must `close` it."""

    objects: tuple[ObjectSpan, ...]
    digest: bytes
    """SHA-256 of the whole group."""
    size: int
    """Bytes of the whole group."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Bytes that can be read now, from the beginning.

        Raises:
            TransportError: the group cannot be had, or is not what its catalog says.
        """

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """Return available bytes."""

    @abstractmethod
    def prioritise(self, priority: int) -> None:
        """Change the priority: 0 (most urgent) to 255."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading; without readers the group is no longer fetched. May be called twice."""


class Publication(ABC):
    """One track."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """Number of groups. They are numbered from 0, and all of them exist."""

    @abstractmethod
    def size(self, group: int) -> int:
        """Return the bytes of a group.

        Raises:
            IndexError: there is no such group.
        """

    @abstractmethod
    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        """Return how a group is cut into objects, without opening it.

        Raises:
            IndexError: there is no such group.
        """

    @abstractmethod
    def open(self, group: int) -> PublishedGroup:
        """Return a group with its data.

        Raises:
            IndexError: there is no such group.
            AssetError: it cannot be read, has another size than the catalog says, or was replaced.
        """

    def follow(self, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup | None:
        """Return a group that has to be fetched first; None if `open` has all of it.

        Args:
            group: index of the group.
            priority: 0 (most urgent) to 255.
            on_more: called when more bytes are available, or no more will be.
        """
        del group, priority, on_more
        return None


class LoadingGroup(ArrivingGroup):
    """A group that a thread reads from a store that is not local; all of it arrives at once."""

    def __init__(self, publication: LevelPublication, group: int, on_more: Callable[[], None]) -> None:
        """Start to read; see `Publication.follow`."""
        self.objects, self.size = publication.objects(group), publication.size(group)
        self.digest = publication.digest(group)
        self._data: memoryview | None = None
        self._error: AssetError | None = None
        self._task = asyncio.get_running_loop().create_task(self._load(publication, group, on_more))

    @property
    def available(self) -> int:
        """See `ArrivingGroup.available`."""
        if self._error is not None:
            raise TransportError(str(self._error))
        return 0 if self._data is None else self.size

    def read(self, begin: int, end: int) -> memoryview:
        """See `ArrivingGroup.read`."""
        assert self._data is not None  # noqa: S101  # nothing else is available
        return self._data[begin:end]

    def prioritise(self, priority: int) -> None:
        """See `ArrivingGroup.prioritise`; stores know no priorities."""

    def close(self) -> None:
        """See `ArrivingGroup.close`; a thread that reads already finishes."""
        self._task.cancel()

    async def _load(self, publication: LevelPublication, group: int, on_more: Callable[[], None]) -> None:
        try:
            self._data = (await asyncio.to_thread(publication.open, group)).data
        except AssetError as error:
            self._error = error
        on_more()


class LevelPublication(Publication):
    """One compression level of one version of an asset."""

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
        """Return what the catalog says."""
        return self._track.bytes[self._checked(group)]

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        """See `Publication.objects`."""
        size, catalog = self.size(group), self._asset.catalog
        first, last = catalog.spec.group_range(group, catalog.tokens)
        return object_spans(catalog.spec, self._track.name, first, last - first, size)

    def open(self, group: int) -> PublishedGroup:
        """Return a frame; see `Publication.open`."""
        objects = self.objects(group)
        data = self._asset.frame_view(group, self._track.name)
        # In this order: assets are exchanged whole, so a frame read before an unchanged catalog belongs to it.
        if not self._asset.is_current():
            raise AssetError(f"{self._asset.location}: was replaced or removed; ask for its catalog again")
        return PublishedGroup(data, objects, self.digest(group))

    def digest(self, group: int) -> bytes:
        """Return the SHA-256 of a group."""
        return bytes.fromhex(self._track.digests[self._checked(group)])

    def follow(self, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup | None:
        """See `Publication.follow`; only stores that are not local need threads."""
        del priority
        return None if self._asset.local else LoadingGroup(self, group, on_more)

    def _checked(self, group: int) -> int:
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} is outside an asset of {self.groups} groups")
        return group


class BytesPublication(Publication):
    """One group of bytes in memory: a catalog, a profile."""

    def __init__(self, data: bytes) -> None:
        self._group = PublishedGroup(memoryview(data), slices(0, len(data)), hashlib.sha256(data).digest())

    @property
    def groups(self) -> int:
        """One."""
        return 1

    def size(self, group: int) -> int:
        """Return the number of bytes."""
        return len(self.open(group).data)

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        """See `Publication.objects`."""
        return self.open(group).objects

    def open(self, group: int) -> PublishedGroup:
        """Return the bytes, in slices."""
        if group != 0:
            raise IndexError(f"group {group} of a track that has only group 0")
        return self._group


class Source(Protocol):
    """What a server serves, and who may read it: an origin's `PublishedAssets`, or a `Relay`."""

    def admit(self, token: bytes | None) -> Grant | None:
        """Return what the holder of a token may read; None refuses the connection."""

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """Return a track; None if there is none that the grant may read.

        Args:
            grant: from `admit`.
            namespace: of the track.
            track: name of the track.
            at_once: do not wait for files or for the network.

        Raises:
            BlockingIOError: the answer needs files or the network; use `find_soon`.
            RequestError: the grant was withdrawn.
        """

    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        """Do the same, waiting where `find` cannot.

        Raises:
            TransportError: the grant was withdrawn; or a relay's origin does not answer or refuses.
        """
