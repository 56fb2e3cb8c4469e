"""A cache of groups that a client or relay has received: in memory, and in a lower tier, a folder or a bucket.

Each tier evicts the least recently used groups, except a bucket, which has lifecycle rules instead. The name of a group
is its digest; groups are stored like frames of assets (`docs/design/store.md`).
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
from kvabr.types.errors import AssetError, HomeProcess, NotFoundError, TransportError, UsageError

Tier = Literal["memory", "disk"]

_MAX_UNWRITTEN_BYTES = 64 << 20
"""Maximum bytes that wait to be written to the lower tier; further groups stay in memory only."""
_MAX_GROUP_BYTES = 1 << 30
_READ_S, _WRITE_S = 5.0, 60.0
"""Time limits of reads and writes of the lower tier, in seconds; then a group counts as absent."""
_PAUSE_S = 5.0
"""Seconds without requests to the lower tier after a failed request."""
_LOCK = ".kvabr.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreTier:
    """Groups in a store. Use it on one event loop."""

    def __init__(
        self, location: Location, max_bytes: int, on_failure: Callable[[str], object] = lambda _why: None
    ) -> None:
        """Open the store. A folder is created, locked and indexed.

        ``max_bytes`` limits the size of a folder, or the groups in a bucket that this process remembers. If the store
        fails, ``on_failure`` receives the reason, once per pause.

        Raises:
            UsageError: another client uses the folder, or the kind of store is unknown.
            AssetError: the folder cannot be used.
        """
        if max_bytes < 0:
            raise UsageError(f"disk_bytes must be 0 or more, got {max_bytes}")
        self.kept: ByteLru[str, int] = ByteLru(max_bytes, lambda size: size, self._evict)
        """Sizes of groups by digest; for a bucket, only groups that this process has used."""
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
        """Evict these groups last, see `ByteLru.keep`; no effect on buckets."""
        if self._handle >= 0:
            self.kept.keep(digests, until_s)

    async def get(self, digest: str) -> memoryview | None:
        """Return a group without checking its digest, or None."""
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
        elif self.kept.get(digest) is not None:  # marks it as used, also for the next process
            with suppress(OSError):
                await asyncio.to_thread(os.utime, Path(self.store.url, name))
        return data

    async def put(self, digest: str, data: memoryview) -> bool:
        """Write a group; return True if it was written. Failures are passed to ``on_failure``."""
        self._home.check()
        # Count it before writing, so that concurrent writers cannot exceed the limit together.
        if not data or self._pauses() or not self.kept.add(digest, len(data)):
            return False
        try:
            async with asyncio.timeout(_WRITE_S):
                added = await self.store.put_new(group_name(digest), data)
        except (TransportError, TimeoutError) as error:
            self.kept.pop(digest, None)
            self._failed(error)
            return False
        if digest not in self.kept:  # evicted in the meantime
            await self._delete(digest)
            return False
        return added

    async def delete(self, digest: str) -> bool:
        """Delete a group (in a bucket for all processes); return True if this process knew of it."""
        found = self.kept.pop(digest, None) is not None
        await self._delete(digest)
        return found

    async def close(self) -> None:
        """Finish deletions, release connections, and unlock a folder. Idempotent."""
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
            with suppress(RuntimeError):  # may change size while the folder is indexed
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
    """Memory and a slower tier; a group may be in both. Use it on one event loop.

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
        """Create a cache with up to ``max_bytes`` in memory; closing it closes ``disk``, too.

        ``executor`` computes digests (None: the event loop's threads); ``on_change`` is called when counters may have
        changed.
        """
        self.memory: ByteLru[str, memoryview] = ByteLru(max_bytes, len)
        self.disk = disk
        self.damaged: dict[Tier, int] = {"memory": 0, "disk": 0}
        """Number of groups that had a wrong digest when read, by tier."""
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
        """Return which of these digests are cached."""
        return {digest for tier in self.tiers.values() if tier for digest in digests if digest in tier}

    def held(self, digest: str) -> memoryview | None:
        """Return a group from memory, or None. Its digest was checked when it was added."""
        return self.memory.get(digest)

    async def keep(self, digests: Sequence[str], until_s: float) -> None:
        """Evict these groups last, see `ByteLru.keep`; wait until they are written to the disk."""
        self.memory.keep(digests, until_s)
        if self.disk is not None:
            if writes := [self._writes[digest] for digest in digests if digest in self._writes]:
                await asyncio.wait(writes)
            self.disk.keep(digests, until_s)
        self._on_change()

    def __len__(self) -> int:
        """Return the number of groups. Here and in all counters, a group in both tiers counts twice."""
        return sum(map(len, self.tiers.values()))

    @property
    def total_bytes(self) -> int:
        """Total bytes of all groups."""
        return int(sum(tier.currsize for tier in self.tiers.values()))

    async def find(self, digest: str) -> tuple[memoryview, Tier] | None:
        """Return a group and its tier, or None. The digest is checked; a damaged group is deleted."""
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
        """Return a group; otherwise like `find`."""
        found = await self.find(digest)
        return None if found is None else found[0]

    async def put(self, digest: str, data: memoryview) -> bool:
        """Add a group, which the caller has checked and must not change afterwards; return True if it is new.

        It is in memory immediately, and is written to the disk in the background.
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
        """Delete a group; return True if it was cached."""
        if digest in self._writes:
            await asyncio.wait({self._writes[digest]})
        found = self.memory.pop(digest, None) is not None
        if self.disk is not None:
            found |= await self.disk.delete(digest)
        self._on_change()
        return found

    async def close(self) -> None:
        """Wait for writes in progress, and clear the cache."""
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
