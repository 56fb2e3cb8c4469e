"""What a bucket holds, at one look: listings, and what each catalog names."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from kvabr.store.admin.protocol import Holding, Progress, silent
from kvabr.store.objects.layout import (
    CATALOGS,
    GROUPS,
    MAX_OFFER_BYTES,
    MAX_SPAN_BYTES,
    MAX_STORED_CATALOG_BYTES,
    OFFERS,
    POINTERS,
    PROFILES,
    SPANS,
    StoredCatalog,
    StoreOffer,
    check_offer_key,
    pointer_key,
    profile_key,
)
from kvabr.store.objects.protocol import Objects, StoredObject
from kvabr.types.catalog import MAX_GROUPS
from kvabr.types.errors import FormatError, NotFoundError
from kvabr.types.kv import KVSpec
from kvabr.types.records import decode

T = TypeVar("T")

_LANES = 32
"""Requests at once."""


async def spread(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await several coroutines, `_LANES` at a time, and return their results in order."""
    left, results = iter(enumerate(works)), dict[int, T]()

    async def lane() -> None:
        for number, work in left:
            results[number] = await work

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_LANES):
                group.create_task(lane())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in sorted(results)]


async def listing(objects: Objects, prefix: str) -> dict[str, StoredObject]:
    """Return the objects whose names begin with ``prefix``, by name."""
    return {found.key: found async for found in objects.list(prefix)}


class _Sizes(Struct):
    name: str
    bytes: tuple[Annotated[int, Meta(ge=1, le=MAX_SPAN_BYTES)], ...]


class _Outline(Struct):
    """The part of a catalog that a manifest needs."""

    spec: dict[str, Any]
    tokens: Annotated[int, Meta(ge=1)]
    chunks: Annotated[tuple[str, ...], Meta(min_length=1)]
    tracks: tuple[_Sizes, ...]
    profile: str | None = None
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a catalog of a bucket names."""

    model: str
    tokens: int
    spans: tuple[str, ...]
    """Names of its spans, in the order of the prompt."""
    pointers: Mapping[str, str]
    """Names of the pointers of its groups, and the span that has each group."""
    besides: tuple[str, ...]
    """Name of its profile, if it has one."""
    tracks: Mapping[str, int]
    """Bytes of each track."""
    measured: bool

    @classmethod
    def loads(cls, key: str, data: bytes | memoryview) -> Manifest:
        """Parse a stored catalog; `FormatError` if it is damaged. Reads no more of it than it needs."""
        stored = StoredCatalog.loads(data)
        found = decode(stored.catalog, _Outline, f"{key}: its catalog is damaged")
        spec = KVSpec.from_json(found.spec)
        if found.tokens > MAX_GROUPS * spec.group_tokens:
            raise FormatError(f"{key}: its catalog is damaged: it has {found.tokens} tokens")
        spans, size = tuple(stored.keys), stored.span_groups
        if len(found.chunks) > size * len(spans):
            raise FormatError(f"{key}: its catalog is damaged: it has {len(found.chunks)} groups")
        besides = () if found.profile is None else (profile_key(found.profile),)
        return cls(
            model=spec.model,
            tokens=found.tokens,
            spans=spans,
            pointers={
                pointer_key(stored.offer, digest): spans[group // size]
                for group, digest in enumerate(found.chunks)
                if (group + 1) % size  # the last group of a full span has its name
            },
            besides=besides,
            tracks={track.name: sum(track.bytes) for track in found.tracks},
            measured=not found.estimated,
        )

    @property
    def names(self) -> set[str]:
        """Names of all objects that it needs."""
        return {*self.spans, *self.pointers, *self.besides}


@dataclass(slots=True)
class Survey:
    """What a bucket holds for one tenant."""

    catalogs: dict[str, StoredObject] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """By the catalog's name."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Catalogs that are damaged, and how."""
    unknown_offers: dict[str, str] = field(default_factory=dict)
    """Offers that cannot be read, and why."""
    spans: dict[str, StoredObject] = field(default_factory=dict)
    pointers: dict[str, StoredObject] = field(default_factory=dict)
    profiles: dict[str, StoredObject] = field(default_factory=dict)
    groups: dict[str, StoredObject] = field(default_factory=dict)
    """Single groups that relays and clients cached."""

    @property
    def parts(self) -> dict[str, StoredObject]:
        """All objects that catalogs name."""
        return self.spans | self.pointers | self.profiles

    def holding(self, catalog: str) -> Holding:
        """Return the asset of a catalog that could be read."""
        found, manifest = self.catalogs[catalog], self.manifests[catalog]
        parts = {span: self.spans[span].size for span in manifest.spans if span in self.spans}
        return Holding(
            name=catalog.removeprefix(CATALOGS),
            model=manifest.model,
            tokens=manifest.tokens,
            created_s=found.modified_s,
            bytes=found.size + sum(parts.values()),
            own_bytes=found.size,
            measured=manifest.measured,
            parts=parts,
            tracks=manifest.tracks,
        )


def check_size(info: StoredObject, limit: int) -> None:
    """Raise `FormatError` if an object is larger than one of its kind can be."""
    if info.size > limit:
        raise FormatError(f"{info.size:,} bytes, more than the {limit:,} that this may have")


async def read_manifests(
    objects: Objects, catalogs: Mapping[str, StoredObject], progress: Progress = silent
) -> tuple[dict[str, Manifest], dict[str, str]]:
    """Return what catalogs name, and what is wrong with those that are damaged; those that are gone are left out."""
    found, bad = dict[str, Manifest](), dict[str, str]()

    async def read(key: str) -> None:
        try:
            check_size(catalogs[key], MAX_STORED_CATALOG_BYTES)
            found[key] = Manifest.loads(key, await objects.get(key, limit=MAX_STORED_CATALOG_BYTES))
        except NotFoundError:
            pass
        except FormatError as error:
            bad[key] = str(error)
        progress("catalogs", len(found) + len(bad), len(catalogs))

    await spread(map(read, catalogs))
    return found, bad


async def survey(objects: Objects, progress: Progress = silent) -> Survey:
    """Look at everything that a tenant has.

    Catalogs are listed first: what they name was written before them, so it is in the later listings unless it was
    deleted.
    """
    found = Survey()
    found.catalogs = await listing(objects, CATALOGS)
    found.manifests, found.unreadable = await read_manifests(objects, found.catalogs, progress)
    for key, info in (await listing(objects, OFFERS)).items():
        try:
            check_offer_key(key)
            check_size(info, MAX_OFFER_BYTES)
            StoreOffer.loads(await objects.get(key, limit=MAX_OFFER_BYTES))
        except NotFoundError:
            continue
        except FormatError as error:
            found.unknown_offers[key] = str(error)
    progress("listing", 0, 1)
    found.spans = await listing(objects, SPANS)
    found.pointers = await listing(objects, POINTERS)
    found.profiles = await listing(objects, PROFILES)
    found.groups = await listing(objects, GROUPS)
    progress("listing", 1, 1)
    return found
