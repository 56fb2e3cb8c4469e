"""Groups in a folder, one file each, named by their SHA-256. They outlive the process.

A folder belongs to one store at a time, because only a store that knows all files can keep them within a bound; a lock
file sees to that. Files appear whole or not at all. Whatever lies in the folder is untrusted: reads are bounded,
follow no links, and are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvabr.store.files import PARTIAL, open_regular, replacing
from kvabr.store.group_store import LocalGroupStore
from kvabr.store.lru import ByteLru
from kvabr.types.errors import AssetError, UsageError

T = TypeVar("T")

_NAME = re.compile(r"([0-9a-f]{64})\.group")
_LOCK = "kvabr.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderGroupStore(LocalGroupStore[int]):
    """Groups in a folder, by their sizes in memory. Reads and writes run in one thread of its own."""

    def __init__(self, folder: Path, max_bytes: int, *, executor: Executor | None = None) -> None:
        """Lock the folder, create it if necessary, and index the groups in it; otherwise as `MemoryGroupStore`.

        Raises:
            UsageError: another client uses the folder, in this process or another.
            AssetError: the folder cannot be used.
        """
        super().__init__(ByteLru(max_bytes, lambda size: size, lambda digest, _: self._unlink(digest)), executor)
        self._folder = folder
        self._lock = threading.Lock()
        """Guards the sizes and the files' names."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handle = os.open(folder / _LOCK, _LOCK_FLAGS, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._index()
        except OSError as error:
            os.close(self._handle)
            if isinstance(error, BlockingIOError):
                raise UsageError(f"{folder}: another client keeps its groups there; give each a folder") from error
            raise self._unusable(error) from error
        # One thread: disks prefer it, and decoding does not wait for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvabr-disk")

    async def get(
        self, digest: str, start: int = 0, end: int | None = None, *, verify: bool = True
    ) -> memoryview | None:
        """See `GroupStore.get`."""
        size = self._kept.peek(digest)
        if size is None:
            return None
        first, last, _ = slice(start, end).indices(size)
        data = await self._in_thread(lambda: self._read(digest, first, last))
        if data is None or not verify or (first, last) != (0, size):
            return data
        return await self._checked(digest, data)

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `GroupStore.put`. Returns False also if the disk refuses."""
        return await self._in_thread(lambda: self._write(digest, data))

    async def delete(self, digest: str) -> bool:
        """See `GroupStore.delete`."""
        return await self._in_thread(lambda: self._delete(digest))

    async def close(self) -> None:
        """Finish writing, and leave the folder to other processes. Closing twice is harmless."""
        if self._handle >= 0:
            await self._in_thread(lambda: os.close(self._handle))
            self._handle = -1
            self._thread.shutdown()

    # -------------------------------------------------------------- internals

    def _index(self) -> None:
        """Index what is in the folder, the least recently used first."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(PARTIAL) and entry.is_file(follow_symlinks=False):
                    Path(entry).unlink(missing_ok=True)
                elif (name := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, name[1], status.st_size))
        for _, digest, size in sorted(found):
            if not self._kept.add(digest, size):
                self._unlink(digest)

    def _read(self, digest: str, first: int, last: int) -> memoryview | None:
        """Read from ``first`` to ``last``; None if the file is gone or has another size than it had."""
        with self._lock:
            size = self._kept.get(digest)
        if size is None:
            return None
        try:
            with open_regular(self._path(digest)) as file:
                file.seek(first)
                data = file.read(last - first) if os.fstat(file.fileno()).st_size == size else b""
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())  # the next process orders by it
        except OSError:
            self._delete(digest)
            return None
        if len(data) != last - first:
            self.damaged += 1
            self._delete(digest)
            return None
        return memoryview(data)

    def _write(self, digest: str, data: memoryview) -> bool:
        with self._lock:
            # Counted before it is there, so that writers cannot exceed the bound together.
            if not data or not self._kept.add(digest, len(data)):
                return False
        try:
            # Not synced: a file that a crash damages is found out when it is read.
            with replacing(self._path(digest), mode=0o600, sync=False) as file:
                file.write(data)
        except AssetError:
            self._delete(digest)
            return False
        with self._lock:
            if digest not in self._kept:  # evicted before it was there
                self._unlink(digest)
                return False
        return True

    def _delete(self, digest: str) -> bool:
        with self._lock:
            found = self._kept.pop(digest, None) is not None
            self._unlink(digest)
        return found

    def _unlink(self, digest: str) -> None:
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.group"

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _unusable(self, error: OSError) -> AssetError:
        return AssetError(f"{self._folder}: cannot keep groups there ({error.strerror}); name another folder")
