"""Stores of encoded groups, addressed by content: what each offers, in memory, in a folder, and memory over a folder.

`kvabr.store.objects.group_store` has object stores.

A group's digest (`kvabr.types.digests`) identifies its prompt, codec and level, so it is also the permission to read
it: plays learn digests from catalogs, which an origin shows only to those who may read them. Stores are bounded; the
least recently used groups make room. Neither a damaged disk nor a bug may change a play, so a group is checked against
its digest whenever all of it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from kvabr.store.files import PARTIAL, open_regular, replacing
from kvabr.store.lru import ByteLru
from kvabr.store.memory import GROUPS
from kvabr.types.digests import DIGEST, has_digest
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.home import HomeProcess

V = TypeVar("V")
Tier = Literal["memory", "disk"]

_MAX_UNWRITTEN_BYTES = 64 << 20
"""Bytes that may wait for the disk; groups beyond that stay in memory only."""


class LocalGroupStore(ABC, Generic[V]):
    """A bounded store of immutable groups by digest, see `kvabr.types.digests`. Belongs to one event loop.

    It knows what it holds without I/O: ``digest in store`` and counters need no await.
    """

    def __init__(self, kept: ByteLru[str, V], executor: Executor | None) -> None:
        """Keep ``kept``, by digest; compute digests in ``executor``, or in the event loop's threads."""
        self._kept, self._executor = kept, executor
        self.damaged = 0
        """Groups so far that no longer had their digest when they were read."""

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def present(self, digests: Sequence[str]) -> set[str]:
        """Return those of many digests whose groups are here."""
        return {digest for digest in digests if digest in self._kept}

    def keep(self, digests: Sequence[str], until_s: float) -> None:
        """Have other groups make room before these, see `ByteLru.keep`."""
        self._kept.keep(digests, until_s)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the groups that are kept so."""
        return self._kept.kept_bytes

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def total_bytes(self) -> int:
        """Bytes of all groups."""
        return int(self._kept.currsize)

    @property
    def evicted(self) -> int:
        """Groups that made room for others so far."""
        return self._kept.evicted

    def __iter__(self) -> Iterator[str]:
        """Yield the digests of all groups, in no particular order."""
        return iter(self._kept)

    @abstractmethod
    async def get(self, digest: str) -> memoryview | None:
        """Return a group, or None if it is not here.

        It is checked against its digest; a damaged one is deleted and reported as absent.
        """

    @abstractmethod
    async def put(self, digest: str, data: memoryview) -> bool:
        """Store a group, which the caller has checked and which must not change; return whether it was not here yet."""

    @abstractmethod
    async def delete(self, digest: str) -> bool:
        """Delete a group. Returns whether it was here."""

    @abstractmethod
    async def close(self) -> None:
        """Finish writing; release memory, files and connections."""

    async def _checked(self, digest: str, data: memoryview) -> memoryview | None:
        """Return a whole group, or None if it is damaged; then it is deleted."""
        if await asyncio.get_running_loop().run_in_executor(self._executor, has_digest, digest, data):
            return data
        self.damaged += 1
        await self.delete(digest)
        return None


class MemoryGroupStore(LocalGroupStore[memoryview]):
    """Groups in memory."""

    def __init__(self, max_bytes: int, *, executor: Executor | None = None) -> None:
        """Create an empty store of at most ``max_bytes``."""
        super().__init__(ByteLru(max_bytes, len), executor)

    async def get(self, digest: str) -> memoryview | None:
        """See `LocalGroupStore.get`. Returns a view of what was stored, not a copy."""
        data = self._kept.get(digest)
        return None if data is None else await self._checked(digest, data)

    def held(self, digest: str) -> memoryview | None:
        """Return a whole group at once, unchecked; None if it is not here. It was checked when it was put."""
        return self._kept.get(digest)

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `LocalGroupStore.put`. Keeps ``data`` itself, not a copy; does not suspend."""
        return self._kept.add(digest, data.toreadonly())

    async def delete(self, digest: str) -> bool:
        return self._kept.pop(digest, None) is not None

    async def close(self) -> None:
        """Forget all groups."""
        self._kept.clear()


class TieredGroupStore:
    """Memory over a slower store, as a rule a folder; a group may be in both.

    Groups are written to the disk in the background; those found there move up into memory, unless they are in memory.
    """

    def __init__(
        self,
        memory: MemoryGroupStore,
        disk: LocalGroupStore[Any] | None = None,
        *,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """Combine two stores, which are closed with this one; ``on_change`` hears when counters may have changed."""
        self.memory, self.disk = memory, disk
        self._tiers: list[LocalGroupStore[Any]] = [memory] if disk is None else [memory, disk]
        self._on_change = on_change
        self._unwritten_bytes = 0
        self._writes: dict[str, asyncio.Task[None]] = {}
        """By digest, groups on their way to the disk."""

    def __contains__(self, digest: str) -> bool:
        return any(digest in tier for tier in self._tiers)

    def present(self, digests: Sequence[str]) -> set[str]:
        """Return those of many digests whose groups are here."""
        return set[str]().union(*(tier.present(digests) for tier in self._tiers if len(tier)))

    async def keep(self, digests: Sequence[str], until_s: float) -> None:
        """See `LocalGroupStore.keep`; those on their way to the disk are waited for."""
        self.memory.keep(digests, until_s)
        if self.disk is not None:
            if writes := [self._writes[digest] for digest in digests if digest in self._writes]:
                await asyncio.wait(writes)
            await asyncio.to_thread(self.disk.keep, digests, until_s)
        self._on_change()

    def __len__(self) -> int:
        """Return the number of groups; one in both tiers counts twice, here and in all counters."""
        return sum(map(len, self._tiers))

    @property
    def total_bytes(self) -> int:
        return sum(tier.total_bytes for tier in self._tiers)

    @property
    def damaged(self) -> int:
        return sum(tier.damaged for tier in self._tiers)

    async def find(self, digest: str) -> tuple[memoryview, Tier] | None:
        """Return a group and the tier that had it; otherwise as `LocalGroupStore.get`."""
        data = await self.memory.get(digest)
        if data is not None:
            return data, "memory"
        data = None if self.disk is None else await self.disk.get(digest)
        if data is not None and self.disk is not None:
            await self.memory.put(digest, data)
        self._on_change()
        return None if data is None else (data, "disk")

    async def get(self, digest: str) -> memoryview | None:
        """Return a group from either tier; otherwise as `LocalGroupStore.get`."""
        found = await self.find(digest)
        return None if found is None else found[0]

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `LocalGroupStore.put`. The group is in memory at once; the disk follows without being waited for."""
        added = await self.memory.put(digest, data)
        disk, size = self.disk, len(data)
        if (
            disk is not None
            and digest not in disk
            and digest not in self._writes
            and self._unwritten_bytes + size <= _MAX_UNWRITTEN_BYTES
        ):
            added = True
            self._unwritten_bytes += size
            self._writes[digest] = asyncio.get_running_loop().create_task(self._write(disk, digest, data))
        self._on_change()
        return added

    def __iter__(self) -> Iterator[str]:
        """Yield the digests of all groups; one in both tiers comes once."""
        return iter({digest for tier in self._tiers for digest in tier})

    async def delete(self, digest: str) -> bool:
        """See `LocalGroupStore.delete`; deletes from both tiers."""
        if digest in self._writes:
            await asyncio.wait({self._writes[digest]})
        found = [await tier.delete(digest) for tier in self._tiers]
        self._on_change()
        return any(found)

    async def close(self) -> None:
        """Wait for what is being written, then close both tiers."""
        if self._writes:
            await asyncio.wait(set(self._writes.values()))
        for tier in self._tiers:
            await tier.close()
        self._on_change()

    async def _write(self, disk: LocalGroupStore[Any], digest: str, data: memoryview) -> None:
        try:
            await disk.put(digest, data)
        finally:
            del self._writes[digest]
            self._unwritten_bytes -= len(data)
            self._on_change()


T = TypeVar("T")

_NAME = re.compile(rf"({DIGEST})\.group")
_LOCK = "kvabr.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderGroupStore(LocalGroupStore[int]):
    """Groups in a folder, by their sizes in memory. Reads and writes run in one thread of its own."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        executor: Executor | None = None,
        on_failure: Callable[[str], object] = lambda _why: None,
    ) -> None:
        """Lock the folder, create it if necessary, and index the groups in it; otherwise as `MemoryGroupStore`.

        ``on_failure`` hears why groups cannot be written, once until one can be again.

        Raises:
            UsageError: another client uses the folder, in this process or another.
            AssetError: the folder cannot be used.
        """
        kept: ByteLru[str, int] = ByteLru(max_bytes, lambda size: size, lambda digest, _: self._unlink(digest))
        super().__init__(kept, executor)
        self._folder, self._on_failure, self._fails = folder, on_failure, False
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
        self._home = HomeProcess(f"the store of groups in {folder}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvabr-disk")

    async def get(self, digest: str) -> memoryview | None:
        data = await self._in_thread(lambda: self._read(digest)) if digest in self._kept else None
        return None if data is None else await self._checked(digest, data)

    def keep(self, digests: Sequence[str], until_s: float) -> None:
        with self._lock:  # the folder's thread adds and evicts meanwhile
            super().keep(digests, until_s)

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `LocalGroupStore.put`. Returns False also if the disk refuses."""
        return await self._in_thread(lambda: self._write(digest, data))

    async def delete(self, digest: str) -> bool:
        return await self._in_thread(lambda: self._delete(digest))

    async def close(self) -> None:
        """Finish writing, and leave the folder to other processes. Closing twice is harmless."""
        if self._handle >= 0 and self._home.here:
            await self._in_thread(lambda: os.close(self._handle))
            self._handle = -1
            self._thread.shutdown()

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

    def _read(self, digest: str) -> memoryview | None:
        """Read a group; None if the file is gone or has another size than it had."""
        with self._lock:
            size = self._kept.get(digest)
        if size is None:
            return None
        try:
            with open_regular(self._path(digest)) as file:
                data = GROUPS.take(size)
                read = file.readinto(data) if os.fstat(file.fileno()).st_size == size else 0
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())  # the next process orders by it
        except OSError:
            self._delete(digest)
            return None
        if read != size:
            self.damaged += 1
            self._delete(digest)
            return None
        return data.toreadonly()

    def _write(self, digest: str, data: memoryview) -> bool:
        with self._lock:
            # Counted before it is there, so that writers cannot exceed the bound together.
            if not data or not self._kept.add(digest, len(data)):
                return False
        try:
            # Not synced: a file that a crash damages is found out when it is read.
            with replacing(self._path(digest), mode=0o600, sync=False) as file:
                file.write(data)
        except AssetError as error:
            self._delete(digest)
            if not self._fails:
                self._fails = True
                self._on_failure(str(error))
            return False
        self._fails = False
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
        self._home.check()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _unusable(self, error: OSError) -> AssetError:
        return AssetError(f"{self._folder}: cannot keep groups there ({error.strerror}); name another folder")
