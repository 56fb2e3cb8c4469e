"""Groups in shared memory: a tier below the memory of clients and relays that all processes of a user on a host share.

Its URL is ``shm://`` for the folder kvabr-UID in /dev/shm, or ``shm:///PATH`` for a folder of another tmpfs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from kvabr.store.group_store import LocalGroupStore, StoredGroup
from kvabr.store.lru import ByteLru
from kvabr.store.shared_folder import MEMORY, GroupClaim, NeighbourGroup, SharedFolder
from kvabr.types.errors import UsageError

T = TypeVar("T")

SCHEME = "shm"


def shared_path(url: str) -> Path:
    """Return the folder of a ``shm:`` URL; raise `UsageError` if it is none."""
    parts = urlsplit(url)
    if parts.scheme != SCHEME or parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{url}: shared memory is shm://, or shm:///PATH for a folder of another tmpfs")
    path = unquote(parts.path).rstrip("/")
    return Path(path) if path else MEMORY / f"kvabr-{os.geteuid()}"


class SharedGroupStore(LocalGroupStore[int]):
    """Groups in shared memory. What is read is mapped, not copied, and counts as used."""

    in_memory = True

    def __init__(
        self, path: Path, max_bytes: int, *, executor: Executor | None = None, keep_bytes: int | None = None
    ) -> None:
        """Open or make a folder for at most ``max_bytes`` of groups of all processes; errors as `SharedFolder`.

        `keep` has all of them keep at most ``keep_bytes``; None: there is no bound.
        """
        super().__init__(ByteLru(0, lambda size: size), executor)
        self.folder = SharedFolder(path, max_bytes, keep_bytes=keep_bytes)
        # One thread: what waits for others must not keep decoders from their work.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvabr-shared")
        self._open = True

    def __contains__(self, digest: str) -> bool:
        return self.folder.has(digest)

    def present(self, digests: Sequence[str]) -> set[str]:
        """See `LocalGroupStore.present`. A folder of few groups is listed, not asked for each digest."""
        if len(self) < len(digests):
            return {digest for _, digest, _ in self.folder.groups()}.intersection(digests)
        return {digest for digest in digests if digest in self}

    def __len__(self) -> int:
        return len(self.folder)

    @property
    def total_bytes(self) -> int:
        """Bytes of all groups, of all processes."""
        return self.folder.total_bytes

    @property
    def evicted(self) -> int:
        """Groups that this process removed to make room."""
        return self.folder.evicted

    def keep(self, digests: Sequence[str], until_s: float, owner: str = "") -> None:
        """See `SharedFolder.keep`; it does not matter for whom."""
        del owner
        self.folder.keep(digests, max(0.0, until_s - time.monotonic()))

    @property
    def kept_bytes(self) -> int:
        """Bytes of the groups that any process keeps, when this one last kept some."""
        return self.folder.kept_bytes

    @property
    def released(self) -> int:
        return self.folder.released

    async def list(self) -> AsyncIterator[StoredGroup]:
        for _, digest, size in self.folder.groups():
            yield StoredGroup(digest, size)

    async def get(
        self, digest: str, start: int = 0, end: int | None = None, *, verify: bool = True
    ) -> memoryview | None:
        """See `GroupStore.get`. Every reader checks: any process of this user may have written, or changed it."""
        try:
            found = self.folder.read(digest, start, end)
        except OSError:
            self.damaged += 1
            await self.delete(digest)
            return None
        if found is None:
            return None
        data, size = found
        return await self._checked(digest, data) if verify and len(data) == size else data

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `GroupStore.put`. Returns False also if there is no room, or if another process is writing it."""
        return bool(data) and await self._in_thread(lambda: self._write(digest, data))

    async def delete(self, digest: str) -> bool:
        return await self._in_thread(lambda: self.folder.delete(digest))

    async def close(self) -> None:
        """Finish writing; the groups stay for other processes. Closing twice is harmless."""
        if self._open:
            self._open = False
            await self._in_thread(self.folder.close)
            self._thread.shutdown()

    # ------------------------------------------------------------ one download

    def claim_now(self, digest: str, size: int) -> GroupClaim | NeighbourGroup | None:
        """See `SharedFolder.claim`; raise `BlockingIOError` if it would take time."""
        return self.folder.claim(digest, size, 0.0) if self._open else None

    async def claim(self, digest: str, size: int, wait_s: float) -> GroupClaim | NeighbourGroup | None:
        if not self._open:
            return None
        claiming = asyncio.ensure_future(self._in_thread(lambda: self.folder.claim(digest, size, wait_s)))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(self._unwanted)
            raise

    async def publish(self, claim: GroupClaim) -> bool:
        return self._open and await self._in_thread(lambda: self.folder.publish(claim))

    def drop(self, claim: GroupClaim) -> None:
        """Give up a claim, without waiting for it."""
        if self._open:
            self._thread.submit(self.folder.drop, claim)

    # -------------------------------------------------------------- internals

    def _write(self, digest: str, data: memoryview) -> bool:
        found = self.folder.claim(digest, len(data))
        if isinstance(found, NeighbourGroup):
            found.close()
        if not isinstance(found, GroupClaim):
            return False
        found.write(data)
        return self.folder.publish(found)

    def _unwanted(self, claiming: asyncio.Future[GroupClaim | NeighbourGroup | None]) -> None:
        found = None if claiming.cancelled() else claiming.result()
        if isinstance(found, GroupClaim):
            self.drop(found)
        elif found is not None:
            found.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
