"""Removes assets, and objects that no asset names, from a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from kvabr.store.names import (
    CATALOGS,
    GROUPS,
    LIVE,
    PAGE_GROUPS,
    PAGES,
    PROFILES,
    catalog_name,
    has_states,
    page_name,
    profile_name,
    prompt_name,
)
from kvabr.store.pages import MAX_PAGE_BYTES, Page, pages_of, placed
from kvabr.store.spread import spread
from kvabr.store.store import Store, StoredObject, listing
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog
from kvabr.types.errors import FormatError, NotFoundError, VersionError

Progress = Callable[[str, int, int], object]
"""Called with the name of a stage, the number of finished steps, and their total."""
_GRACE_S = 3600.0
"""Seconds for which an object that no catalog names may belong to a running publisher."""


def silent(_stage: str, _done: int, _total: int) -> None:
    """Ignore progress."""


def objects_of(catalog: Catalog) -> dict[str, int]:
    """Return the size in bytes of each object with frames of a catalog."""
    sizes: dict[str, int] = {}
    for track in catalog.published.values():
        for group in range(len(track.bytes)):
            if (found := placed(catalog, track.name, group)) is not None:
                sizes[found.name] = max(sizes.get(found.name, 0), found.last)
    return sizes


async def read_catalogs(
    store: Store, prompts: Iterable[str], progress: Progress = silent
) -> tuple[dict[str, Catalog], dict[str, str]]:
    """Return catalogs by prompt digest, and the errors of damaged catalogs; skip missing ones."""
    found, bad, names = dict[str, Catalog](), dict[str, str](), list(prompts)

    async def read(prompt: str) -> None:
        try:
            data = await store.get(catalog_name(prompt), limit=MAX_CATALOG_BYTES)
            catalog = Catalog.loads(bytes(data))
            if catalog.namespace.prompt == prompt:
                found[prompt] = catalog
            else:
                bad[prompt] = f"{store.where(catalog_name(prompt))}: is the catalog of another prompt"
        except NotFoundError:
            pass
        except FormatError as error:
            bad[prompt] = f"{store.where(catalog_name(prompt))}: {error}"
        progress("catalogs", len(found) + len(bad), len(names))

    await spread(map(read, names))
    return found, bad


async def remove_assets(
    store: Store, prompts: Collection[str], *, unreferenced: bool = False, progress: Progress = silent
) -> int:
    """Remove assets, and objects that no other asset names; return the number of freed bytes.

    With ``unreferenced``, also remove objects that no catalog names if they are an hour old. If another catalog cannot
    be read, only the catalogs are removed, as that catalog may name any object. If a publisher takes over a page while
    it is removed, its asset lacks the page's frames.
    """
    there = await listing(store, CATALOGS)
    going, _ = await read_catalogs(store, [prompt for prompt in prompts if catalog_name(prompt) in there], progress)
    freed = sum(there[name].size for prompt in prompts if (name := catalog_name(prompt)) in there)
    # Delete catalogs first: the second listing then includes catalogs published in the meantime.
    await store.delete([catalog_name(prompt) for prompt in prompts])
    await store.delete([prompt_name(prompt) for prompt in prompts])
    left = [name.removeprefix(CATALOGS) for name in await listing(store, CATALOGS)]
    kept, unreadable = await read_catalogs(store, left, progress)
    if unreadable:
        return freed
    names = {name for catalog in kept.values() for name in _all_names(catalog)}
    doomed = {name for catalog in going.values() for name in _all_names(catalog)} - names
    sizes = await _sizes(store)
    if unreferenced:
        before_s = time.time() - _GRACE_S
        doomed |= {name for name, found in sizes.items() if found.modified_s < before_s} - names
        doomed -= {name for name in sizes if name.startswith(LIVE) and f"{name.rpartition('/')[0]}/live" in sizes}
    doomed &= sizes.keys()
    await store.delete(sorted(doomed, reverse=True))  # pages, i/, before frames, g/
    await _mend_pages(store, going.values(), kept.values(), sizes.keys() - doomed)
    progress("removing", 1, 1)
    return freed + sum(sizes[name].size for name in doomed)


async def _sizes(store: Store) -> dict[str, StoredObject]:
    found: dict[str, StoredObject] = {}
    for prefix in (GROUPS, PAGES, PROFILES, LIVE):
        found |= await listing(store, prefix)
    return found


def _all_names(catalog: Catalog) -> set[str]:
    names = {*objects_of(catalog), *map(page_name, catalog.chunks)}
    if has_states(catalog.spec):
        last = (len(catalog.chunks) - 1) // PAGE_GROUPS * PAGE_GROUPS
        names |= {page_name(chunk, end=True) for chunk in catalog.chunks[last:]}
    if catalog.profile is not None:
        names.add(profile_name(catalog.profile))
    return names


async def _mend_pages(store: Store, gone: Iterable[Catalog], kept: Iterable[Catalog], objects: Collection[str]) -> None:
    shared = {chunk for catalog in gone for chunk in catalog.chunks}
    for catalog in kept:
        if shared.intersection(catalog.chunks):
            await put_pages(store, await bad_pages(store, catalog, set(objects), shared))


async def bad_pages(
    store: Store, catalog: Catalog, objects: AbstractSet[str], among: AbstractSet[str] | None = None
) -> dict[str, Page]:
    """Return an asset's pages to write, by name: those that are missing or damaged, or that name missing frames.

    ``objects`` are the names of all objects with frames; ``among``: look at the pages of these groups only.
    """
    if catalog.passage is not None:
        return {}
    names = {page_name(chunk): chunk for chunk in catalog.chunks if among is None or chunk in among}
    if has_states(catalog.spec) and among is None:
        names[page_name(catalog.chunks[-1], end=True)] = catalog.chunks[-1]
    own = {chunk: page for page in pages_of(catalog) for chunk in page.chunks}
    bad: dict[str, Page] = {}
    for name, chunk in names.items():
        try:
            page = Page.loads(await store.get(name, limit=MAX_PAGE_BYTES))
            good = chunk in page.chunks and page.base_objects <= objects
        except (NotFoundError, FormatError) as error:
            good = isinstance(error, VersionError)
        if not good:
            bad[name] = own[chunk]
    return bad


async def put_pages(store: Store, pages: Mapping[str, Page]) -> None:
    """Write pages by name; replace existing ones."""
    await store.delete(list(pages))
    for name, page in pages.items():
        await store.put_new(name, page.dumps())
