"""Assets in folders: `catalog.json`, `profile.safetensors`, `prompt.json`, and `groups/<track>/<group>.kvg` per frame.

An asset is written to a hidden sibling first, reaches the disk, and takes its name in one rename, so a reader that sees
the same catalog before and after reading a frame knows that the frame belongs to it. Folders may be shared with others,
so files that are served are never links of either kind, pipes or devices.

Only the user who wrote an asset can read it. In a folder with the set-group-ID bit, which is how a folder is shared
with a group, the group can read it too, except for `prompt.json`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Self

from kvabr.store.asset import (
    CATALOG,
    PROFILE,
    PROMPT,
    Asset,
    AssetListing,
    AssetVersion,
    FrameReader,
    LoadedFrame,
    Prompt,
)
from kvabr.store.files import (
    PARTIAL,
    PRIVATE,
    PRIVATE_FOLDER,
    FileVersion,
    PartialFolder,
    check_makeable,
    open_regular,
    sweep,
    write_file,
)
from kvabr.store.memory import GROUPS as POOL
from kvabr.types.catalog import MAX_CATALOG_BYTES, SCHEMA, Catalog
from kvabr.types.errors import AssetError, FormatError, MissingAssetError, UsageError
from kvabr.types.naming import check_track_name

MAX_DEPTH = 4
"""Folders below the root that an asset may lie in: ``ROOT/a/b/c/asset``."""
MAX_FOLDERS = 100_000
"""Folders that a listing looks at."""

LOADED_BYTES = 64 << 10
"""Smaller frames are read at once; larger ones piece by piece, from a file that stays open."""
_POOLED_BYTES = 256 << 10
"""Pieces from this size on are read into memory that was used before: fresh memory costs several times the reading."""
_AGAIN = "encode the asset again"


class FolderAsset(Asset):
    """An asset in a folder."""

    def __init__(
        self, path: Path, name: str, version: AssetVersion, catalog_data: bytes, *, follow_links: bool
    ) -> None:
        """See `Asset.__init__`; ``follow_links`` says whether files may be links, as the user's own may."""
        super().__init__(str(path), name, version, catalog_data)
        self.path = path
        self._follow_links = follow_links

    @classmethod
    def open(cls, path: Path, name: str = ".", *, follow_links: bool = True) -> FolderAsset:
        """Open the asset in the folder ``path``; see `AssetStore.open`."""
        if not path.is_dir():
            raise MissingAssetError(
                f"{path}: no such asset; make one with: kvabr encode --text FILE --tokens N --out {path}"
            )
        try:
            version = _version_in(path)
        except OSError as error:
            raise AssetError(_unreadable(path, error)) from error
        if version is None:
            raise MissingAssetError(f"{path}: has no {CATALOG}; is this an asset?")
        data = _read(path / CATALOG, MAX_CATALOG_BYTES, follow_links=follow_links)
        return cls(path, name, version, data, follow_links=follow_links)

    def is_current(self) -> bool:
        """See `Asset.is_current`; costs one look at the file system."""
        return asset_version(self.path) == self.version

    def check_parts(self) -> None:
        """See `Asset.check_parts`; refuses links, which might lead out of the asset."""
        catalog = self.catalog
        for track in catalog.published.values():
            for place in (self.path / GROUPS, self.path / GROUPS / track.name):
                if _is_link(place):
                    raise AssetError(f"{place}: is a link; an asset's own files must lie in its folder")
            for group, size in enumerate(track.bytes):
                _check_size(frame_path(self.path, group, track.name), size)
        if catalog.profile is not None:
            path = self.path / PROFILE
            _check_size(path, catalog.profile_bytes)
            version = FileVersion.of(path)
            if version is None or _sha256(path, version) != catalog.profile:
                raise FormatError(f"{path}: not the profile that the catalog names (SHA-256 differs)")

    def open_frame(self, group: int, track: str) -> FrameReader:
        return open_frame_in(self.path, group, track, self.catalog.published_track(track).bytes[group])

    def _read_part(self, part: str, max_bytes: int) -> bytes:
        return _read(self.path / part, max_bytes, follow_links=self._follow_links)

    def _frame_part(self, group: int, track: str) -> str:
        return str(frame_path(Path(), group, track))


class FolderAssetStore:
    """An `AssetStore`: a folder that is an asset, or has assets in it, at most `MAX_DEPTH` levels down."""

    look_every_s = 0.0

    def __init__(self, root: Path) -> None:
        """Take the folder, which need not exist yet."""
        self.root = root

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self.root)

    def prepare(self) -> None:
        try:
            self.root.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.root}: this folder to publish in cannot be made ({error.strerror})") from error

    def list(self) -> AssetListing:
        """See `AssetStore.list`. Looks once into each folder that is not hidden; links to folders count."""
        left = MAX_FOLDERS
        versions: dict[str, AssetVersion] = {}
        unreadable: dict[str, str] = {}
        todo = [(".", self.root, 0)]
        while todo and left:
            name, path, depth = todo.pop()
            left -= 1
            try:
                version = _version_in(path)
                if version is not None:
                    versions[name] = version
                elif depth < MAX_DEPTH:
                    prefix = "" if depth == 0 else f"{name}/"
                    todo += [(prefix + inner, path / inner, depth + 1) for inner in _folders_in(path)]
            except OSError as error:
                unreadable[name] = _unreadable(path, error)
        return AssetListing(versions, complete=not todo, unreadable=unreadable)

    def version(self, name: str) -> AssetVersion | None:
        path = self.root / name
        try:
            return _version_in(path)
        except OSError as error:
            raise AssetError(_unreadable(path, error)) from error

    def open(self, name: str = ".", *, follow_links: bool = False) -> FolderAsset:
        """See `AssetStore.open`; refuses links unless they may be followed."""
        return FolderAsset.open(self.root / name, name, follow_links=follow_links)

    def writer(self, name: str = ".", *, force: bool = False) -> FolderAssetWriter:
        return FolderAssetWriter(self.root / name, force=force, shares_profile=name != ".")

    def close(self) -> None:
        """See `AssetStore.close`; a folder has none."""


def asset_version(path: Path) -> AssetVersion | None:
    """Return the version of the asset in a folder, that of its catalog's file; None if there is none to be seen."""
    try:
        return _version_in(path)
    except OSError:
        return None


def _version_in(path: Path) -> AssetVersion | None:
    """As `asset_version`, but raise `OSError` if the folder may not be looked into."""
    try:
        found = FileVersion.from_stat((path / CATALOG).stat())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return AssetVersion("-".join(f"{part:x}" for part in found), found.modified_ns)


def _unreadable(path: Path, error: OSError) -> str:
    """Say why a folder cannot be looked into, and what to do."""
    what = f"{path}: cannot be looked into ({error.strerror})"
    if not isinstance(error, PermissionError):
        return what
    return f"{what}; let this user read it, or publish with the group's right to read (chmod g+s on the folder above)"


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError as error:
        raise AssetError(f"{path}: cannot be looked at ({error.strerror})") from error


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        what = "missing from the asset" if isinstance(error, FileNotFoundError) else "cannot be looked at"
        raise AssetError(f"{path}: {what} ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise AssetError(f"{path}: is no ordinary file; an asset's own files must lie in its folder")
    if found.st_nlink > 1 and path.name != PROFILE:
        raise AssetError(f"{path}: has another name (it is a hard link); copy the file into the asset instead")
    if found.st_size != size:
        raise AssetError(f"{path}: has {found.st_size} bytes, its catalog says {size}")


@lru_cache(maxsize=1024)
def _sha256(path: Path, version: FileVersion) -> str:  # noqa: ARG001 - part of the cache's key
    with _open(path, follow_links=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FrameFile(FrameReader):
    """A frame in a file. It is not mapped into memory: then a file that is cut short would end the process (SIGBUS)."""

    files = 1

    def __init__(self, path: Path, file: BufferedReader) -> None:
        """Take over the open file."""
        self._path, self._file = path, file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, begin: int, end: int) -> memoryview:
        size = end - begin
        try:
            if size < _POOLED_BYTES:
                data = memoryview(os.pread(self._file.fileno(), size, begin))
            else:
                data = POOL.take(size)
                data = data[: os.preadv(self._file.fileno(), [data], begin)]
        except (OSError, ValueError) as error:
            raise AssetError(f"{self._path}: cannot be read ({error})") from error
        if len(data) != size:
            raise AssetError(f"{self._path}: has become shorter than {end} bytes; {_AGAIN}")
        return data

    def close(self) -> None:
        self._file.close()


def open_frame_in(root: Path, group: int, track: str, size: int, *, dir_fd: int | None = None) -> FrameReader:
    """Open a frame of ``size`` bytes, or read it if it is small: neither it nor its folder is a link.

    ``dir_fd`` is an open asset's folder, which may have another name than ``root`` by now. Raises `AssetError`.
    """
    path, folder = frame_path(root, group, track), None
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        folder = os.open(path.parent if dir_fd is None else path.parent.relative_to(root), flags, dir_fd=dir_fd)
        file = open_regular(path.name, sole=True, dir_fd=folder)
    except OSError as error:
        raise AssetError(f"{path}: cannot be read ({error})") from error
    finally:
        if folder is not None:
            os.close(folder)
    frame: FrameReader = FrameFile(path, file)
    if frame.size != size:
        frame.close()
        raise AssetError(f"{path}: has {frame.size} bytes, its catalog says {size}; {_AGAIN}")
    if size > LOADED_BYTES:
        return frame
    with file:
        return LoadedFrame(memoryview(file.read(LOADED_BYTES + 1)))


def _open(path: Path, *, follow_links: bool) -> BufferedReader:
    sole = not follow_links and path.name != PROFILE  # assets share profiles, whose digests are checked
    try:
        return open_regular(path, follow_links=follow_links, sole=sole)
    except FileNotFoundError as error:
        raise AssetError(f"{path}: missing from the asset; {_AGAIN}, or copy the whole folder") from error
    except OSError as error:
        raise AssetError(f"{path}: cannot be read ({error.strerror})") from error


def _read(path: Path, max_bytes: int, *, follow_links: bool) -> bytes:
    """Return at most ``max_bytes`` + 1 bytes of a file."""
    with _open(path, follow_links=follow_links) as file:
        return file.read(max_bytes + 1)


def _folders_in(path: Path) -> list[str]:
    """Return the names of the folders in a folder that are not hidden, in reverse for a stack; raises `OSError`."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []  # removed a moment ago


def folders_of_assets(path: Path) -> list[Path]:
    """Return the folders in a folder in which assets may lie: those that are neither hidden nor assets."""
    try:
        names = _folders_in(path)
    except OSError:
        return []
    return [inner for name in names if not os.path.lexists((inner := path / name) / CATALOG)]


GROUPS = "groups"
PROFILES = ".profiles"
"""Folder beside assets with the codec profiles that they share, by SHA-256."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def frame_path(root: Path, group: int, track: str) -> Path:
    """Return where the frame of a group on a track lies; `FormatError` if that might be outside ``root``."""
    return root / GROUPS / check_track_name(track) / f"{group:05d}.kvg"


class FolderAssetWriter:
    """An `AssetWriter` that makes a folder."""

    syncs = True
    """Whether each file reaches the disk when it is written; otherwise all of them do at the end."""

    def __init__(self, path: Path, *, force: bool = False, shares_profile: bool = False) -> None:
        """Check that the folder ``path`` may be made or replaced; see `AssetStore.writer`.

        With ``shares_profile``, all assets in the folder above are hard links to one copy of their codec profile.
        """
        self._path, self._shares_profile = path, shares_profile
        self._partial: PartialFolder | None = None
        self._mode, self._folder_mode = PRIVATE, PRIVATE_FOLDER
        if not path.name:
            raise UsageError(f"{path}: an asset takes the place of its folder; name one in it, such as {path / 'NAME'}")
        if path.is_symlink() or (path.exists() and not _is_asset(path) and not _is_empty(path)):
            raise AssetError(f"{path}: exists and is not an asset of kvabr; it is left alone, choose another path")
        if _is_asset(path) and not force:
            raise UsageError(f"{path}: this asset exists; add --force to replace it")
        check_makeable(path)

    @property
    def location(self) -> str:
        return str(self._path)

    def __enter__(self) -> Self:
        try:
            parent = self._path.parent
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent)
            if parent.stat().st_mode & stat.S_ISGID:
                self._mode, self._folder_mode = PRIVATE | stat.S_IRGRP, PRIVATE_FOLDER | stat.S_IRGRP | stat.S_IXGRP
            self._partial = PartialFolder(self._path, self._folder_mode)
        except OSError as error:
            raise AssetError(f"{self._path}: cannot be made ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._partial is not None:
            self._partial.remove()
            self._partial = None

    def frame(self, group: int, track: str, frame: bytes) -> None:
        self._write(frame_path(Path(), group, track), frame)

    def read_frame(self, group: int, track: str) -> bytes:
        return (self._open_partial() / frame_path(Path(), group, track)).read_bytes()

    def profile(self, data: bytes) -> None:
        if not (self._shares_profile and self._linked(data)):
            self._write(Path(PROFILE), data)

    def _linked(self, data: bytes) -> bool:
        """Make the profile a link to the copy that all assets here share; return False if that is not possible."""
        shared = self._path.parent / PROFILES / hashlib.sha256(data).hexdigest()
        try:
            if not shared.is_file() or shared.read_bytes() != data:
                shared.parent.mkdir(mode=self._folder_mode, exist_ok=True)
                write_file(shared, data, mode=self._mode)
            (self._open_partial() / PROFILE).hardlink_to(shared)
        except (OSError, AssetError):  # the file system has no hard links, or the copy belongs to another user
            return False
        return True

    def prompt(self, prompt: Prompt) -> None:
        self._write(Path(PROMPT), prompt.dumps().encode())

    def commit(self, catalog: Catalog) -> None:
        self._write(Path(CATALOG), catalog.dumps().encode())
        partial = self._open_partial()
        try:
            sync_asset(partial, files=not self.syncs)
            if not (self._path.exists() and _exchange(partial, self._path)):
                partial.rename(self._path)
            _sync(self._path.parent)
        except OSError as error:
            raise self._failure(self._path, error) from error

    def _write(self, name: Path, data: bytes) -> None:
        partial = self._open_partial()
        mode = PRIVATE if name == Path(PROMPT) else self._mode
        try:
            for folder in reversed(name.parents[:-1]):
                (partial / folder).mkdir(mode=self._folder_mode, exist_ok=True)
            with open(partial / name, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                file.write(data)
                file.flush()
                if self.syncs:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._failure(name, error) from error

    def _open_partial(self) -> Path:
        if self._partial is None:
            raise UsageError("an asset is written inside its writer's with statement")
        return self._partial.path

    def _failure(self, name: Path, error: OSError) -> AssetError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return AssetError(
                f"{self._path}: no space left while writing {name} ({error.strerror}); nothing of the asset was kept, "
                "make room or choose another disk"
            )
        return AssetError(f"{self._path}: cannot write {name} ({error.strerror}); nothing of the asset was kept")


def _is_asset(path: Path) -> bool:
    try:
        Catalog.read(path / CATALOG)
    except AssetError:
        return False
    except FormatError:
        # A damaged or newer catalog still marks an asset if it begins like one, or there are groups.
        with (path / CATALOG).open("rb") as file:
            return SCHEMA.rsplit("/", 1)[0].encode() in file.read(256) or (path / GROUPS).is_dir()
    return True


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _exchange(new: Path, old: Path) -> bool:
    """Swap two folders in one step, so that both names exist at every moment; return False if ``old`` is gone."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), ctypes.c_uint(_RENAME_EXCHANGE)
    ):
        return True
    if not old.exists():  # removed meanwhile
        return False
    # Not Linux, or a file system that cannot swap: two renames, the first of which is undone if the second fails.
    aside = Path(tempfile.mkdtemp(prefix=f".{old.name}.", suffix=PARTIAL, dir=old.parent))
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return True


def sync_asset(path: Path, *, files: bool = True) -> None:
    """Have the folders of an asset reach the disk, and its ``files`` unless they have; raises `OSError`."""
    for file in path.rglob("*") if files else ():
        if file.is_file():
            _sync(file)
    for folder in [path, *sorted((path / GROUPS).glob("*")), path / GROUPS]:
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
