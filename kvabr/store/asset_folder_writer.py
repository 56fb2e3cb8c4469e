"""Writes assets into folders: an asset appears whole, or nothing of it remains.

Everything goes to a hidden sibling folder first, reaches the disk, and takes its name in one rename at the end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from kvabr.store.asset import CATALOG, PROFILE, PROMPT, Prompt
from kvabr.store.files import make_sibling
from kvabr.types.catalog import SCHEMA, Catalog
from kvabr.types.errors import AssetError, FormatError, UsageError
from kvabr.types.naming import check_track_name

GROUPS = "groups"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def frame_path(root: Path, group: int, track: str) -> Path:
    """Return where the frame of a group on a track lies; `FormatError` if that might be outside ``root``."""
    return root / GROUPS / check_track_name(track) / f"{group:05d}.kvg"


class FolderAssetWriter:
    """An `AssetWriter` that makes a folder."""

    def __init__(self, path: Path, *, force: bool = False) -> None:
        """Check that the folder ``path`` may be made or replaced; see `AssetStore.writer`."""
        self._path = path
        self._partial: Path | None = None
        if path.is_symlink() or (path.exists() and not _is_asset(path) and not _is_empty(path)):
            raise AssetError(f"{path}: exists and is not an asset of kvabr; it is left alone, choose another path")
        if _is_asset(path) and not force:
            raise UsageError(f"{path}: this asset exists; add --force to replace it")

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._partial = make_sibling(self._path)
        except OSError as error:
            raise AssetError(f"{self._path}: cannot be made ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def frame(self, group: int, track: str, frame: bytes) -> None:
        """See `AssetWriter.frame`."""
        self._write(frame_path(Path(), group, track), frame)

    def read_frame(self, group: int, track: str) -> bytes:
        """See `AssetWriter.read_frame`."""
        return (self._open_partial() / frame_path(Path(), group, track)).read_bytes()

    def profile(self, data: bytes) -> None:
        """See `AssetWriter.profile`."""
        self._write(Path(PROFILE), data)

    def prompt(self, prompt: Prompt) -> None:
        """See `AssetWriter.prompt`."""
        self._write(Path(PROMPT), prompt.dumps().encode())

    def commit(self, catalog: Catalog) -> None:
        """See `AssetWriter.commit`."""
        self._write(Path(CATALOG), catalog.dumps().encode())
        partial = self._open_partial()
        try:
            for folder in [partial, *sorted((partial / GROUPS).glob("*")), partial / GROUPS]:
                _sync(folder)
            if self._path.exists():
                _exchange(partial, self._path)
            else:
                partial.rename(self._path)
            _sync(self._path.parent)
        except OSError as error:
            raise self._failure(self._path, error) from error

    def _write(self, name: Path, data: bytes) -> None:
        path = self._open_partial() / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failure(name, error) from error

    def _open_partial(self) -> Path:
        if self._partial is None:
            raise UsageError("an asset is written inside its writer's with statement")
        return self._partial

    def _failure(self, name: Path, error: OSError) -> AssetError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return AssetError(
                f"{self._path}: no space left while writing {name} ({error.strerror}); nothing of the asset was kept, "
                "make room or choose another disk"
            )
        return AssetError(f"{self._path}: cannot write {name} ({error.strerror}); nothing of the asset was kept")


def _is_asset(path: Path) -> bool:
    """Return whether a folder is an asset, of any version."""
    try:
        Catalog.read(path / CATALOG)
    except AssetError:
        return False
    except FormatError:
        # A damaged or newer catalog still marks an asset if it begins like one.
        with (path / CATALOG).open("rb") as file:
            return SCHEMA.rsplit("/", 1)[0].encode() in file.read(256)
    return True


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step, so that both names exist at every moment."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), ctypes.c_uint(_RENAME_EXCHANGE)
    ):
        return
    # Not Linux, or a file system that cannot swap: two renames, the first of which is undone if the second fails.
    aside = Path(tempfile.mkdtemp(prefix=f".{old.name}.", suffix=".old", dir=old.parent))
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
