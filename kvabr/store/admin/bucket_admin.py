"""Managing one tenant's assets in a bucket."""

from __future__ import annotations

import time
from collections.abc import Collection

from kvabr.store.admin.protocol import Inventory, Progress, silent
from kvabr.store.admin.survey import listing, read_manifests, spread, survey
from kvabr.store.objects.layout import CATALOGS
from kvabr.store.objects.protocol import Objects
from kvabr.store.objects.spans import HEAD_BYTES, MAX_POINTER_BYTES, encode_pointer, head_bytes
from kvabr.types.errors import FormatError, NotFoundError

_GRACE_S = 3600.0
"""Seconds for which an object that no catalog names may be a publisher's at work."""


class BucketAdmin:
    """A `StoreAdmin` over a bucket."""

    def __init__(self, bucket: Objects) -> None:
        """Take the bucket; nothing is asked for yet."""
        self._bucket = bucket

    @property
    def location(self) -> str:
        return self._bucket.url

    @property
    def tenant(self) -> str:
        return self._bucket.where.tenant

    async def inventory(self, progress: Progress = silent) -> Inventory:
        """See `StoreAdmin.inventory`. Lists all objects, and reads all catalogs."""
        found = await survey(self._bucket, progress)
        held = [found.holding(catalog) for catalog in sorted(found.manifests)]
        named = {part for each in held for part in each.parts}
        damaged = {key.removeprefix(CATALOGS): what for key, what in found.unreadable.items()} | found.unknown_offers
        unnamed = sum(info.size for key, info in found.spans.items() if key not in named)
        cached = sum(info.size for info in found.groups.values())
        return Inventory(tuple(held), damaged, unnamed, cached)

    async def names(self) -> list[str]:
        return [key.removeprefix(CATALOGS) for key in await listing(self._bucket, CATALOGS)]

    async def remove(self, names: Collection[str], *, unnamed: bool = False, progress: Progress = silent) -> int:
        """See `StoreAdmin.remove`. Reads all catalogs; removes no more than the asset's while one cannot be read.

        A publisher that reuses a removed span at this moment publishes an asset that lacks it: plays miss that part,
        and whoever computes the prompt again publishes it again.
        """
        there = await listing(self._bucket, CATALOGS)
        going = {key: there[key] for name in names if (key := f"{CATALOGS}{name}") in there}
        manifests, _ = await read_manifests(self._bucket, going, progress)
        # Catalogs first: what a later one names is then seen by the survey.
        await self._bucket.delete(list(going))
        found = await survey(self._bucket, progress)
        parts, doomed = found.parts, set[str]()
        if not found.unreadable and not found.unknown_offers:  # they may name anything
            kept = {name for manifest in found.manifests.values() for name in manifest.names}
            doomed |= {name for manifest in manifests.values() for name in manifest.names} - kept
            if unnamed:
                before_s = time.time() - _GRACE_S
                doomed |= {key for key, info in parts.items() if info.modified_s < before_s} - kept
            shared = {
                pointer: span
                for manifest in found.manifests.values()
                for pointer, span in manifest.pointers.items()
                if any(pointer in gone.pointers for gone in manifests.values())
            }
            await spread(self._repoint(pointer, span) for pointer, span in shared.items())
        gone = doomed & parts.keys()
        await self._bucket.delete(sorted(gone))  # pointers, i/, before spans, s/
        return sum(info.size for info in going.values()) + sum(parts[key].size for key in gone)

    async def _repoint(self, pointer: str, span: str) -> None:
        """Let a pointer lead to a span that stays: until now it may have led to one that goes."""
        try:
            head = await self._bucket.get(span, 0, HEAD_BYTES, limit=HEAD_BYTES)
            if (size := head_bytes(head)) > len(head):
                head = await self._bucket.get(span, 0, size, limit=MAX_POINTER_BYTES)
        except (NotFoundError, FormatError):
            return  # an asset that lacks a span
        await self._bucket.put(pointer, encode_pointer(span.split("/")[2], bytes(head[:size])))
