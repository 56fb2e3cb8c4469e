"""Groups that a client or relay has received: in memory, and below it in a folder or a bucket.

Each tier evicts the least recently used groups, except a bucket, which has lifecycle rules. Groups are named by their
digests, and stored like frames of assets (`docs/design/store.md`).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvabr.store.local import LocalStore
from kvabr.store.locations import Location, open_objects
from kvabr.store.lru import ByteLru
from kvabr.store.names import GROUPS, group_name
from kvabr.store.store import Store, listing
from kvabr.types.digests import has_digest, is_digest
from kvabr.types.errors import AssetError, NotFoundError, TransportError, UsageError
from kvabr.types.home import HomeProcess

Tier = Literal["memory", "disk"]

_MAX_UNWRITTEN_BYTES = 64 << 20
"""Most bytes that wait for the disk; further groups stay in memory only."""
_MAX_GROUP_BYTES = 1 << 30
_READ_S, _WRITE_S = 5.0, 60.0
"""Seconds that a request to the lower tier may take; then the group counts as absent."""
_PAUSE_S = 5.0
"""Seconds without requests to the lower tier after one that failed."""
_LOCK = ".kvabr.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreTier:
    """Groups in a store; belongs to one event loop."""

    def __init__(
        self, location: Location, max_bytes: int, on_failure: Callable[[str], object] = lambda _why: None
    ) -> None:
        """Open the store; create, lock and index a folder.

        ``max_bytes`` bounds a folder, or the groups of a bucket that this process remembers. ``on_failure`` receives
        the reason when the store fails, once per pause.

        Raises:
            UsageError: another client uses the folder, or there is no such kind of store.
            AssetError: the folder cannot be used.
        """
        if max_bytes < 0:
            raise UsageError(f"disk_bytes must be 0 or more, got {max_bytes}")
        self.kept: ByteLru[str, int] = ByteLru(max_bytes, lambda size: size, self._evict)
        """Of a bucket, those seen by this process."""
        store = open_objects(location, encrypted=False)
        self.store: Store = LocalStore(store.folder, sync=False) if isinstance(store, LocalStore) else store
        self._on_failure, self._again_s = on_failure, 0.0
        self._home = HomeProcess(f"the cache of groups in {self.store.url}")
        self._deleting: set[asyncio.Task[None]] = set()
        self._handle = -1
        if isinstance(self.store, LocalStore):
            self._lock_folder(self.store.folder)
            for found in sorted(self.store.blocked(listing(self.store, GROUPS)).values(), key=lambda o: o.modified_s):
                digest = found.name.removeprefix(GROUPS)
                if not is_digest(digest) or not self.kept.add(digest, found.size):
                    self.store.blocked(self.store.delete([found.name]))

    def keep(self, digests: Sequence[str], until_s: float) -> None:
        """Evict these groups last, see `ByteLru.keep`; does not apply to buckets."""
        if self._handle >= 0:
            self.kept.keep(digests, until_s)

    async def get(self, digest: str) -> memoryview | None:
        """Return an unchecked group, or None."""
        self._home.check()
        local = self._handle >= 0
        if (local and digest not in self.kept) or self._pauses():
            return None
        name = group_name(digest)
        try:
            async with asyncio.timeout(_READ_S):
                data = await self.store.get(name, limit=_MAX_GROUP_BYTES)
        except NotFoundError:
            self.kept.pop(digest, None)
            return None
        except (TransportError, TimeoutError) as error:
            self._failed(error)
            return None
        if not local:
            self.kept.add(digest, len(data))
        elif self.kept.get(digest) is not None:  # mark it as used, also for the next process
            with suppress(OSError):
                await asyncio.to_thread(os.utime, Path(self.store.url, name))
        return data

    async def put(self, digest: str, data: memoryview) -> bool:
        """Write a group; return whether it was written. ``on_failure`` receives failures."""
        self._home.check()
        # Counted before it is written, so that several writers cannot exceed the bound together.
        if not data or self._pauses() or not self.kept.add(digest, len(data)):
            return False
        try:
            async with asyncio.timeout(_WRITE_S):
                added = await self.store.put_new(group_name(digest), data)
        except (TransportError, TimeoutError) as error:
            self.kept.pop(digest, None)
            self._failed(error)
            return False
        if digest not in self.kept:  # evicted meanwhile
            await self._delete(digest)
            return False
        return added

    async def delete(self, digest: str) -> bool:
        """Delete a group, in a bucket for everyone; return whether it was known here."""
        found = self.kept.pop(digest, None) is not None
        await self._delete(digest)
        return found

    async def close(self) -> None:
        """Finish deleting, release connections, and unlock a folder. Idempotent."""
        if not self._home.here:
            return
        if self._deleting:
            await asyncio.wait(self._deleting)
        self.store.close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _evict(self, digest: str, _size: int) -> None:
        if self._handle >= 0:
            with suppress(RuntimeError):  # while the folder is indexed
                task = asyncio.get_running_loop().create_task(self._delete(digest))
                self._deleting.add(task)
                task.add_done_callback(self._deleting.discard)

    async def _delete(self, digest: str) -> None:
        try:
            await self.store.delete([group_name(digest)])
        except TransportError as error:
            self._failed(error)

    def _pauses(self) -> bool:
        return asyncio.get_running_loop().time() < self._again_s

    def _failed(self, error: Exception) -> None:
        if not self._pauses():
            self._on_failure(str(error) or f"{self.store.url}: did not answer in time")
        self._again_s = asyncio.get_running_loop().time() + _PAUSE_S

    def _lock_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handle = os.open(folder / _LOCK, _LOCK_FLAGS, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if self._handle >= 0:
                os.close(self._handle)
            if isinstance(error, BlockingIOError):
                raise UsageError(
                    f"{folder}: another client uses this folder for its groups; give each client its own folder"
                ) from error
            raise AssetError(f"{folder}: cannot store groups there ({error.strerror}); give another folder") from error


class GroupCache:
    """Memory over a slower tier; a group may be in both. Belongs to one event loop.

    Groups are written to the lower tier in the background; groups found there are copied into memory.
    """

    def __init__(
        self,
        max_bytes: int,
        disk: StoreTier | None = None,
        *,
        executor: Executor | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """Bound the memory by ``max_bytes``; ``disk`` is closed with this.

        ``executor`` computes digests (None: the event loop's threads); ``on_change`` is called when counters may have
        changed.
        """
        self.memory: ByteLru[str, memoryview] = ByteLru(max_bytes, len)
        self.disk = disk
        self.damaged: dict[Tier, int] = {"memory": 0, "disk": 0}
        """Groups that had a wrong digest when read."""
        self._executor, self._on_change = executor, on_change
        self._unwritten_bytes = 0
        self._writes: dict[str, asyncio.Task[None]] = {}

    @property
    def tiers(self) -> dict[Tier, ByteLru[str, memoryview] | ByteLru[str, int]]:
        """Groups by tier."""
        return {"memory": self.memory} if self.disk is None else {"memory": self.memory, "disk": self.disk.kept}

    def __contains__(self, digest: str) -> bool:
        return any(digest in tier for tier in self.tiers.values())

    def present(self, digests: Sequence[str]) -> set[str]:
        """Return the cached digests among these."""
        return {digest for tier in self.tiers.values() if tier for digest in digests if digest in tier}

    def held(self, digest: str) -> memoryview | None:
        """Return a group from memory, which was checked when put, or None."""
        return self.memory.get(digest)

    async def keep(self, digests: Sequence[str], until_s: float) -> None:
        """Evict these groups last, see `ByteLru.keep`; waits until they are on the disk."""
        self.memory.keep(digests, until_s)
        if self.disk is not None:
            if writes := [self._writes[digest] for digest in digests if digest in self._writes]:
                await asyncio.wait(writes)
            self.disk.keep(digests, until_s)
        self._on_change()

    def __len__(self) -> int:
        """Return the number of groups; here and in all counters, a group in both tiers counts twice."""
        return sum(map(len, self.tiers.values()))

    @property
    def total_bytes(self) -> int:
        """Bytes of all groups."""
        return int(sum(tier.currsize for tier in self.tiers.values()))

    async def find(self, digest: str) -> tuple[memoryview, Tier] | None:
        """Return a checked group and its tier, or None; a damaged group is deleted."""
        if (data := self.memory.get(digest)) is not None and await self._sound("memory", digest, data):
            return data, "memory"
        if self.disk is None or (data := await self.disk.get(digest)) is None:
            return None
        if not await self._sound("disk", digest, data):
            return None
        self.memory.add(digest, data)
        self._on_change()
        return data, "disk"

    async def get(self, digest: str) -> memoryview | None:
        """Return a group; otherwise as `find`."""
        found = await self.find(digest)
        return None if found is None else found[0]

    async def put(self, digest: str, data: memoryview) -> bool:
        """Add a group, which the caller has checked and must not change; return whether it is new.

        It is in memory at once, without a copy, and written to the disk in the background.
        """
        added = self.memory.add(digest, data.toreadonly())
        disk, size = self.disk, len(data)
        if (
            disk is not None
            and digest not in disk.kept
            and digest not in self._writes
            and self._unwritten_bytes + size <= _MAX_UNWRITTEN_BYTES
        ):
            added = True
            self._unwritten_bytes += size
            self._writes[digest] = asyncio.get_running_loop().create_task(self._write(disk, digest, data))
        self._on_change()
        return added

    def __iter__(self) -> Iterator[str]:
        return iter({digest for tier in self.tiers.values() for digest in tier})

    async def delete(self, digest: str) -> bool:
        """Delete a group; return whether it was here."""
        if digest in self._writes:
            await asyncio.wait({self._writes[digest]})
        found = self.memory.pop(digest, None) is not None
        if self.disk is not None:
            found |= await self.disk.delete(digest)
        self._on_change()
        return found

    async def close(self) -> None:
        """Wait for running writes, and clear the cache."""
        if self._writes:
            await asyncio.wait(set(self._writes.values()))
        self.memory.clear()
        if self.disk is not None:
            await self.disk.close()
        self._on_change()

    async def _sound(self, tier: Tier, digest: str, data: memoryview) -> bool:
        if await asyncio.get_running_loop().run_in_executor(self._executor, has_digest, digest, data):
            return True
        self.damaged[tier] += 1
        await self.delete(digest)
        return False

    async def _write(self, disk: StoreTier, digest: str, data: memoryview) -> None:
        try:
            await disk.put(digest, data)
        finally:
            del self._writes[digest]
            self._unwritten_bytes -= len(data)
            self._on_change()
