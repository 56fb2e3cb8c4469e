"""Managing one tenant's assets in a bucket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvabr.store.admin.checking import BucketCheck
from kvabr.store.admin.collect import Collected, Collector
from kvabr.store.admin.protocol import Damage, Inventory, silent
from kvabr.store.admin.rules import Rules
from kvabr.store.admin.survey import Manifest, Progress, survey
from kvabr.store.objects import leases
from kvabr.store.objects.layout import (
    MAX_SPAN_BYTES,
    MovedOffer,
    StoredCatalog,
    offer_key,
    parse_offer,
    parse_offer_key,
    pointer_key,
    profile_key,
    span_key,
)
from kvabr.store.objects.leases import CATALOGS, OFFERS, Runtime
from kvabr.store.objects.protocol import Objects
from kvabr.store.objects.spans import encode_pointer, head_bytes, parse_head, parse_pointer
from kvabr.types.catalog import MAX_GROUPS
from kvabr.types.errors import FormatError, TransportError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.records import decode

LANES = 32
"""Requests at once."""


class _Sizes(Struct):
    name: str
    bytes: tuple[Annotated[int, Meta(ge=1, le=MAX_SPAN_BYTES)], ...]


class _Outline(Struct):
    """What a manifest takes of a catalog."""

    spec: dict[str, Any]
    tokens: Annotated[int, Meta(ge=1)]
    chunks: Annotated[tuple[str, ...], Meta(min_length=1)]
    tracks: tuple[_Sizes, ...]
    profile: str | None = None
    estimated: bool = False


class BucketLayout:
    """A `ObjectFormat`: that of `kvabr.store.objects.layout`."""

    def manifest(self, key: str, data: bytes | memoryview) -> Manifest:
        """See `ObjectFormat.manifest`. The catalog itself is not checked: gc has to read thousands of them."""
        stored = StoredCatalog.loads(data)
        found = decode(stored.catalog, _Outline, f"{key}: its catalog is damaged")
        spec = KVSpec.from_json(found.spec)
        if found.tokens > MAX_GROUPS * spec.group_tokens:
            raise FormatError(f"{key}: its catalog is damaged: it has {found.tokens} tokens")
        return Manifest(
            model=spec.model,
            tokens=found.tokens,
            spans=tuple(stored.keys),
            profile=None if found.profile is None else profile_key(found.profile),
            pointers=tuple(pointer_key(stored.offer, digest) for digest in found.chunks),
            tracks={track.name: sum(track.bytes) for track in found.tracks},
            span_tokens=spec.group_tokens * stored.span_groups,
            span_groups=stored.span_groups,
            measured=not found.estimated,
        )

    def head_bytes(self, data: bytes | memoryview) -> int:
        return head_bytes(data)

    def pointers_of(self, key: str, head: bytes | memoryview) -> tuple[str, ...]:
        offer = key.split("/")[1]
        return tuple(pointer_key(offer, digest) for digest in parse_head(head).digests)

    def pointer_to(self, span: str, head: bytes | memoryview) -> bytes:
        return encode_pointer(span.split("/")[2], bytes(head))

    def target_of(self, key: str, data: bytes | memoryview) -> str:
        return span_key(key.split("/")[1], parse_pointer(data)[0])

    def offer(self, data: bytes | memoryview) -> tuple[str, str, str | None] | None:
        found = parse_offer(data)
        if isinstance(found, MovedOffer):
            return None
        return found.id, found.spec.model, None if found.profile is None else profile_key(found.profile)

    def first_offer_key(self, key: str) -> str:
        return offer_key(parse_offer_key(key)[0])

    def after_offer(self, key: str, first: bytes | memoryview) -> tuple[str, bytes] | None:
        number, turn = parse_offer_key(key)
        found = parse_offer(first)
        if (found.turn if isinstance(found, MovedOffer) else 0) != turn:
            return None
        return offer_key(number), MovedOffer(turn + 1).dumps()


class BucketAdmin:
    """A `StoreAdmin` over a bucket."""

    def __init__(
        self, bucket: Objects, runtime: Runtime | None = None, timing: leases.LeaseTiming = leases.TIMING
    ) -> None:
        """Take the bucket; nothing is asked for yet."""
        self._bucket, self._runtime, self._timing = bucket, runtime or Runtime(lanes=LANES), timing

    @property
    def location(self) -> str:
        return self._bucket.url

    @property
    def tenant(self) -> str:
        return self._bucket.where.tenant

    async def inventory(self, progress: Progress = silent) -> Inventory:
        """See `StoreAdmin.inventory`. Lists all objects, and reads all catalogs and leases."""
        now_s = await self.time_s()
        found = await survey(self._bucket, BucketLayout(), now_s, self._runtime, progress, count_uses=True)
        held = [found.holding(catalog) for catalog in sorted(found.manifests)]
        named = {part.key for each in held for part in each.parts}
        damaged = {key.removeprefix(CATALOGS): what for key, what in found.unreadable.items()} | found.unknown_offers
        if found.unknown_expiry:
            key, _, what = found.unknown_expiry.partition(": ")
            damaged[key] = what
        unnamed = sum(info.size for key, info in found.spans.items() if key not in named)
        cached = sum(info.size for info in found.groups.values())
        return Inventory(now_s, tuple(held), damaged, unnamed, cached)

    async def names(self) -> list[str]:
        return [key.removeprefix(CATALOGS) for key in await leases.listing(self._bucket, CATALOGS)]

    async def time_s(self) -> float:
        await leases.listing(self._bucket, OFFERS)  # some stores make a bucket that is missing as soon as one writes
        try:
            return await leases.store_time(self._bucket)
        except TransportError:
            return time.time()

    async def pin(self, name: str, seconds: float) -> float:
        return await leases.pin(self._bucket, name, seconds, self._timing, self._runtime)

    async def unpin(self, name: str) -> bool:
        return await leases.unpin(self._bucket, name)

    async def expire(self, model: str, before_s: float | None = None) -> float:
        return await leases.expire(self._bucket, model, before_s)

    async def expired(self) -> Mapping[str, float]:
        return await leases.tombstones(self._bucket)

    async def collect(
        self,
        rules: Rules,
        *,
        dry_run: bool = False,
        cache_ttl_s: float | None = None,
        take_over: bool = False,
        progress: Progress = silent,
    ) -> Collected:
        collector = Collector(
            self._bucket,
            BucketLayout(),
            rules,
            timing=self._timing,
            runtime=self._runtime,
            progress=progress,
            dry_run=dry_run,
            cache_ttl_s=float("inf") if cache_ttl_s is None else cache_ttl_s,
            take_over=take_over,
        )
        return await collector.run()

    async def verify(self, *, deep: bool = False, repair: bool = False, progress: Progress = silent) -> list[Damage]:
        found = await survey(self._bucket, BucketLayout(), await self.time_s(), self._runtime, progress)
        checked = BucketCheck(self._bucket, found, self._runtime, progress, deep)
        await checked.run()
        if not (repair and checked.damages):
            return checked.damages
        collector = Collector(
            self._bucket,
            BucketLayout(),
            Rules(),
            timing=self._timing,
            runtime=self._runtime,
            progress=progress,
            broken=checked.catalogs,
            bad_spans=checked.spans,
            bad_pointers=checked.pointers,
        )
        done = await collector.run()
        gone = {each.holding.name for each in done.evicted}
        if done.busy:
            raise UsageError("somebody uses what is damaged at the moment; try again")
        return [replace(each, repaired=each.name in gone or each.name in checked.pointers) for each in checked.damages]
