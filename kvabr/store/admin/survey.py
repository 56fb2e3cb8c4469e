"""What a bucket holds, at one look: listings, and what each catalog names."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvabr.store.admin.protocol import Holding, Progress, holding, silent
from kvabr.store.objects.layout import (
    CATALOGS,
    GROUPS,
    MAX_OFFER_BYTES,
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
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError, NotFoundError

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


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a catalog of a bucket names."""

    catalog: Catalog
    spans: tuple[str, ...]
    """Names of its spans, in the order of the prompt."""
    pointers: Mapping[str, str]
    """Names of the pointers of its groups, and the span that has each group."""

    @classmethod
    def loads(cls, key: str, data: bytes | memoryview) -> Manifest:
        """Parse a stored catalog; `FormatError` if it is damaged."""
        stored = StoredCatalog.loads(data)
        try:
            catalog = stored.parsed()
        except FormatError as error:
            raise type(error)(f"{key}: its catalog is damaged: {error}") from error
        spans, size = tuple(stored.keys), stored.span_groups
        pointers = {
            pointer_key(stored.offer, digest): spans[group // size]
            for group, digest in enumerate(catalog.chunks)
            if (group + 1) % size  # the last group of a full span has its name
        }
        return cls(catalog, spans, pointers)

    @property
    def names(self) -> set[str]:
        """Names of all objects that it needs."""
        profile = self.catalog.profile
        return {*self.spans, *self.pointers, *(() if profile is None else (profile_key(profile),))}


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
        return holding(
            manifest.catalog, catalog.removeprefix(CATALOGS), found.modified_s, own_bytes=found.size, parts=parts
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
