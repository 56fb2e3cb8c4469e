"""What a server sends under one track name: groups of objects, straight from the store.

A transport asks for a group and sends its objects; it does not know what is in them. Large frames of a folder are read
piece by piece as they are sent.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from kvabr.codec.container import ObjectSpan, object_spans, slices
from kvabr.server.grants import Grant
from kvabr.store.asset import Asset, FrameReader
from kvabr.types.digests import digest_of, has_digest
from kvabr.types.errors import AssetError, TransportError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.units import unit_of
from kvabr.types.words import counted


class ArrivingGroup(ABC):
    """One group, of which more bytes may still be to come. Its reader must `close` it."""

    objects: tuple[ObjectSpan, ...]
    """Ascending IDs; they cover the group without gaps."""
    digest: str
    """Digest of the whole group (`kvabr.types.digests`), for receivers that have no catalog."""
    size: int
    """Bytes of the whole group."""
    memory: int = 0
    """Bytes that only this keeps in memory."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Bytes that can be read now, from the beginning.

        Raises `TransportError` if the group cannot be had, or is not what its catalog says.
        """

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """Return available bytes; `AssetError` if they are in a file that cannot be read any more."""

    def prioritise(self, priority: int) -> None:  # noqa: B027  # only a relay's origin knows priorities
        """Change the priority: 0 (most urgent) to 255."""

    def close(self) -> None:  # noqa: B027  # as above
        """Stop reading; without readers the group is no longer fetched. May be called twice."""


class PublishedGroup(ArrivingGroup):
    """A group that is in memory."""

    def __init__(self, data: memoryview, objects: tuple[ObjectSpan, ...], digest: str, *, shared: bool = False) -> None:
        """Take the bytes; ``shared`` if they are kept elsewhere for as long as this may be open."""
        self.data, self.objects, self.digest, self.size = data, objects, digest, len(data)
        self.memory = 0 if shared else self.size

    @property
    def available(self) -> int:
        """All of it."""
        return self.size

    def read(self, begin: int, end: int) -> memoryview:
        return self.data[begin:end]


class OpenedGroup(ArrivingGroup):
    """A group of an asset in a folder, in a file or, if it is short, in memory."""

    def __init__(self, frame: FrameReader, objects: tuple[ObjectSpan, ...], digest: str) -> None:
        """Take over the frame."""
        self._frame, self.objects, self.digest, self.size = frame, objects, digest, frame.size

    @property
    def available(self) -> int:
        """All of it."""
        return self.size

    def read(self, begin: int, end: int) -> memoryview:
        return self._frame.read(begin, end)

    def close(self) -> None:
        self._frame.close()


class LoadingGroup(ArrivingGroup):
    """A group that a thread reads from a store that is not local; all of it arrives at once."""

    def __init__(self, level: LevelPublication, group: int, on_more: Callable[[], None]) -> None:
        """Start to read; see `Publication.open`."""
        self.objects, self.size, self.digest = level.objects(group), level.size(group), level.digest(group)
        self.memory = self.size
        self._frame: FrameReader | None = None
        self._error: AssetError | None = None
        self._task = asyncio.get_running_loop().create_task(self._load(level, group, on_more))

    @property
    def available(self) -> int:
        if self._error is not None:
            raise TransportError(str(self._error))
        return 0 if self._frame is None else self.size

    def read(self, begin: int, end: int) -> memoryview:
        assert self._frame is not None  # noqa: S101  # nothing else is available
        return self._frame.read(begin, end)

    def close(self) -> None:
        """See `ArrivingGroup.close`; a thread that reads already finishes."""
        self._task.cancel()

    async def _load(self, level: LevelPublication, group: int, on_more: Callable[[], None]) -> None:
        try:
            self._frame = await asyncio.to_thread(level.load, group)
        except AssetError as error:
            self._error = error
        on_more()


class Publication(ABC):
    """One track. Its groups are numbered from 0, and all of them exist; methods raise `IndexError` for others."""

    groups: int
    """Number of groups, of a growing track those so far."""
    growing = False
    """Whether more may appear; see `kvabr.server.growing`."""
    failure = ""
    """Why a track ended before it was complete; empty otherwise."""
    dear = False
    """Whether opening a group may fetch or load all of it into memory, which takes long."""

    @abstractmethod
    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        """Return how a group is cut into objects, without opening it."""

    def has(self, group: int) -> bool:
        """Return whether a group exists; one of a growing track may have been left out."""
        return 0 <= group < self.groups

    def readable(self, grant: Grant) -> bool:
        """Return whether a grant may read more of it: it may have been removed since it was found."""
        del grant
        return True

    def asked(self, group: int) -> None:  # noqa: B027  # most need not know
        """Note that a group is requested."""

    def loads(self, group: int) -> int:
        """Return the bytes that opening a group would fetch or load into memory; 0 if it is there, or on its way."""
        return self.objects(group)[-1].end if self.dear else 0

    @abstractmethod
    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        """Return a group; start to fetch it if it is not there.

        Args:
            group: index of the group.
            priority: 0 (most urgent) to 255.
            on_more: called when more bytes are available, or no more will be; never before this returns.

        Raises:
            AssetError: it cannot be read, has another size than the catalog says, or was replaced.
        """


class CatalogLevel(Publication):
    """One compression level of an asset, cut as its catalog says."""

    def __init__(self, spec: KVSpec, tokens: int, name: str, sizes: Sequence[int]) -> None:
        """Serve groups of ``sizes`` bytes, of a cache of ``tokens`` tokens."""
        self.groups, self.name = len(sizes), name
        self._spec, self._tokens, self._sizes = spec, tokens, sizes
        self._level, self._part = spec.level_of(name)

    def size(self, group: int) -> int:
        """Return the bytes of a group."""
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} is outside an asset of {counted(self.groups, 'group')}")
        return self._sizes[group]

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        size, unit = self.size(group), unit_of(self._spec, self._part, group, self._tokens)
        return object_spans(self._spec.parts[self._part], self._level, unit.first, unit.tokens, size)


class LevelPublication(CatalogLevel):
    """One compression level of one version of an asset in a store."""

    def __init__(self, asset: Asset, track: str, doubt: Callable[[Asset, int, str], object] = lambda *_: None) -> None:
        """Serve ``track`` of ``asset``; `FormatError` if the asset has no such track.

        ``doubt`` is called, in any thread, once for each group that is asked for a second time; of one that is far to
        fetch only if what came is not what the catalog says.
        """
        self.asset, self._track = asset, asset.catalog.published_track(track)
        self.dear = not asset.local
        super().__init__(asset.catalog.spec, asset.catalog.tokens, track, self._track.bytes)
        self._doubt = doubt
        self._asked = bytearray(self.groups)
        """How often each group was asked for, up to three times."""

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        """See `Publication.open`; only stores that are not local need threads."""
        del priority
        objects = self.objects(group)
        if self.dear:
            return LoadingGroup(self, group, on_more)
        return OpenedGroup(self.frame(group), objects, self.digest(group))

    def asked(self, group: int) -> None:
        self._asked[group] = min(3, self._asked[group] + 1)
        if self._asked[group] == 2 and not self.dear:
            self._doubt(self.asset, group, self.name)

    def load(self, group: int) -> FrameReader:
        """Fetch the frame of a group, and look at its bytes if it is asked for again; raises as `open`."""
        again, right = self._asked[group] == 2, False
        try:
            frame = self.frame(group)
            right = not again or has_digest(self.digest(group), frame.read(0, frame.size))
            return frame
        finally:
            if again and not right:
                self._doubt(self.asset, group, self.name)

    def frame(self, group: int) -> FrameReader:
        """Open the frame of a group that exists; raises as `open`."""
        frame = self.asset.open_frame(group, self.name)
        # In this order: assets are exchanged whole, so a frame opened before an unchanged catalog belongs to it.
        if not self.asset.is_current():
            frame.close()
            raise AssetError(f"{self.asset.location}: was replaced or removed; ask for its catalog again")
        return frame

    def digest(self, group: int) -> str:
        """Return the digest of a group."""
        return self._track.digests[group]


class BytesPublication(Publication):
    """One group of bytes in memory: a catalog, a profile."""

    groups = 1

    def __init__(self, data: bytes) -> None:
        self._group = PublishedGroup(memoryview(data), slices(0, len(data)), digest_of(data), shared=True)

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        return self.open(group).objects

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> PublishedGroup:
        """Return the bytes, in slices."""
        del priority, on_more
        if group != 0:
            raise IndexError(f"group {group} of a track that has only group 0")
        return self._group


class Source(Protocol):
    """What a server serves, and who may read it: an origin's `PublishedAssets`, or a `Relay`."""

    def admit(self, token: bytes | None) -> Grant | None:
        """Return what the holder of a token may read; None refuses the connection. The token may have expired."""

    def renewed(self, grant: Grant) -> Grant | None:
        """Return what the token of a grant of `admit` opens now; None ends its connections."""

    def holds(self, grant: Grant, publication: Publication) -> bool:
        """Return whether a grant may still read what `find` returned a while ago."""

    def listen(self, changed: Callable[[], None]) -> None:
        """Call ``changed``, in any thread, whenever `renewed` or `holds` may return something else than before."""

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """Return a track; None if there is none that a grant of `admit` may read.

        Raises:
            BlockingIOError: ``at_once`` is given, and the answer needs files or the network; use `find_soon`.
            RequestError: the grant was withdrawn.
        """

    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        """Do the same, waiting where `find` cannot.

        Raises `TransportError` if the grant was withdrawn; or a relay's origin does not answer or refuses.
        """
