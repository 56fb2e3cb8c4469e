"""Models, pages, and locations of groups in a store.

Reads the small objects, and parses them in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from cachetools import LRUCache, TTLCache

from kvabr.link.objects.page_search import PageRequest, PageSearch, prefix_of
from kvabr.store.failures import strange
from kvabr.store.names import MAX_MODELS, PAGE_GROUPS, FramePlace, catalog_name, has_states, model_name, page_name
from kvabr.store.pages import MAX_PAGE_BYTES, Page, placed
from kvabr.store.store import Store
from kvabr.transfer.interface import FoundPrefix
from kvabr.transfer.work import decoders
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog
from kvabr.types.errors import ForbiddenError, FormatError, NotFoundError, Reason, RequestError
from kvabr.types.kv import MAX_MODELS_BYTES, KVSpec, specs_from_json
from kvabr.types.naming import TrackNamespace

LOG = logging.getLogger("kvabr.store")

_WAIT_S = 2.0
"""Seconds without data after which a request is repeated."""
_WARN_S = 60.0
_WARN_AT_S: dict[str, float] = {}
_PAGES, _PAGES_S = 1024, 60.0
"""Maximum number of cached pages, and their seconds: a lifecycle rule may remove a page."""
_MAX_MISSING = 4096
"""Maximum number of objects remembered as missing, for `_PAGES_S` seconds."""
_MAX_PLACES = 4096
_AT_ONCE = 64


class StoreIndex:
    """The small objects of one store. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        on_object: Callable[[int, float], None] = lambda _size, _seconds: None,
    ) -> None:
        """``on_object`` receives the size in bytes and the seconds of each small object read."""
        self._store, self._on_object = store, on_object
        self._opened = False
        self._pages: TTLCache[str, Page] = TTLCache(_PAGES, _PAGES_S, time.monotonic)
        self._gone: TTLCache[str, bool] = TTLCache(_MAX_MISSING, _PAGES_S, time.monotonic)
        """Missing objects that a page refers to."""
        self._placed: LRUCache[TrackNamespace, Callable[[str, int], FramePlace | None]] = LRUCache(_MAX_PLACES)
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._admitted = False
        """True once an object could be read. Then a refusal means a missing object, since S3 hides missing objects from
        users who may not list."""

    # ------------------------------------------------------------- models

    async def open(self) -> None:
        """Check that this is a readable store, unless known; raise `TransportError`."""
        if not self._opened:
            await self._model(0)
            self._opened = True

    async def models(self) -> bytes:
        """Return the list of models in the format of an origin."""
        specs: dict[bytes, KVSpec] = {}
        for number in range(MAX_MODELS):
            spec = await self._model(number)
            if spec is None:
                break
            specs[spec.digest()] = spec
        return json.dumps({"models": [spec.to_json() for spec in specs.values()]}).encode()

    async def _model(self, number: int) -> KVSpec | None:
        """Return the spec with a number, None after the last; raise `RequestError` if it is unreadable."""
        name = model_name(number)
        data = await self._get(name, MAX_MODELS_BYTES)
        if data is None:
            return None
        try:
            return specs_from_json(bytes(data))[0]
        except (FormatError, IndexError) as error:
            raise self._wrong(name, strange(data) or str(error)) from error

    def _wrong(self, name: str, why: str) -> RequestError:
        self._warn(name, why)
        message = (
            f"{self._store.where(name)}: the answer was not published by kvabr: {why}; is it from a gateway or a "
            "login page?"
        )
        return RequestError(message, reason=Reason.WRONG)

    def _warn(self, name: str, why: str) -> None:
        """Warn at most once a minute that an object cannot be used."""
        if time.monotonic() > _WARN_AT_S.get(self._store.url, -math.inf):
            _WARN_AT_S[self._store.url] = time.monotonic() + _WARN_S
            LOG.warning("%s: cannot be used: %s", self._store.where(name), why)

    # ------------------------------------------------------------- lookups

    async def find(self, spec: KVSpec, digests: Sequence[str], *, any_dtype: bool) -> FoundPrefix | None:
        await self.open()
        search = PageSearch(digests, states=has_states(spec))
        while requests := search.wanted():
            answers = await self._pages_of(requests, digests)
            search.take(
                {
                    request: page
                    for request, page in zip(requests, answers, strict=True)
                    if page is not None and page.fits(spec, any_dtype=any_dtype) and not self._lost(page)
                }
            )
        pages = search.found
        if not pages:
            return None
        made = await asyncio.get_running_loop().run_in_executor(decoders(), prefix_of, pages)
        if made.catalog is not None:
            self._placed[made.catalog.namespace] = partial(_place_in, pages)
        return made

    def _lost(self, page: Page) -> bool:
        return bool(self._gone) and any(name in self._gone for name in page.base_objects)

    async def _pages_of(self, requests: Sequence[PageRequest], digests: Sequence[str]) -> list[Page | None]:
        names = [page_name(digests[request.group], end=request.kind == "end") for request in requests]
        unknown = [name for name in dict.fromkeys(names) if name not in self._pages]
        answers = await asyncio.gather(*(self._get(name, MAX_PAGE_BYTES) for name in unknown))
        parsed = await asyncio.get_running_loop().run_in_executor(decoders(), lambda: list(map(_parsed, answers)))
        fresh = dict[str, Page]()
        for name, page in zip(unknown, parsed, strict=True):
            if isinstance(page, Page):
                fresh[name] = self._pages[name] = page
            elif page is not None:
                self._warn(name, str(page))
        return [fresh.get(name) or self._pages.get(name) for name in names]

    # ------------------------------------------------------------- assets

    async def catalog(self, namespace: TrackNamespace) -> bytes:
        """Return an asset's catalog; raise `NotFoundError`, or `RequestError` if damaged or of another model."""
        name = catalog_name(namespace.prompt)
        data = await self._get(name, MAX_CATALOG_BYTES)
        if data is None:
            raise NotFoundError(f"no such asset {namespace.model}/{namespace.prompt} in {self._store.url}")
        text = bytes(data)
        try:
            catalog = await asyncio.get_running_loop().run_in_executor(decoders(), Catalog.loads, text)
        except FormatError as error:
            if (why := strange(data)) is not None:
                raise self._wrong(name, why) from error
            raise RequestError(f"{self._store.where(name)}: {error}; publish it again") from error
        if catalog.spec.model != namespace.model:
            message = f"is of the model {catalog.spec.model}, not {namespace.model}"
            raise NotFoundError(f"{self._store.where(name)}: {message}")
        self._placed[namespace] = partial(placed, catalog)
        return text

    def place(self, namespace: TrackNamespace, track: str, group: int) -> FramePlace | None:
        """Return the location of a group of an asset that was found, or None."""
        place = self._placed.get(namespace)
        return None if place is None else place(track, group)

    def has(self, namespace: TrackNamespace) -> bool:
        """Return True if `place` knows the asset."""
        return namespace in self._placed

    async def whole(self, name: str, limit: int) -> memoryview:
        """Return an object; raise `NotFoundError`."""
        data = await self._get(name, limit)
        if data is None:
            raise self._store.missing(name)
        return data

    def lost(self, name: str) -> None:
        """Record a missing object: for a minute, pages whose base level refers to it are not used."""
        self._gone[name] = True

    # -------------------------------------------------------------- internals

    async def _get(self, name: str, limit: int) -> memoryview | None:
        async with self._slots:
            begun_s = time.monotonic()
            try:
                data = await self._store.get(name, limit=limit, wait_s=_WAIT_S)
            except NotFoundError:
                self._admitted = True
                data = None
            except ForbiddenError:
                if not self._admitted:
                    raise
                data = None
            else:
                self._admitted = True
            self._on_object(0 if data is None else len(data), time.monotonic() - begun_s)
            return data


def _parsed(data: memoryview | None) -> Page | FormatError | None:
    if data is None:
        return None
    try:
        return Page.loads(data)
    except FormatError as error:
        return FormatError(strange(data) or str(error))


def _place_in(pages: Sequence[Page], track: str, group: int) -> FramePlace | None:
    likely = pages[min(group // PAGE_GROUPS, len(pages) - 1)]
    # Snapshots of a state are numbered differently from groups of tokens.
    return next((found for page in (likely, *pages) if (found := page.place(track, group)) is not None), None)
