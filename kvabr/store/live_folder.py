"""Assets in folders that are still being written: a producer appends, a server in another process follows.

The hidden folder of a `FolderAssetWriter` gets two more files: `live.json`, a `kvabr.types.live.LiveCatalog`, and
`edge.jsonl`, to which a line is appended when the frames of a group are in their places. The folder is locked as long
as its writer lives, so a follower knows of a writer that was killed. At the end the folder takes its name, with an
ordinary catalog: the same files, which a follower has open by the folder, not by its name.

A producer that fails leaves what it has published as an asset of its own, under the name of the shorter prompt.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kvabr.store.asset import FrameReader
from kvabr.store.asset_folder import FolderAssetWriter, frame_path, open_frame_in
from kvabr.store.files import PARTIAL, open_regular
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.live import (
    MAX_EDGE_BYTES,
    MAX_LIVE_BYTES,
    EdgeMessage,
    LiveCatalog,
    parse_edge,
)

LIVE, EDGE = "live.json", "edge.jsonl"
_READ_BYTES = 1 << 16
_MOST_FOLDERS = 1000
"""Most folders that are being written which a look finds."""


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
        """Open a folder that `live_folders` found.

        Raises:
            AssetError: there is nothing to follow, or it cannot be read.
            FormatError: what is there is damaged.
        """
        self.path = path
        self._buffer = b""
        self._edge: int | None = None
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise AssetError(f"{path}: cannot be followed ({error.strerror})") from error
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

        Raises `FormatError` for a line that is no message, `AssetError` if the file cannot be read.
        """
        if self._edge is None:
            raise AssetError(f"{self.path}: is no longer followed")
        found: list[EdgeMessage] = []
        try:
            while data := os.read(self._edge, _READ_BYTES):
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                found += map(parse_edge, lines)
                if len(self._buffer) > MAX_EDGE_BYTES:
                    raise FormatError(f"{self.path}/{EDGE}: a line of more than {MAX_EDGE_BYTES} bytes")
        except OSError as error:
            raise AssetError(f"{self.path}/{EDGE}: cannot be read ({error.strerror})") from error
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


def live_folders(root: Path) -> Iterator[Path]:
    """Yield the folders in ``root`` in which assets are being written that can be followed."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for count, entry in enumerate(entries):
            if count >= _MOST_FOLDERS * 100:
                return
            if entry.name.startswith(".") and entry.name.endswith(PARTIAL) and entry.is_dir(follow_symlinks=False):
                path = Path(entry)
                if (path / LIVE).exists():
                    yield path


def new_key() -> str:
    """Return a key for a production, see `LiveCatalog.key`."""
    return secrets.token_hex(8)
