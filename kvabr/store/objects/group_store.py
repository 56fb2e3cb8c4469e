"""Single groups in an object store: a tier below the memory of relays and clients, which several can share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from kvabr.store.group_store import LocalGroupStore
from kvabr.store.lru import ByteLru
from kvabr.store.objects.bucket import open_objects
from kvabr.store.objects.layout import group_key
from kvabr.types.errors import NotFoundError, TransportError

MAX_GROUP_BYTES = 1 << 30
_READ_S = 5.0
"""Seconds that a group may take; after that it is as good as absent."""
_WRITE_S = 60.0
_PAUSE_S = 5.0
"""Seconds without any request after one that failed; plays do without this tier for that time."""


class ObjectGroupStore(LocalGroupStore[int]):
    """Groups as objects. ``digest in store`` tells of those that this process has seen there; `get` finds others, too.

    Others write there as well, so nothing is deleted to make room: the bucket's own rules do that.
    """

    def __init__(
        self,
        url: str,
        max_bytes: int,
        *,
        executor: Executor | None = None,
        on_failure: Callable[[str], object] = lambda _why: None,
    ) -> None:
        """Take a URL, see `kvabr.store.objects.url`, which may raise `UsageError`; nothing is asked for yet.

        Args:
            url: the store.
            max_bytes: bytes of groups that this process remembers to be there.
            executor: computes digests, as for `MemoryGroupStore`.
            on_failure: hears why the store cannot be used, once for each pause in which it is left alone.
        """
        super().__init__(ByteLru(max_bytes, lambda size: size), executor)
        self._bucket, self._on_failure = open_objects(url), on_failure
        self._again_s = 0.0

    def keep(self, digests: Sequence[str], until_s: float) -> None:
        """Do nothing: no group of an object store makes room for others."""

    async def get(self, digest: str) -> memoryview | None:
        """See `LocalGroupStore.get`. If the store fails, the group is as good as absent."""
        if self._pauses():
            return None
        try:
            async with asyncio.timeout(_READ_S):
                data = await self._bucket.get(group_key(digest), limit=MAX_GROUP_BYTES)
        except NotFoundError:
            self._kept.pop(digest, None)
            return None
        except (TransportError, TimeoutError) as error:
            self._failed(error)
            return None
        self._kept.add(digest, len(data))
        return await self._checked(digest, data)

    async def put(self, digest: str, data: memoryview) -> bool:
        """See `LocalGroupStore.put`. Returns False also if the store fails."""
        if not data or digest in self._kept or self._pauses():
            return False
        try:
            async with asyncio.timeout(_WRITE_S):
                added = await self._bucket.put_new(group_key(digest), data)
        except (TransportError, TimeoutError) as error:
            self._failed(error)
            return False
        self._kept.add(digest, len(data))
        return added

    async def delete(self, digest: str) -> bool:
        """See `LocalGroupStore.delete`; for all who share the store. Returns whether this process had seen it there."""
        found = self._kept.pop(digest, None) is not None
        try:
            await self._bucket.delete([group_key(digest)])
        except TransportError as error:
            self._failed(error)
        return found

    async def close(self) -> None:
        """Forget what is there, and let go of connections."""
        self._kept.clear()
        self._bucket.close()

    def _pauses(self) -> bool:
        return asyncio.get_running_loop().time() < self._again_s

    def _failed(self, error: Exception) -> None:
        if not self._pauses():
            self._on_failure(str(error) or f"{self._bucket.url}: did not answer in time")
        self._again_s = asyncio.get_running_loop().time() + _PAUSE_S
