"""Stores of encoded groups, addressed by content: what each offers, one in memory, and memory over a folder.

A group's SHA-256 identifies its prompt, codec and level, so it is also the permission to read it: plays learn digests
from catalogs, which an origin shows only to those who may read them. Stores are bounded; the least recently used groups
make room.

Neither a damaged disk nor a bug may change a play, so a group is checked against its digest whenever all of it is read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from kvabr.store.lru import ByteLru

V = TypeVar("V")
Tier = Literal["memory", "disk"]

_MAX_UNWRITTEN_BYTES = 64 << 20
"""Bytes that may wait for the disk; groups beyond that stay in memory only."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """An entry of a listing."""

    digest: str
    """SHA-256, 64 hex digits."""
    size: int
    """Bytes."""


class GroupStore(Protocol):
    """Immutable groups by SHA-256 (64 hex digits). Belongs to one event loop."""

    async def get(
        self, digest: str, start: int = 0, end: int | None = None, *, verify: bool = True
    ) -> memoryview | None:
        """Return bytes ``start`` to ``end`` (exclusive; None: to the end) of a group, or None if it is not here.

        A whole group is checked against its digest; a damaged one is deleted and reported as absent. ``verify=False``
        skips that, for callers that check by themselves, as all must check what they put together from parts.
        """

    async def put(self, digest: str, data: memoryview) -> bool:
        """Store a group, which the caller has checked and which must not change; return whether it was not here yet."""

    def list(self) -> AsyncIterator[StoredGroup]:
        """Yield every group, in no particular order."""

    async def delete(self, digest: str) -> bool:
        """Delete a group. Returns whether it was here."""

    async def close(self) -> None:
        """Finish writing; release memory, files and connections."""


def has_digest(digest: str, data: bytes | bytearray | memoryview) -> bool:
    """Return whether the SHA-256 of ``data`` is ``digest``."""
    return hashlib.sha256(data).hexdigest() == digest


class LocalGroupStore(GroupStore, Generic[V]):
    """A bounded store that knows what it holds without I/O: ``digest in store`` and counters need no await."""

    def __init__(self, kept: ByteLru[str, V], executor: Executor | None) -> None:
        """Keep ``kept``, by digest; compute digests in ``executor``, or in the event loop's threads."""
        self._kept, self._executor = kept, executor
        self.damaged = 0
        """Groups so far that no longer had their digest when they were read."""

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

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

    async def list(self) -> AsyncIterator[StoredGroup]:
        """See `GroupStore.list`."""
        for digest in list(self._kept):
            kept = self._kept.peek(digest)
            if kept is not None:
                yield StoredGroup(digest, int(self._kept.getsizeof(kept)))

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

    async def get(
        self, digest: str, start: int = 0, end: int | None = None, *, verify: bool = True
    ) -> memoryview | None:
        """See `GroupStore.get`. Returns a view of what was stored, not a copy."""
        data = self._kept.get(digest)
        if data is None:
            return None
        part = data[start:end]
        return await self._checked(digest, data) if verify and len(part) == len(data) else part

    def held(self, digest: str) -> memoryview | None:
        """Return a whole group at once, unchecked; None if it is not here. It was checked when it was put."""
        return self._kept.get(digest)

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `GroupStore.put`. Keeps ``data`` itself, not a copy; does not suspend."""
        return self._kept.add(digest, data.toreadonly())

    async def delete(self, digest: str) -> bool:
        """See `GroupStore.delete`."""
        return self._kept.pop(digest, None) is not None

    async def close(self) -> None:
        """Forget all groups."""
        self._kept.clear()


class TieredGroupStore(GroupStore):
    """Memory over a slower store, as a rule a folder; a group may be in both.

    Groups are written to the disk in the background; those found there move up into memory.
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

    def __len__(self) -> int:
        """Return the number of groups; one in both tiers counts twice, here and in all counters."""
        return sum(map(len, self._tiers))

    @property
    def total_bytes(self) -> int:
        """See `LocalGroupStore.total_bytes`."""
        return sum(tier.total_bytes for tier in self._tiers)

    @property
    def damaged(self) -> int:
        """See `LocalGroupStore.damaged`."""
        return sum(tier.damaged for tier in self._tiers)

    async def find(self, digest: str, *, verify: bool = True) -> tuple[memoryview, Tier] | None:
        """Return a whole group and the tier that had it; otherwise as `GroupStore.get`."""
        data = await self.memory.get(digest, verify=verify)
        if data is not None:
            return data, "memory"
        data = None if self.disk is None else await self.disk.get(digest, verify=verify)
        if data is not None:
            await self.memory.put(digest, data)
        self._on_change()
        return None if data is None else (data, "disk")

    async def get(
        self, digest: str, start: int = 0, end: int | None = None, *, verify: bool = True
    ) -> memoryview | None:
        """See `GroupStore.get`. Only whole groups move up into memory."""
        if start == 0 and end is None:
            found = await self.find(digest, verify=verify)
            return None if found is None else found[0]
        for tier in self._tiers:
            if (data := await tier.get(digest, start, end, verify=verify)) is not None:
                return data
        return None

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `GroupStore.put`. The group is in memory at once; the disk follows without being waited for."""
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

    async def list(self) -> AsyncIterator[StoredGroup]:
        """See `GroupStore.list`; a group in both tiers comes once."""
        for tier in self._tiers:
            async for group in tier.list():
                if tier is self.memory or group.digest not in self.memory:
                    yield group

    async def delete(self, digest: str) -> bool:
        """See `GroupStore.delete`; deletes from both tiers."""
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
