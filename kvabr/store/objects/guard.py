"""What a publisher holds while it uploads, so that no collector takes what it is about to name.

See `kvabr.store.objects.leases` for how the two keep out of each other's way.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

from kvabr.store.objects.leases import (
    CATALOGS,
    INTENTS,
    TIMING,
    LeaseTiming,
    Note,
    Objects,
    Runtime,
    StoredObject,
    read_note,
    tombstone_key,
    touch,
    unswept,
)
from kvabr.types.errors import AssetError

T = TypeVar("T")


class BlockingBucket(Protocol):
    """A bucket's methods for threads, see `kvabr.store.objects.bucket.Bucket`."""

    def get_sync(self, key: str, start: int = 0, end: int | None = None, *, limit: int) -> memoryview:
        """See `Objects.get`."""

    def head_sync(self, key: str) -> StoredObject | None:
        """See `Objects.head`."""

    def put_new_sync(self, key: str, data: bytes) -> bool:
        """See `Objects.put_new`."""

    def put_sync(self, key: str, data: bytes) -> None:
        """See `Objects.put`."""

    def delete_sync(self, keys: Sequence[str]) -> None:
        """See `Objects.delete`."""

    def list_sync(self, prefix: str) -> Iterator[StoredObject]:
        """See `Objects.list`."""


class BlockingObjects:
    """`Objects` whose methods block, and never suspend: for coroutines that `finish` runs without an event loop."""

    def __init__(self, bucket: BlockingBucket) -> None:
        """Take the bucket."""
        self._bucket = bucket

    async def get(self, key: str, start: int = 0, end: int | None = None, *, limit: int) -> memoryview:
        """See `Objects.get`."""
        return self._bucket.get_sync(key, start, end, limit=limit)

    async def head(self, key: str) -> StoredObject | None:
        """See `Objects.head`."""
        return self._bucket.head_sync(key)

    async def put_new(self, key: str, data: bytes) -> bool:
        """See `Objects.put_new`."""
        return self._bucket.put_new_sync(key, data)

    async def put(self, key: str, data: bytes) -> None:
        """See `Objects.put`."""
        self._bucket.put_sync(key, data)

    async def delete(self, keys: Sequence[str]) -> None:
        """See `Objects.delete`."""
        self._bucket.delete_sync(keys)

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        """See `Objects.list`."""
        for found in self._bucket.list_sync(prefix):
            yield found


class AsyncPublishGuard:
    """Keeps collectors from what a publisher is about to name; a context manager around uploading and committing."""

    def __init__(
        self,
        objects: Objects,
        *,
        model: str,
        catalog: str,
        spans: Iterable[str],
        age_s: float = 0.0,
        computed_s: float = math.inf,
        timing: LeaseTiming = TIMING,
        runtime: Runtime | None = None,
    ) -> None:
        """Take what will be published; nothing is written yet.

        Args:
            objects: The tenant's objects.
            model: Name of the model.
            catalog: The prompt's digest.
            spans: Names of all spans that the catalog will list, ``s/OFFER/KEY``, and of its profile, ``p/SHA256``.
            age_s: Seconds since publishing began.
            computed_s: When the cache was computed, in seconds since 1970, if that was before.
            timing: How long notes are believed.
            runtime: The process's clock.
        """
        self._objects, self._model = objects, model
        self._age_s, self._computed_s = age_s, computed_s
        self._keys = (f"{CATALOGS}{catalog}", *spans)
        self._timing, self._runtime = timing, runtime or Runtime()
        self._key = f"{INTENTS}{secrets.token_hex(16)}"
        self._begin = 0.0
        self._written_s = 0.0
        """When the intent was written, by the store's clock."""
        self._expired_s = -math.inf
        """Everything of the model from before this time is expired."""

    async def __aenter__(self) -> Self:
        self._begin = self._runtime.now()
        try:
            await self._enter()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _enter(self) -> None:
        await self._objects.put(self._key, Note(self._keys).dumps())
        found = await self._objects.head(self._key)
        if found is None:
            raise AssetError(f"{self._key}: was written, and is gone; does the bucket expire objects at once?")
        self._written_s = found.modified_s
        if not await unswept(self._objects, self._keys, self._written_s, self._timing, self._runtime):
            raise AssetError("a collector has been deleting what is to be published for too long; try again")
        await self._look_at_tombstone()

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):  # it ends by itself
            await self._objects.delete([self._key])

    def may_reuse(self, modified_s: float) -> bool:
        """Return whether a span that was written then may be part of what is published; if not, gc removes it."""
        return modified_s >= self._expired_s

    def stale_message(self, key: str) -> str:
        """Return what to do about a span that may not be reused."""
        return f"{key}: of a model that expired, and not removed yet; finish that with: kvabr store gc"

    async def check(self) -> None:
        """Raise `AssetError` if the catalog may not be committed now."""
        if self._runtime.now() - self._begin > self._timing.publishing_s:
            raise AssetError("publishing took so long that a collector may have removed parts; publish again")
        before_s = self._expired_s
        await self._look_at_tombstone()
        if self._expired_s != before_s:
            raise AssetError(f"{self._model}: expired while its cache was being published; publish again")

    async def _look_at_tombstone(self) -> None:
        note = await read_note(self._objects, tombstone_key(self._model))
        self._expired_s = -math.inf if note is None else note.until_s
        if min(self._written_s - self._age_s, self._computed_s) < self._expired_s:
            raise AssetError(
                f"{self._model}: caches from before its expiry (kvabr store expire) are not published; compute it again"
            )


class PublishGuard:
    """`AsyncPublishGuard` for a writer that blocks."""

    def __init__(
        self,
        bucket: BlockingBucket,
        *,
        model: str,
        catalog: str,
        spans: Iterable[str],
        age_s: float = 0.0,
        computed_s: float = math.inf,
        timing: LeaseTiming = TIMING,
    ) -> None:
        """See `AsyncPublishGuard`."""
        runtime = Runtime(sleep=_blocking_sleep)
        self._guard = AsyncPublishGuard(
            BlockingObjects(bucket),
            model=model,
            catalog=catalog,
            spans=spans,
            age_s=age_s,
            computed_s=computed_s,
            timing=timing,
            runtime=runtime,
        )

    def __enter__(self) -> Self:
        finish(self._guard.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        finish(self._guard.__aexit__())

    @property
    def is_choosy(self) -> bool:
        """Whether there are times for which `may_reuse` says no."""
        return not self.may_reuse(-math.inf)

    def may_reuse(self, modified_s: float) -> bool:
        """See `AsyncPublishGuard.may_reuse`."""
        return self._guard.may_reuse(modified_s)

    def stale_message(self, key: str) -> str:
        """See `AsyncPublishGuard.stale_message`."""
        return self._guard.stale_message(key)

    def check(self) -> None:
        """See `AsyncPublishGuard.check`."""
        finish(self._guard.check())


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine over blocking objects has suspended")


async def _blocking_sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - of a coroutine that runs without a loop


def blocking_touch(bucket: BlockingBucket, catalog: str) -> None:
    """See `kvabr.store.objects.leases.touch`."""
    finish(touch(BlockingObjects(bucket), catalog))
