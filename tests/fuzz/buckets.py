"""Whole stores that strangers have written to: lookups in them, and the managing of what they hold.

An input is a list of parts with `SEPARATOR` between them. The first byte of the first part says what is
removed. Each other part is an object:

    name | 0 | age 1 | data

The age is in minutes. Pages may be written as JSON, which no fuzzer would pack.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar

from kvabr.cli.store_actions import _row
from kvabr.client import lookup
from kvabr.link.objects.index import StoreIndex
from kvabr.store.admin import Inventory, find_damage, inventory, remove, total_bytes
from kvabr.store.names import CATALOGS, GROUPS, PAGES, PRIVATE_PREFIX, PROFILES, catalog_name, model_name, page_name
from kvabr.store.pages import pages_of
from kvabr.store.store import Store, StoredObject, drive
from kvabr.store.store_tree import StoreTree
from kvabr.types.catalog import Catalog
from kvabr.types.errors import ConnectionLostError, FormatError, KvabrError, RequestError, TransportError
from kvabr.types.naming import TrackNamespace
from tests.fuzz.stored import made, packed, page_json
from tests.fuzz.target import SEPARATOR, Target, refused

T = TypeVar("T")

_NOW_S = 1e9
_SILENT_AGE_S = 60.0 * 255
"""Reads of objects that are as old are never answered while a player looks for something."""
_MAX_OBJECTS = 60
_OWN = (CATALOGS, GROUPS, PAGES, PRIVATE_PREFIX, PROFILES)
"""What managing may remove."""


class _Objects(Store):
    """Objects in this process, with a clock of their own; requests are never kept waiting."""

    url = "memory://fuzz"

    def __init__(self, objects: dict[str, tuple[bytes, float]]) -> None:
        self.objects = dict(objects)

    async def get(
        self, name: str, first: int = 0, last: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        if name not in self.objects:
            raise self.missing(name)
        data, written_s = self.objects[name]
        if wait_s and written_s <= _NOW_S - _SILENT_AGE_S:
            raise ConnectionLostError(f"{name}: the store sent no data for {wait_s} s")
        if len(data[first:last]) > limit:
            raise RequestError(f"{name}: is larger than {limit} bytes")
        return memoryview(data[first:last])

    async def put_new(self, name: str, data: bytes | memoryview) -> bool:
        new = name not in self.objects
        self.objects.setdefault(name, (bytes(data), _NOW_S))
        return new

    async def delete(self, names: Collection[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        for name in sorted(self.objects):
            if name.startswith(prefix):
                yield StoredObject(name, len(self.objects[name][0]), self.objects[name][1])

    def blocked(self, work: Coroutine[Any, Any, T]) -> T:
        return drive(work)


def _objects(parts: Sequence[bytes]) -> dict[str, tuple[bytes, float]]:
    found: dict[str, tuple[bytes, float]] = {}
    for part in parts[:_MAX_OBJECTS]:
        name, _, rest = part.partition(b"\0")
        key, data = name.decode("utf-8", "replace"), rest[1:]
        if key.startswith(PAGES) and data.startswith(b"{"):
            data = packed(data)
        found[key] = data, _NOW_S - 60.0 * (rest[0] if rest else 0)
    return found


async def _find(objects: _Objects) -> bool:
    index = StoreIndex(objects)
    good = False
    if await _came(index.models()) is None:
        return False
    for catalog in (made(), made(hybrid=True)):
        namespace, spec = catalog.namespace, catalog.spec
        found = await _came(index.find(spec, catalog.chunks, any_dtype=True), FormatError)
        if found is not None and found.catalog is not None:
            _compare(index, found.catalog, found.catalog.namespace)
            assert lookup.shared_groups(found.catalog, range(40), catalog.chunks) > 0
            good = True
        data = await _came(index.catalog(namespace))
        if data is not None:
            whole = Catalog.loads(data)
            assert whole.spec.model == namespace.model  # of its name, clients ask
            _compare(index, whole, namespace)
            good = True
    return good


async def _came(coming: Awaitable[T], *errors: type[Exception]) -> T | None:
    try:
        return await coming
    except (TransportError, *errors):
        return None


def _compare(index: StoreIndex, catalog: Catalog, namespace: TrackNamespace) -> None:
    """Each group is where as many bytes are as it has."""
    refused(lambda: lookup.playable(lookup._checked(catalog), profile=True), FormatError)
    for name, track in catalog.published.items():
        for group, size in enumerate(track.bytes):
            place = index.place(namespace, name, group)
            assert place is not None
            assert place.name.startswith(GROUPS)
            assert 0 <= place.first < place.last
            assert place.last - place.first == size
            assert place.digest == track.digests[group]


def _manage(how: int, objects: dict[str, tuple[bytes, float]]) -> bool:
    tree = StoreTree(_Objects(objects))
    found = refused(lambda: inventory(tree), KvabrError)
    if found is None:
        return False
    _show(found)
    refused(lambda: find_damage(tree, deep=True), KvabrError)
    after = _Objects(objects)
    names = [name for name in (made().namespace.prompt, "x" * 9) if how & 1]
    freed = refused(lambda: remove(StoreTree(after), names, unreferenced=bool(how & 2)), KvabrError)
    assert freed is None or freed >= 0
    _still_there(objects, after.objects, found, names)
    return bool(found.holdings)


def _show(found: Inventory) -> None:
    """Format it as `kvabr store ls` does."""
    shared = Counter(part for each in found.holdings for part in each.objects)
    for each in found.holdings:
        json.dumps(_row(each, shared))
    assert total_bytes(found.holdings) >= 0


def _still_there(
    before: dict[str, tuple[bytes, float]],
    after: dict[str, tuple[bytes, float]],
    found: Inventory,
    removed: Sequence[str],
) -> None:
    """Assets that were not removed stay with all frames that they had, and so does what is none of kvabr's."""
    assert all(name in after for name in before if not name.startswith(_OWN))
    for each in found.holdings:
        if each.name not in removed:
            assert all(name in after for name in each.objects if name in before), "a part of another asset went"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _bucket(data: bytes) -> bool:
    how, *parts = data.split(SEPARATOR)
    objects = _objects(parts)
    return _loop().run_until_complete(_find(_Objects(objects))) | _manage(how[0] if how else 0, objects)


def _valid() -> list[bytes]:
    def part(name: str, data: bytes, age: int = 0) -> bytes:
        return name.encode() + b"\0" + bytes([age]) + data

    found = []
    for hybrid in (False, True):
        catalog = made(hybrid=hybrid)
        model = part(model_name(0), json.dumps({"models": [catalog.spec.to_json()]}).encode(), 200)
        pages = [part(page_name(page.chunks[-1]), page_json(page), 200) for page in pages_of(catalog)]
        pages += [part(page_name(page.chunks[-1], end=True), page_json(page), 9) for page in pages_of(catalog)[-1:]]
        found.append(SEPARATOR.join((b"\0", model, *pages)))
        if not hybrid:  # found by a group inside it
            inside = part(page_name(catalog.chunks[0]), page_json(pages_of(catalog)[0]))
            found.append(SEPARATOR.join((b"\0", model, inside)))
        listed = part(catalog_name(catalog.namespace.prompt), catalog.dumps().encode(), 90)
        other = catalog_name("ab" * 32)
        others = part("g/ab", b"group", 250), part("p/ab", b"profile", 250), part(other, b"{}", 250)
        found += [
            SEPARATOR.join((bytes([how]), model, *pages, listed, *some))
            for how, some in ((0b001, ()), (0b011, others[:2]), (0b110, others), (0b010, others[:2]))
        ]
    return found


BUCKETS = Target(_bucket, _valid, most_bytes=32 << 10)
