"""Files: written atomically, private if they contain caches, and read up to a size limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import NamedTuple

from kvabr.types.errors import AssetError, KvabrError, UsageError

MIN_SALT_BYTES = 16
MAX_SALT_BYTES = 4096

PARTIAL = ".partial"
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of private files and folders."""
STALE_S = 3600.0
"""Seconds without a change after which a partial file of a killed process may be removed."""


class FileVersion(NamedTuple):
    """Identifies the content of a file without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileVersion | None:
        """Return a file's version, or None without access."""
        try:
            return cls.from_stat(path.stat())
        except OSError:
            return None

    @classmethod
    def from_stat(cls, found: os.stat_result) -> FileVersion:
        """Return the version from a file's status."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def open_regular(
    path: Path | str, *, follow_links: bool = False, sole: bool = False, dir_fd: int | None = None
) -> BufferedReader:
    """Open an ordinary file for reading; raise `OSError` for other files, such as pipes, which would block.

    ``sole`` also refuses a file with a second hard link, which may belong elsewhere, except the link of its partial
    name.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links
    try:  # do not change access times: those of catalogs record their last use by an engine
        handle = os.open(path, flags | getattr(os, "O_NOATIME", 0), dir_fd=dir_fd)
    except PermissionError:  # a file of another user
        handle = os.open(path, flags, dir_fd=dir_fd)
    found = os.fstat(handle)
    linked = sole and found.st_nlink > 1 and _has_other_names(Path(path), handle)
    if not stat.S_ISREG(found.st_mode) or linked:
        os.close(handle)
        raise OSError(errno.EINVAL, "a hard link" if stat.S_ISREG(found.st_mode) else "not a regular file")
    return os.fdopen(handle, "rb")


def _has_other_names(path: Path, handle: int) -> bool:
    partial = 0
    for other in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        with contextlib.suppress(OSError):
            partial += os.path.samestat(other.lstat(), os.fstat(handle))
    return os.fstat(handle).st_nlink > 1 + partial  # read last: partial names may disappear at any time


def read_bytes(
    path: Path, limit: int, *, unreadable: type[KvabrError] = AssetError, unfit: type[KvabrError] = UsageError
) -> bytes:
    """Read a file; raise ``unreadable`` if this fails, and ``unfit`` if it has more than ``limit`` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise unreadable(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > limit:
        raise unfit(f"{path}: more than the {limit} bytes allowed; is it the right file?")
    return data


def read_text(
    path: Path,
    limit: int = 1 << 28,
    *,
    unreadable: type[KvabrError] = AssetError,
    unfit: type[KvabrError] = UsageError,
) -> str:
    """Read a UTF-8 text file without its byte order mark; otherwise like `read_bytes`."""
    try:
        return read_bytes(path, limit, unreadable=unreadable, unfit=unfit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise unfit(f"{path}: not a text file in UTF-8 (byte {error.start}); convert or unpack it first") from error


def read_salt(path: Path | None) -> bytes:
    """Return a tenant's salt: the bytes of a file, or ``b""`` without a path.

    The salt is part of every digest of a prompt, so that only its owners can name the prompt. Raise `UsageError` if the
    file cannot be read, or does not have 16 to 4096 bytes.
    """
    if path is None:
        return b""
    salt = read_bytes(path, 1 << 20, unreadable=UsageError)
    if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
        raise UsageError(
            f"salt file {path}: must have {MIN_SALT_BYTES} to {MAX_SALT_BYTES} random bytes; make one with: "
            f"head -c 32 /dev/urandom > {path}"
        )
    return salt


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write ``text`` as UTF-8; otherwise like `write_file`."""
    write_file(path, text.encode(errors="backslashreplace"), mode=mode)


def check_makeable(folder: Path) -> None:
    """Raise `AssetError` if a folder, which need not exist, could not be created or written."""
    whole = folder.absolute()
    try:
        place = next(each for each in (whole, *whole.parents) if each.exists())
    except OSError as error:
        raise AssetError(f"{folder}: cannot be created ({error.strerror})") from error
    probe = place / f".{secrets.token_hex(8)}{PARTIAL}"
    try:  # root has every permission, but cannot create folders in /proc
        probe.mkdir(PRIVATE_FOLDER)
        probe.rmdir()
    except OSError as error:
        why = "" if place == whole else f"cannot be created: {place} "
        raise AssetError(f"{folder}: {why}cannot be written ({error.strerror})") from error


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write ``data`` to ``path`` atomically: readers see either the old file or the complete new file.

    Pipes and devices are written directly. For ``mode`` see `replacing`. If it raises `AssetError`, the old file is
    unchanged.
    """
    # Check first: the target of /dev/stdout may have no path.
    if path.exists() and not path.is_file():
        try:
            path.write_bytes(data)
        except OSError as error:
            raise AssetError(f"{path}: cannot be written ({error.strerror})") from error
        return
    with replacing(path, mode=mode) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, sync: bool = True) -> Iterator[BufferedWriter]:
    """Open a partial file that replaces ``path`` at the end of the block; if the block raises, remove it.

    The partial file is a hidden file next to ``path``, or next to a link's target. ``mode`` is masked by the umask;
    ``sync`` flushes the data to the disk before the file gets its name. Raise `AssetError` on failure.
    """
    partial: Path | None = None
    try:
        path = Path(os.path.realpath(path))  # not `resolve`, which raises for a link to itself
        # Create it with its final mode: the kernel applies the umask, which a thread cannot read without changing it.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(partial, "wb", opener=lambda name, _: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        if partial is not None:
            with contextlib.suppress(OSError):  # usually because a file is in place of a folder
                partial.unlink()
        if isinstance(error, OSError):
            raise AssetError(f"{path}: cannot be written ({error.strerror})") from error
        raise


class NameClaim:
    """The exclusive right, among all processes, to create a name. It ends with its process."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f".{path.name}.claim{PARTIAL}")
        self._handle: int | None = None

    def take(self) -> bool:
        """Return True if the claim was free, and also if there are no locks or no file can be created."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            try:
                handle = os.open(self._path, flags, PRIVATE)
            except OSError:
                return True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            except OSError:
                pass
            self._handle = handle
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(handle), self._path.stat()):
                    return True
            os.close(handle)  # its last owner has removed it

    def release(self) -> None:
        """Release the claim. Idempotent."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._handle)
            self._handle = None


def sweep(folder: Path, name: str = "") -> None:
    """Remove partial files that killed processes have left for the file ``name`` (empty: any file). Never raises.

    Only ordinary files of this user that did not change for `STALE_S` are removed.
    """
    prefix = f".{name}." if name else "."
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.name.endswith(PARTIAL):
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    stale = found.st_uid == os.geteuid() and time.time() - found.st_mtime > STALE_S
                    if stale and stat.S_ISREG(found.st_mode):
                        Path(entry).unlink()
