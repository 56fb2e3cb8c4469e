"""What a publisher holds while it uploads, so that no collector takes what it is about to name.

See `kvabr.store.objects.leases` for how the two keep out of each other's way.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterable
from typing import Self

from kvabr.store.objects.blocking import blocking
from kvabr.store.objects.leases import (
    CATALOGS,
    INTENTS,
    TIMING,
    LeaseTiming,
    Note,
    Runtime,
    read_note,
    tombstone_key,
    unswept,
)
from kvabr.store.objects.protocol import Objects
from kvabr.types.errors import AssetError


class PublishGuard:
    """Keeps collectors from what a publisher is about to name; a context manager around uploading and committing.

    ``with``, and `check_sync`, are for writers that block.
    """

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
            raise AssetError(f"{self._key}: vanished right after it was written; check the bucket's lifecycle rules")
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

    @property
    def is_choosy(self) -> bool:
        """Whether there are times for which `may_reuse` says no."""
        return not self.may_reuse(-math.inf)

    __enter__ = blocking(__aenter__)
    __exit__ = blocking(__aexit__)
    check_sync = blocking(check)
