"""Assets in folders that are still being written: a producer appends, a server in another process follows.

The hidden folder of a `FolderAssetWriter` gets two more files: `live.json`, a `kvabr.types.live.LiveCatalog`, and
`edge.jsonl`, to which a line is appended when the frames of a group are in their places. The folder is locked as long
as its writer lives, so a follower knows of a writer that was killed. At the end the folder takes its name, with an
ordinary catalog: the same files, which a follower has open by the folder, not by its name.

A producer that fails leaves what it has published as an asset of its own, under the name of the shorter prompt. For one
that was killed a follower does that, see `LiveFolder.rescue`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvabr.store.asset import CATALOG, PROFILE, PROMPT, FrameReader
from kvabr.store.asset_folder import FolderAssetWriter, frame_path, open_frame_in, sync_asset
from kvabr.store.files import PARTIAL, open_regular
from kvabr.types.catalog import Catalog
from kvabr.types.digests import has_digest
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.live import (
    MAX_EDGE_BYTES,
    MAX_LIVE_BYTES,
    EdgeMessage,
    LiveCatalog,
    PublishedFrames,
    parse_edge,
    published_catalog,
)

LIVE, EDGE = "live.json", "edge.jsonl"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_BYTES = 1 << 16
_MOST_ENTRIES = 100_000
"""Entries of a folder that a look goes through."""


class LiveFolderWriter(FolderAssetWriter):
    """An `AssetWriter` whose asset can be played before it is complete. Frames reach the disk at the end only."""

    syncs = False
    _edge: int | None = None

    def begin(self, live: LiveCatalog) -> None:
        """Say what the asset will be; from now on it can be followed."""
        self._write(Path(f"{LIVE}{PARTIAL}"), live.dumps().encode())
        folder = self._open_partial()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._edge = os.open(folder / EDGE, flags, self._mode)
            (folder / f"{LIVE}{PARTIAL}").rename(folder / LIVE)
        except OSError as error:
            raise self._failure(Path(LIVE), error) from error

    def tell(self, message: EdgeMessage) -> None:
        """Append a message; the frames that it names must have been written."""
        assert self._edge is not None  # noqa: S101  # `begin` comes first
        line = message.dumps() + b"\n"
        try:
            written = os.write(self._edge, line)
        except OSError as error:
            raise self._failure(Path(EDGE), error) from error
        if written != len(line):
            raise self._failure(Path(EDGE), OSError(errno.ENOSPC, "no space left"))

    def discard(self, group: int, track: str) -> None:
        """Remove a frame, whole or not, that no message has named; there may be none."""
        with contextlib.suppress(OSError):
            (self._open_partial() / frame_path(Path(), group, track)).unlink()

    def commit(self, catalog: Catalog, path: Path | None = None) -> None:
        """See `AssetWriter.commit`; under another ``path`` if it is that of a shorter prompt. Followers hear of it."""
        if path is not None:
            self._path = path
        super().commit(catalog)
        if self._edge is not None:
            for name in (LIVE, EDGE):
                (self._path / name).unlink(missing_ok=True)

    def __exit__(self, *given: object) -> None:
        if self._edge is not None:
            os.close(self._edge)
            self._edge = None
        super().__exit__(*given)


class LiveFolder:
    """Follows an asset that is being written."""

    def __init__(self, path: Path) -> None:
        """Open a folder of `partial_folders` that has a `LIVE`.

        Raises:
            AssetError: there is nothing to follow, or it cannot be read.
            FormatError: what is there is damaged.
        """
        self.path = path
        self.asset_path = path.with_name(path.name.removeprefix(".").removesuffix(PARTIAL).rpartition(".")[0])
        """The path that it has once it is complete."""
        self._buffer = b""
        self._damage: FormatError | None = None
        self._edge: int | None = None
        try:
            self._folder = os.open(path, _FOLDER)
        except OSError as error:
            raise AssetError(f"{path}: cannot be followed ({error.strerror})") from error
        found = os.fstat(self._folder)
        self._identity = found.st_dev, found.st_ino
        try:
            with open_regular(LIVE, sole=True, dir_fd=self._folder) as file:
                self.live = LiveCatalog.loads(file.read(MAX_LIVE_BYTES + 1))
            edge = open_regular(EDGE, sole=True, dir_fd=self._folder)
            self._edge = os.dup(edge.fileno())
            edge.close()
        except OSError as error:
            self.close()
            raise AssetError(f"{path}: cannot be followed ({error.strerror})") from error
        except FormatError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop following. May be called twice."""
        for handle in (self._edge, self._folder):
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self._edge, self._folder = None, -1

    def read(self) -> list[EdgeMessage]:
        """Return the messages since the last call, at once; a line that is not complete yet comes later.

        Raises `FormatError` for a line that is no message, `AssetError` if the file cannot be read. The messages before
        that line are returned first.
        """
        if self._edge is None:
            raise AssetError(f"{self.path}: is no longer followed")
        if self._damage is not None:
            raise self._damage
        found: list[EdgeMessage] = []
        try:
            while data := os.read(self._edge, _READ_BYTES):
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    found.append(parse_edge(line))  # noqa: PERF401  # those before a bad one count
                if len(self._buffer) > MAX_EDGE_BYTES:
                    parse_edge(self._buffer)  # raises
        except OSError as error:
            raise AssetError(f"{self.path}/{EDGE}: cannot be read ({error.strerror})") from error
        except FormatError as error:
            self._damage = error
            if not found:
                raise
        return found

    def has_writer(self) -> bool:
        """Return whether the writer lives; also where the file system has no locks."""
        try:
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self._folder, fcntl.LOCK_UN)
        return False

    def open_frame(self, group: int, track: str, size: int) -> FrameReader:
        """Open a frame that a message has named, of that size, wherever the folder is now; raises `AssetError`."""
        return open_frame_in(self.path, group, track, size, dir_fd=self._folder)

    def profile_bytes(self) -> bytes:
        """Return the codec profile; `AssetError` if it is missing, `FormatError` if it is not the catalog's."""
        catalog = self.live.catalog
        try:
            with open_regular(PROFILE, dir_fd=self._folder) as file:  # its digest is checked
                data = file.read(catalog.profile_bytes + 1)
        except OSError as error:
            raise AssetError(f"{self.path}/{PROFILE}: cannot be read ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != catalog.profile:
            raise FormatError(f"{self.path}/{PROFILE}: not the profile that the live catalog names (SHA-256 differs)")
        return data

    def is_at(self, path: Path) -> bool:
        """Return whether the folder is what lies at a path now."""
        try:
            found = path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    @property
    def is_partial(self) -> bool:
        """Whether the folder has no name yet."""
        return self.is_at(self.path)

    def place(self, groups: int) -> Path | None:
        """Return where the folder is now; None if it was removed. ``groups``: groups of tokens that are published."""
        shorter = (self.path.with_name(name) for name in reversed(self.live.catalog.chunks[:groups]))
        return next((path for path in (self.path, self.asset_path, *shorter) if self.is_at(path)), None)

    def rescue(self, news: Sequence[PublishedFrames]) -> Path | None:
        """Make an asset of what a killed writer has published, under the name of the whole prompt or a shorter one.

        Each frame is checked: after a power failure the last ones may be lost. If there is nothing to keep, or such an
        asset exists, the folder is removed. Returns the new asset's path.

        Raises `AssetError` if that cannot be done, for instance because the folder belongs to somebody else.
        """
        handle = None
        try:
            handle = os.open(self.path, _FOLDER)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._rescue(news) if self.is_partial else None
        except (FileNotFoundError, BlockingIOError):
            return None  # it has got its name, or another server is at it
        except OSError as error:
            raise AssetError(f"{self.path}: cannot be made an asset ({error.strerror})") from error
        finally:
            if handle is not None:
                os.close(handle)

    def _rescue(self, news: Sequence[PublishedFrames]) -> Path | None:
        catalog = published_catalog(self.live, news)
        while catalog is not None and (sound := self._sound(catalog, news)) < len(catalog.chunks):
            catalog = published_catalog(self.live, news[:sound])
        with contextlib.suppress(AssetError, FormatError):
            if catalog is not None and (catalog.profile is None or self.profile_bytes()):
                whole = len(catalog.chunks) == len(self.live.catalog.chunks)
                target = self.asset_path if whole else self.path.with_name(catalog.namespace.prompt)
                if not os.path.lexists(target):
                    self._commit(catalog, target)
                    return target
        shutil.rmtree(self.path, ignore_errors=True)
        return None

    def _sound(self, catalog: Catalog, news: Sequence[PublishedFrames]) -> int:
        """Return how many groups of tokens are there, bit by bit."""
        units = range(catalog.groups)
        for unit in map(catalog.unit, units) if catalog.every_token else catalog.units:
            for track in catalog.tracks:
                name = catalog.spec.parts[unit.part].track_name(track.name)
                size, digest = news[unit.chunk].frames[name]
                try:
                    frame = self.open_frame(unit.group, name, size)
                    try:
                        if not has_digest(digest, frame.read(0, size)):
                            return unit.chunk
                    finally:
                        frame.close()
                except AssetError:
                    return unit.chunk
        return len(catalog.chunks)

    def _commit(self, catalog: Catalog, target: Path) -> None:
        for name in (CATALOG, PROMPT, f"{LIVE}{PARTIAL}"):  # which may be half written, or of the whole prompt
            (self.path / name).unlink(missing_ok=True)
        mode = os.stat(LIVE, dir_fd=self._folder).st_mode & 0o777
        with open(self.path / CATALOG, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            file.write(catalog.dumps().encode())
        sync_asset(self.path)
        self.path.rename(target)
        for name in (LIVE, EDGE):
            (target / name).unlink(missing_ok=True)


def partial_folders(root: Path) -> list[Path]:
    """Return the folders in ``root`` in which assets are being written, that can be followed or cannot yet."""
    found: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for count, entry in enumerate(entries):
            if count >= _MOST_ENTRIES:
                break
            if entry.name.startswith(".") and entry.name.endswith(PARTIAL) and entry.is_dir(follow_symlinks=False):
                found.append(Path(entry))
    return found


def new_key() -> str:
    """Return a key for a production, see `LiveCatalog.key`."""
    return secrets.token_hex(8)
