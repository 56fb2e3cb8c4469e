"""The contents of one track of a server: groups of objects, read directly from the store.

A transport reads objects without parsing them. Large frames in a folder are read in pieces as they are sent.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvabr.codec.container import ObjectSpan, object_spans, slices
from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.store.asset import Asset, FrameReader
from kvabr.types.digests import digest_of
from kvabr.types.errors import AssetError, TransportError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.units import unit_of


class ArrivingGroup(ABC):
    """A group that may still be arriving. Its reader must `close` it."""

    objects: Sequence[ObjectSpan]
    """Objects by ascending ID, which cover the group without gaps."""
    digest: str
    """Digest of the whole group (`kvabr.types.digests`), for receivers without a catalog."""
    size: int

    @property
    def memory(self) -> int:
        """Bytes that this reader accounts for; 0 if the group is not in memory, or another reader accounts for it."""
        return 0

    @property
    def available(self) -> int:
        """Number of leading bytes that can be read now.

        Raises `TransportError` if the group cannot be fetched, or does not match its catalog.
        """
        return self.size

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """Return available bytes; raise `AssetError` if the file is no longer readable."""

    def prioritise(self, priority: int) -> None:  # noqa: B027  # only a relay's origin has priorities
        """Change the priority: 0 (most urgent) to 255."""

    def close(self) -> None:  # noqa: B027  # as above
        """Stop reading; the last reader also stops the fetch. Idempotent."""


class PublishedGroup(ArrivingGroup):
    """A group in memory."""

    def __init__(self, data: memoryview, objects: Sequence[ObjectSpan], digest: str) -> None:
        self.data, self.objects, self.digest, self.size = data, objects, digest, len(data)

    def read(self, begin: int, end: int) -> memoryview:
        return self.data[begin:end]


class OpenedGroup(ArrivingGroup):
    """A group of an asset in a folder; a short one is read into memory."""

    def __init__(self, frame: FrameReader, objects: Sequence[ObjectSpan], digest: str) -> None:
        self._frame, self.objects, self.digest, self.size = frame, objects, digest, frame.size

    def read(self, begin: int, end: int) -> memoryview:
        return self._frame.read(begin, end)

    def close(self) -> None:
        self._frame.close()


class LoadingGroup(ArrivingGroup):
    """A group that a thread reads from a remote store as a whole."""

    def __init__(self, level: LevelPublication, group: int, on_more: Callable[[], None]) -> None:
        self.objects, self.size, self.digest = level.objects(group), level.size(group), level.digest(group)
        self._frame: FrameReader | None = None
        self._error: AssetError | None = None
        self._task = asyncio.get_running_loop().create_task(self._load(level, group, on_more))

    @property
    def memory(self) -> int:
        return self.size

    @property
    def available(self) -> int:
        if self._error is not None:
            raise TransportError(str(self._error))
        return 0 if self._frame is None else self.size

    def read(self, begin: int, end: int) -> memoryview:
        assert self._frame is not None  # noqa: S101  # `available` is 0 before
        return self._frame.read(begin, end)

    def close(self) -> None:
        """Cancel the read, unless its thread has begun."""
        self._task.cancel()

    async def _load(self, level: LevelPublication, group: int, on_more: Callable[[], None]) -> None:
        try:
            self._frame = await asyncio.to_thread(level.frame, group)
        except AssetError as error:
            self._error = error
        on_more()


class Publication(ABC):
    """One track. Its groups are numbered from 0; callers check that a group exists (`FetchRange`)."""

    groups: int
    """Number of groups so far."""
    growing = False
    """True if more groups may be published."""
    failure = ""
    """Why the track ended incomplete, or ""."""
    dear = False
    """True if opening a group may be slow, and load it into memory."""

    @abstractmethod
    def objects(self, group: int) -> Sequence[ObjectSpan]:
        """Return a group's objects, without opening it."""

    def has(self, group: int) -> bool:
        """Return True if a group exists; a producer may have omitted it."""
        return 0 <= group < self.groups

    def readable(self, grant: Grant) -> bool:
        """Return True if a grant may still read the track; short tracks are always sent completely."""
        del grant
        return True

    def loads(self, group: int) -> int:
        """Return the bytes that opening a group would load; 0 if they are in memory or arriving."""
        return self.objects(group)[-1].end if self.dear else 0

    @abstractmethod
    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        """Return a group; start to fetch it if necessary.

        ``priority`` is 0 (most urgent) to 255. ``on_more`` is called when more bytes are available, or after a failure;
        never before this returns. Raises `AssetError` if the group is unreadable, was replaced, or has another size
        than in the catalog.
        """


class CatalogLevel(Publication):
    """One compression level of an asset, as described by its catalog."""

    def __init__(self, spec: KVSpec, tokens: int, name: str, sizes: Sequence[int]) -> None:
        """``sizes``: bytes of each group of a cache of ``tokens`` tokens."""
        self.groups, self.name = len(sizes), name
        self._spec, self._tokens, self._sizes = spec, tokens, sizes
        self._level, self._part = spec.level_of(name)

    def size(self, group: int) -> int:
        """Return the size of a group in bytes."""
        return self._sizes[group]

    def objects(self, group: int) -> Sequence[ObjectSpan]:
        size, unit = self.size(group), unit_of(self._spec, self._part, group, self._tokens)
        return object_spans(self._spec.parts[self._part], self._level, unit.first, unit.tokens, size)


class LevelPublication(CatalogLevel):
    """One level of one version of an asset in a store."""

    def __init__(
        self, asset: Asset, track: str, readable: Callable[[Grant, Asset], bool] = lambda _grant, _asset: True
    ) -> None:
        """Publish ``track`` of ``asset``; raise `FormatError` if there is none. ``readable`` decides for `readable`."""
        self.asset, self._track, self._readable = asset, asset.catalog.published_track(track), readable
        self.dear = not asset.local
        super().__init__(asset.catalog.spec, asset.catalog.tokens, track, self._track.bytes)

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        del priority
        objects = self.objects(group)
        if self.dear:
            return LoadingGroup(self, group, on_more)
        return OpenedGroup(self.frame(group), objects, self.digest(group))

    def readable(self, grant: Grant) -> bool:
        return self._readable(grant, self.asset)

    def frame(self, group: int) -> FrameReader:
        """Open the frame of an existing group; raises as `open`."""
        frame = self.asset.open_frame(group, self.name)
        # Check after opening: assets are replaced as a whole, so if the catalog is unchanged, the frame belongs to it.
        if not self.asset.is_current():
            frame.close()
            raise AssetError(f"{self.asset.location}: was replaced or removed; request its catalog again")
        return frame

    def digest(self, group: int) -> str:

        return self._track.digests[group]


class BytesPublication(Publication):
    """A track with one group in memory: a catalog or a profile."""

    groups = 1

    def __init__(self, data: bytes) -> None:
        self._group = PublishedGroup(memoryview(data), slices(0, len(data)), digest_of(data))

    def objects(self, group: int) -> Sequence[ObjectSpan]:
        return self.open(group).objects

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> PublishedGroup:
        del group, priority, on_more
        return self._group


class Source(ABC):
    """The tracks that a server serves, and who may read them: an origin's `PublishedAssets`, or a `Relay`."""

    def __init__(self, grants: Grants | None) -> None:
        """Without ``grants`` everyone may read everything."""
        self._grants = grants
        self._listeners: list[Callable[[], None]] = []

    def admit(self, token: bytes | None) -> Grant | None:
        """Return a token's grant, which may have expired; None: refuse the connection."""
        return EVERYTHING if self._grants is None else self._grants.check(token)

    def renewed(self, grant: Grant) -> Grant | None:
        """Return the current grant of an admitted token; None: end its connections."""
        return EVERYTHING if self._grants is None else self._grants.renewed(grant)

    def listen(self, changed: Callable[[], None]) -> None:
        """Call ``changed``, in any thread, whenever `renewed` or a `Publication.readable` may have changed."""
        self._listeners.append(changed)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    @abstractmethod
    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """Return a track that a grant of `admit` may read, or None.

        Raises:
            BlockingIOError: ``at_once`` is set, and the answer needs files or the network; use `find_soon`.
            RequestError: the grant was withdrawn.
        """

    @abstractmethod
    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        """Do as `find`, waiting if necessary.

        Raises `TransportError` if the grant was withdrawn, or a relay's origin does not answer or refuses.
        """
