"""A published cache in a store: catalog, frames, codec profile, and possibly the token ids of its prompt.

All data is checked against the catalog before use.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, Protocol

from kvabr.store.buffers import GROUPS as POOL
from kvabr.store.local import LocalStore
from kvabr.store.names import (
    GROUPS,
    MODELS,
    PAGES,
    FramePlace,
    catalog_name,
    lookup_names,
    profile_name,
    prompt_name,
)
from kvabr.store.pages import placed
from kvabr.store.prompt import MAX_PROMPT_BYTES, Prompt
from kvabr.store.removing import objects_of
from kvabr.store.store import Store, exists, listing
from kvabr.types.catalog import MAX_CATALOG_BYTES, MAX_PROFILE_BYTES, Catalog
from kvabr.types.digests import TITLES, has_digest
from kvabr.types.errors import AssetError, FormatError, KvabrError, NotFoundError, TransportError, VersionError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import chain, prefix_key
from kvabr.types.passage import passage_chain

LOADED_BYTES = 64 << 10
"""Frames smaller than this are read at once, larger ones piece by piece from an open file."""
_POOLED_BYTES = 256 << 10
"""Pieces larger than this are read into pooled memory: allocating memory takes longer than reading."""
_ADVICE = "encode the asset again"


class AssetVersion(NamedTuple):
    """Identifies a version of an asset by its catalog's size and time."""

    size: int
    modified_s: float
    """Time of publication, seconds since 1970. Of several versions of an asset, the newest is served."""


class FrameReader(ABC):
    """Reads a frame from memory, or from a file that stays open until `close`."""

    size: int

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes ``begin`` to ``end``; raise `AssetError` if they can no longer be read."""

    def close(self) -> None:  # noqa: B027  # only files need it
        """Stop reading. Idempotent."""


class LoadedFrame(FrameReader):
    """A frame in memory."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.size = data, len(data)

    def read(self, begin: int, end: int) -> memoryview:
        return self.data[begin:end]


class FrameFile(FrameReader):
    """A frame in a file. The file is not mapped: truncating a mapped file would end the process (SIGBUS)."""

    def __init__(self, path: str, file: BufferedReader, place: FramePlace) -> None:
        self._path, self._file, self._first = path, file, place.first
        self.size = place.last - place.first

    def read(self, begin: int, end: int) -> memoryview:
        size, at = end - begin, self._first + begin
        try:
            if size < _POOLED_BYTES:
                data = memoryview(os.pread(self._file.fileno(), size, at))
            else:
                data = POOL.take(size)
                data = data[: os.preadv(self._file.fileno(), [data], at)]
        except (OSError, ValueError) as error:
            raise AssetError(f"{self._path}: cannot be read ({error})") from error
        if len(data) != size:
            raise AssetError(f"{self._path}: has become shorter than {at + size} bytes; {_ADVICE}")
        return data

    def close(self) -> None:
        self._file.close()


class FrameStore(Protocol):
    """Stores frames while they are encoded and measured."""

    def begin(self, spec: KVSpec, chunks: Sequence[str] = (), kind: str = "") -> None:
        """Describe the asset, see `AssetWriter.begin`."""

    def frame(self, group: int, track: str, frame: bytes, digest: str) -> None:
        """Write a frame of a published track; ``digest`` is that of the frame."""

    def read_frame(self, group: int, track: str) -> bytes | memoryview:
        """Return a frame that was written."""

    def profile(self, data: bytes) -> None:
        """Write the codec profile, if needed."""


@contextmanager
def as_asset_errors() -> Iterator[None]:
    """Convert errors of requests to `AssetError`."""
    try:
        yield
    except TransportError as error:
        raise AssetError(str(error)) from error


class Asset:
    """One version of a published cache. Assets are compared by identity."""

    def __init__(self, store: Store, name: str, prompt: str, version: AssetVersion) -> None:
        """Read the catalog of a prompt or passage digest; ``version`` is known from a listing.

        Raises:
            AssetError: the catalog cannot be read.
            FormatError: the catalog is damaged, of another prompt, or of a newer version.
        """
        self.store, self.name, self.version = store, name, version
        self.location = store.where(catalog_name(prompt))
        with as_asset_errors():
            data = bytes(store.blocked(store.get(catalog_name(prompt), limit=MAX_CATALOG_BYTES)))
        try:
            self.catalog = Catalog.loads(data)
        except FormatError as error:
            raise type(error)(f"{self.location}: {error}") from error
        if self.catalog.namespace.prompt != prompt:
            raise FormatError(f"{self.location}: is the catalog of another prompt")
        self.catalog_sha256, self.catalog_size = hashlib.sha256(data).hexdigest(), len(data)

    @property
    def local(self) -> bool:
        """True if `open_frame` does not block for long."""
        return isinstance(self.store, LocalStore)

    @cached_property
    def prefix_keys(self) -> tuple[bytes, ...]:
        """Key of each group in names of lookups; raise `FormatError` for an invalid digest."""
        return tuple(map(prefix_key, self.catalog.chunks))

    def is_current(self) -> bool:
        """Return True if a folder still has this version. Always True for other stores."""
        return not isinstance(self.store, LocalStore) or version_in(self.store, self.prompt_digest) == self.version

    @property
    def prompt_digest(self) -> str:
        """Digest that names the asset in its store."""
        return self.catalog.namespace.prompt

    @cached_property
    def objects(self) -> dict[str, int]:
        """Size in bytes of each object with frames."""
        return objects_of(self.catalog)

    def check_parts(self) -> None:
        """Check that all objects are in the store, as `check_objects` and `lost_lookups`; raise `AssetError`."""
        sizes = object_sizes(self.store)
        self.check_objects(sizes)
        for name in self.lost_lookups(sizes):
            where = self.store.where(name)
            raise AssetError(f"{self.location}: {where} is missing; `kvabr store verify --repair` writes it again")

    def check_objects(self, sizes: Mapping[str, int]) -> None:
        """Check the sizes of all objects with frames, and the profile's digest; players check the frames.

        ``sizes`` are those of all objects in the store. Raise `AssetError` for frames, `FormatError` for the profile.
        """
        for name, size in self.objects.items():
            if (found := sizes.get(name)) != size:
                what = "is missing" if found is None else f"has {found} bytes, expected {size}"
                raise AssetError(f"{self.location}: {self.store.where(name)} {what}; {_ADVICE}")
        self.profile_bytes()

    def lost_lookups(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the names of missing objects by which players find the asset; ``sizes`` as for `check_objects`."""
        names = lookup_names(self.catalog.spec, self.catalog.chunks) if self.catalog.passage is None else []
        return [name for name in names if not sizes.get(name)]

    def check_frames(self) -> None:
        """Check the digests of all frames; errors as for `frame`."""
        for track in self.catalog.published.values():
            for group in range(len(track.bytes)):
                self.frame(group, track.name)

    def place(self, group: int, track: str) -> FramePlace:
        """Return where a frame is stored; raise `FormatError` for a missing track, `IndexError` for a missing group."""
        found = placed(self.catalog, track, group)
        if found is None:
            groups = len(self.catalog.published_track(track).bytes)
            raise IndexError(f"group {group} is outside an asset of {groups} groups")
        return found

    def open_frame(self, group: int, track: str) -> FrameReader:
        """Open a published frame; its size is checked, but not its digest.

        Raise `AssetError` if the frame cannot be read, or its object is too short.
        """
        place = self.place(group, track)
        if isinstance(self.store, LocalStore):
            return open_frame(self.store, place)
        with as_asset_errors():
            return LoadedFrame(self._read(place))

    def frame(self, group: int, track: str) -> memoryview:
        """Return a published frame, checked against the catalog.

        Raise `AssetError` if the frame is missing or unreadable, `FormatError` if it is damaged, or if there is no such
        track.
        """
        place = self.place(group, track)
        with as_asset_errors():
            data = self._read(place)
        if not has_digest(place.digest, data):
            title, where = TITLES[self.catalog.digest_kind], self.store.where(place.name)
            raise FormatError(
                f"{where}: group {group} of {track} is damaged, its {title} is not the one in the catalog; {_ADVICE}"
            )
        return data

    def _read(self, place: FramePlace) -> memoryview:
        size = place.last - place.first
        data = self.store.blocked(self.store.get(place.name, place.first, place.last, limit=size))
        if len(data) != size:
            raise FormatError(f"{self.store.where(place.name)}: truncated, {len(data)} of {size} bytes; {_ADVICE}")
        return data

    def catalog_bytes(self) -> bytes:
        """Return the catalog's bytes; raise `AssetError` if it was removed or replaced."""
        name = catalog_name(self.prompt_digest)
        with as_asset_errors():
            data = bytes(self.store.blocked(self.store.get(name, limit=MAX_CATALOG_BYTES)))
        if hashlib.sha256(data).hexdigest() != self.catalog_sha256:
            raise AssetError(f"{self.location}: the catalog has changed since it was checked")
        return data

    def profile_bytes(self) -> bytes | None:
        """Return the codec profile's bytes, or None if no track needs one.

        Raise `AssetError` if the profile is missing, `FormatError` if it has another digest.
        """
        return None if self.catalog.profile is None else read_profile(self.store, self.catalog)

    def prompt(self) -> Prompt:
        """Return the token ids of the prompt and its continuation.

        Raise `AssetError` if the token ids are missing, as in a fetched asset, `FormatError` if they are damaged.
        """
        name = prompt_name(self.prompt_digest)
        where = self.store.where(name)
        try:
            data = self.store.blocked(self.store.get(name, limit=MAX_PROMPT_BYTES))
        except TransportError as error:
            raise AssetError(f"{error}; only a publisher's folder has the token ids of prompts") from error
        try:
            prompt = Prompt.loads(bytes(data))
        except FormatError as error:
            raise type(error)(f"{where}: {error}") from error
        if not self._is_ours(prompt):
            raise FormatError(f"{where}: does not match the prompt digests of the catalog; {_ADVICE}")
        return prompt

    def has_prompt(self) -> bool:
        """Return True if token ids are stored; assets of engines and copies do not have them."""
        try:
            return self.store.blocked(exists(self.store, prompt_name(self.prompt_digest)))
        except TransportError:
            return True

    def _is_ours(self, prompt: Prompt) -> bool:
        spec, tokens = self.catalog.spec, prompt.tokens
        if len(tokens) != self.catalog.tokens:
            return False
        if prompt.seal is not None:
            # The digests are salted and the salt is not stored, so the seal is checked instead.
            return prompt.is_sealed_for(self.prompt_digest)
        named = chain if self.catalog.passage is None else passage_chain
        digests = named(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
        return tuple(digests) == self.catalog.chunks


def open_frame(store: LocalStore, place: FramePlace) -> FrameReader:
    """Open a frame in a folder, or read it if it is small; raise `AssetError` if it is incomplete."""
    with as_asset_errors():
        file = store.open(place.name)
    size, where = os.fstat(file.fileno()).st_size, store.where(place.name)
    if size < place.last:
        file.close()
        raise AssetError(f"{where}: has {size} bytes, but its catalog needs at least {place.last}; {_ADVICE}")
    frame = FrameFile(where, file, place)
    if frame.size > LOADED_BYTES:
        return frame
    with file:
        return LoadedFrame(frame.read(0, frame.size))


def read_profile(store: Store, catalog: Catalog) -> bytes:
    """Return the codec profile of a catalog; raise `AssetError` if it is missing, `FormatError` for another digest."""
    name, size = profile_name(catalog.profile or ""), catalog.profile_bytes
    if size > MAX_PROFILE_BYTES:
        raise FormatError(f"{store.where(name)}: a profile of {size} bytes, more than any model needs")
    with as_asset_errors():
        data = bytes(store.blocked(store.get(name, limit=size)))
    if hashlib.sha256(data).hexdigest() != catalog.profile:
        raise FormatError(f"{store.where(name)}: not the profile of that name (SHA-256 differs); {_ADVICE}")
    return data


def object_sizes(store: Store, prefixes: Sequence[str] = (GROUPS, MODELS, PAGES)) -> dict[str, int]:
    """Return the size in bytes of each object with frames, model or page; raise `AssetError` if listing fails."""
    with as_asset_errors():
        found = [store.blocked(listing(store, prefix)) for prefix in prefixes]
    return {name: each.size for objects in found for name, each in objects.items()}


def version_in(store: LocalStore, prompt: str) -> AssetVersion | None:
    """Return the current version of an asset in a folder; None without access."""
    try:
        found = Path(store.folder, catalog_name(prompt)).stat()
    except OSError:
        return None
    return AssetVersion(found.st_size, found.st_mtime)


def is_damage(error: KvabrError) -> bool:
    """Return True if the error of a check means damage, False if the asset is only unreadable."""
    if isinstance(error, VersionError):
        return False
    return not isinstance(error.__cause__, TransportError) or isinstance(error.__cause__, NotFoundError)
