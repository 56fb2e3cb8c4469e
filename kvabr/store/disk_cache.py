"""Groups on disk, one file each, named by their SHA-256: what outlives the memory, and the process.

Nothing of it is believed: what is read is bounded and checked against its name by the caller
(`kvabr.store.group_cache`). Files are written in threads, each whole or not at all. A folder belongs to one process at
a time, which a lock on it sees to, since only who knows all files can keep them within a bound.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading
from collections import OrderedDict
from pathlib import Path

from kvabr.types.errors import AssetError, UsageError

_NAME = re.compile(r"([0-9a-f]{64})\.group")
_PARTIAL = ".partial"
_LOCK = "kvabr.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Shelf:
    """A folder of groups, the least recently used of which go first. Its methods may be called from any thread."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Take a folder, and what is left in it from before.

        Args:
            folder: made if it is not there; other files in it are left alone.
            most_bytes: of all groups together.

        Raises:
            UsageError: another process has it.
            AssetError: it cannot be used.
        """
        self._folder, self._most = folder, most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()
        self.evicted = 0
        """Groups that had to make room."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handle: int | None = os.open(folder / _LOCK, _LOCK_FLAGS, 0o600)
        except OSError as error:
            raise AssetError(f"{folder}: cannot keep groups there ({error.strerror}); name another folder") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._find()
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise UsageError(f"{folder}: another process keeps its groups there; give each a folder") from error
            raise AssetError(f"{folder}: cannot keep groups there ({error.strerror}); name another folder") from error

    def _find(self) -> None:
        """What is there already, the least recently used first."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_PARTIAL) and entry.is_file(follow_symlinks=False):
                    Path(entry).unlink(missing_ok=True)
                elif (name := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, name[1], status.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self._total += size
        self._make_room(0)

    @property
    def total_bytes(self) -> int:
        """Of all groups."""
        return self._total

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    def read(self, digest: str) -> bytes | None:
        """What lies under a name; None if nothing does any more. It may be anything, of the size that was written."""
        with self._lock:
            size = self._sizes.get(digest)
            if size is None:
                return None
            self._sizes.move_to_end(digest)
        try:
            handle = os.open(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:  # noqa: PTH123  # by its handle
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise OSError("not an ordinary file")  # noqa: TRY301  # treated like all others
                data = file.read(size + 1)
                with contextlib.suppress(OSError):
                    os.utime(handle)  # for the next process, which goes by it
        except OSError:
            self.drop(digest)
            return None
        return data

    def write(self, digest: str, data: bytes | memoryview) -> bool:
        """Keep a group; tells whether that was done: not if it is there, too large, or cannot be written."""
        size = len(data)
        with self._lock:
            if digest in self._sizes or not 0 < size <= self._most:
                return False
            # Counted before it is there: two that write at the same time must not exceed the bound together.
            self._make_room(size)
            self._sizes[digest] = size
            self._total += size
        partial = self._folder / f"{digest}.{threading.get_ident()}{_PARTIAL}"
        try:
            # Not synced: a file that a crash damages is found out when it is read.
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(handle, "wb") as file:  # noqa: PTH123
                file.write(data)
            partial.replace(self._path(digest))
        except OSError:
            partial.unlink(missing_ok=True)
            self.drop(digest)
            return False
        with self._lock:
            if digest not in self._sizes:  # it had to make room before it was there
                self._path(digest).unlink(missing_ok=True)
                return False
        return True

    def drop(self, digest: str) -> None:
        """Forget a group."""
        with self._lock:
            self._forget(digest)

    def close(self) -> None:
        """Leave the folder to others."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _make_room(self, size: int) -> None:
        while self._sizes and self._total + size > self._most:
            self._forget(next(iter(self._sizes)))
            self.evicted += 1

    def _forget(self, digest: str) -> None:
        self._total -= self._sizes.pop(digest, 0)
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.group"
