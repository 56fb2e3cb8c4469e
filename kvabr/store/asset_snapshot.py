"""One asset as a library keeps it: checked when it is found, and noticed when its folder changes."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvabr.store.asset import CATALOG, GROUPS, PROFILE, Asset, frame_path
from kvabr.store.publication import LevelPublication, PublishedGroup
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.naming import (
    CATALOG_TRACK,
    MAX_FULL_TRACK_NAME,
    PREFIX_TRACK,
    PROFILE_TRACK,
    TrackNamespace,
    prefix_key,
)

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """By what a file is known to be still the same, without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp | None:
        """The stamp of a file; None if it is gone or cannot be looked at."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, eq=False)
class ShelvedAsset:
    """One good asset."""

    folder: str
    """Relative to the library's root, with slashes; what a grant's patterns are about."""
    asset: Asset
    stamp: Stamp
    """Of the catalog's file, from before it was read."""
    catalog_sha256: str
    catalog_bytes: int
    keys: tuple[bytes, ...]
    """What the name of a lookup would carry of each group's digest."""
    levels: dict[str, PinnedLevel]
    """By track."""

    @property
    def namespace(self) -> TrackNamespace:
        """Of its tracks."""
        return self.asset.catalog.namespace

    def is_current(self) -> bool:
        """Whether the folder still holds what was checked; costs one look at the file system."""
        return Stamp.of(self.asset.path / CATALOG) == self.stamp

    def catalog_data(self) -> bytes:
        """The catalog's file.

        Raises:
            AssetError: it is gone, or no longer the one that was checked.
        """
        return _read(self.asset.path / CATALOG, self.catalog_bytes, self.catalog_sha256)

    def profile_data(self) -> bytes:
        """The profile's file; only of an asset that has one.

        Raises:
            AssetError: it is gone, or no longer the one that was checked.
        """
        catalog = self.asset.catalog
        return _read(self.asset.path / PROFILE, catalog.profile_bytes, catalog.profile or "")


class PinnedLevel(LevelPublication):
    """A level of one version of an asset: after the folder was replaced it does not pass off new bytes as old ones."""

    def __init__(self, asset: Asset, track: str, stamp: Stamp) -> None:
        super().__init__(asset, track)
        self._stamp = stamp

    def open(self, group: int) -> PublishedGroup:
        """Map the frame's file, then make sure that it was the right asset's.

        Raises:
            IndexError, AssetError: as `LevelPublication.open`, and the latter if the asset was replaced or removed.
        """
        found = super().open(group)
        # In this order: whole folders are exchanged, so what was mapped before an unchanged catalog belongs to it.
        if Stamp.of(self._asset.path / CATALOG) != self._stamp:
            raise AssetError(f"{self._asset.path}: was replaced or removed; ask for its catalog again")
        return found


def shelve(path: Path, folder: str, stamp: Stamp) -> ShelvedAsset:
    """Read an asset's catalog, and check that all it names is there: sizes of the frames, digest of the profile.

    Frames are not read: a player checks each one's digest.

    Args:
        path: the folder.
        folder: the same, as `ShelvedAsset.folder` has it.
        stamp: of the catalog's file.

    Raises:
        AssetError: a file is missing, has another size, is a link, or is not to be read.
        FormatError: the catalog is damaged, of a newer version, or names what cannot be served.
    """
    with _open_regular(path / CATALOG) as file:
        data = file.read(MAX_CATALOG_BYTES + 1)
    try:
        catalog = Catalog.loads(data)
        _check_names(catalog)
        keys = tuple(map(prefix_key, catalog.chunks))
    except FormatError as error:
        raise FormatError(f"{path / CATALOG}: {error}") from error
    asset = Asset(path, catalog)
    check_files(asset)
    return ShelvedAsset(
        folder=folder,
        asset=asset,
        stamp=stamp,
        catalog_sha256=hashlib.sha256(data).hexdigest(),
        catalog_bytes=len(data),
        keys=keys,
        levels={track.name: PinnedLevel(asset, track.name, stamp) for track in catalog.tracks},
    )


def check_files(asset: Asset) -> None:
    """Check that all files which a catalog names are there.

    Raises:
        AssetError: one is missing, has another size, or is a link, which might lead out of the asset.
        FormatError: the profile is not the one that the catalog names.
    """
    catalog = asset.catalog
    for track in catalog.tracks:
        for place in (asset.path / GROUPS, asset.path / GROUPS / track.name):
            if place.is_symlink():
                raise AssetError(f"{place}: is a link; an asset's own files must lie in its folder")
        for group, size in enumerate(track.bytes):
            _check_size(frame_path(asset.path, group, track.name), size)
    if catalog.profile is not None:
        path = asset.path / PROFILE
        _check_size(path, catalog.profile_bytes)
        stamp = Stamp.of(path)
        if stamp is None or _sha256(path, stamp) != catalog.profile:
            raise FormatError(f"{path}: not the profile that the catalog names (SHA-256 differs)")


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise AssetError(f"{path}: missing from the asset ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise AssetError(f"{path}: is no ordinary file; an asset's own files must lie in its folder")
    if found.st_size != size:
        raise AssetError(f"{path}: has {found.st_size} bytes, its catalog says {size}")


@lru_cache(maxsize=1024)
def _sha256(path: Path, stamp: Stamp) -> str:  # noqa: ARG001 - the stamp is part of what is remembered
    """Digest of a file as it was when it had that stamp."""
    with _open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_names(catalog: Catalog) -> None:
    space = catalog.namespace
    for track in catalog.tracks:
        if track.name in {CATALOG_TRACK, PROFILE_TRACK} or track.name.startswith(PREFIX_TRACK):
            raise FormatError(f"catalog: no level may be called {track.name!r}, which names another track")
        if space.full_name_bytes(track.name) > MAX_FULL_TRACK_NAME:
            raise FormatError(f"catalog: full track names are longer than {MAX_FULL_TRACK_NAME} bytes")
        if not all(map(_DIGEST.fullmatch, track.digests)):
            raise FormatError(f"catalog: track {track.name} has a digest that is not 64 hex digits")
    if catalog.profile is not None and not _DIGEST.fullmatch(catalog.profile):
        raise FormatError("catalog: the profile's digest is not 64 hex digits")
    if catalog.spec.model != space.model:
        raise FormatError(f"catalog: of {catalog.spec.model!r}, but its namespace says {space.model!r}")
    if catalog.chunks[-1] != space.prompt:
        raise FormatError("catalog: the last prompt digest is not the one in the namespace")


def _open_regular(path: Path) -> io.BufferedReader:
    """Open an ordinary file; not a link, nor a pipe that would block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AssetError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AssetError(f"{path}: is no ordinary file")
    return os.fdopen(descriptor, "rb")


def _read(path: Path, size: int, sha256: str) -> bytes:
    with _open_regular(path) as file:
        data = file.read(size + 1)
    if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
        raise AssetError(f"{path}: no longer the file that was checked")
    return data
