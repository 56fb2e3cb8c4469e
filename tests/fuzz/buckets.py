"""Whole buckets that strangers have written to: lookups in them, and the managing of what they hold.

An input is a list of parts with `SEPARATOR` between them. The first byte of the first part says what is
removed. Each other part is an object:

    key | 0 | age 1 | data

An ``@`` in a key stands for the ID of the first offer. The age is in minutes. Offers, spans and pointers may be
written as JSON: then their digests are right, as no fuzzer would guess them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TypeVar

from kvabr.store.admin.bucket_admin import BucketAdmin
from kvabr.store.admin.protocol import Inventory, total_bytes
from kvabr.store.objects.layout import catalog_key, offer_key, pointer_key, span_key
from kvabr.store.objects.spans import encode_pointer

from kvabr.cli.store_actions import _row, _shared
from kvabr.client import lookup
from kvabr.link.objects.index import StoreIndex
from kvabr.types.catalog import Catalog
from kvabr.types.errors import (
    ConnectionLostError,
    FormatError,
    KvabrError,
    NotFoundError,
    RequestError,
    TransportError,
)
from kvabr.types.naming import TrackNamespace, prefix_track
from tests.fuzz.stored import SPAN_GROUPS, heads, identified, made, offer, span, stored
from tests.fuzz.target import SEPARATOR, Target, refused

T = TypeVar("T")

_NOW_S = 1e9
_SILENT_AGE_S = 60.0 * 255
"""Reads of objects that are as old are never answered while a player looks for something."""
_MOST_OBJECTS = 40


@dataclass(frozen=True, slots=True)
class _Info:
    key: str
    size: int
    modified_s: float


class _Objects:
    """The objects of one tenant in this process, with a clock of their own; requests are never kept waiting."""

    url = "memory://fuzz"
    where = SimpleNamespace(tenant="default")

    def __init__(self, objects: dict[str, tuple[bytes, float]]) -> None:
        self.objects = dict(objects)

    async def get(
        self, key: str, start: int = 0, end: int | None = None, *, limit: int, wait_s: float = 0.0
    ) -> memoryview:
        if key not in self.objects:
            raise NotFoundError(key)
        if wait_s and self.objects[key][1] <= _NOW_S - _SILENT_AGE_S:
            raise ConnectionLostError(f"{key}: the store has sent nothing for {wait_s} s")
        data = self.objects[key][0]
        if start > len(data) or len(data[start:end]) > limit:
            raise RequestError(f"{key}: ends before that, or is larger than {limit} bytes")
        return memoryview(data[start:end])

    async def head(self, key: str) -> _Info | None:
        return _Info(key, len(self.objects[key][0]), self.objects[key][1]) if key in self.objects else None

    async def put_new(self, key: str, data: bytes) -> bool:
        new = key not in self.objects
        self.objects.setdefault(key, (data, _NOW_S))
        return new

    async def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data, _NOW_S

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[_Info]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield _Info(key, len(self.objects[key][0]), self.objects[key][1])

    def below(self, key: str) -> str:
        return key


def _objects(parts: Sequence[bytes]) -> dict[str, tuple[bytes, float]]:
    found: dict[str, tuple[bytes, float]] = {}
    first = ""
    for part in parts[:_MOST_OBJECTS]:
        name, _, rest = part.partition(b"\0")
        key, data = name.decode("utf-8", "replace"), rest[1:]
        if key.startswith("o/"):
            data = identified(data)
            if not first and (known := refused(lambda: type(offer()).loads(data), FormatError)) is not None:  # noqa: B023
                first = known.id
        head, newline, frames = data.partition(b"\n")
        if key.startswith("s/") and head.startswith(b"{"):
            data = span(head, frames if newline else b"")
        target, space, head = data.partition(b" ")
        if key.startswith("i/") and space and head.startswith(b"{"):
            data = encode_pointer(target.decode("ascii", "replace")[:100], span(head))
        found[key.replace("@", first)] = data, _NOW_S - 60.0 * (rest[0] if rest else 0)
    return found


async def _find(objects: _Objects) -> bool:
    index = StoreIndex(objects)  # type: ignore[arg-type]  # all that it asks for
    good = False
    try:
        if await _came(index.models()) is None:
            return False
        for catalog in (made(), made(hybrid=True)):
            namespace, spec = catalog.namespace, catalog.spec
            found = await _came(index.find(spec, catalog.chunks, any_dtype=True), FormatError)
            if found is not None and found.catalog is not None:
                _compare(index, found.catalog, found.catalog.namespace)
                assert lookup.shared_groups(found.catalog, range(40), catalog.chunks) > 0
                good = True
            first = TrackNamespace(spec.model, catalog.chunks[0])
            told = await _came(index.lookup(first, prefix_track(catalog.chunks[1:])))
            data = await _came(index.catalog(namespace))
            if data is not None:
                whole = Catalog.loads(data)
                assert whole.spec.model == namespace.model  # of its name, clients ask
                _compare(index, whole, namespace)
                good = True
            assert told is None or Catalog.loads(told).chunks
        await _came(index.profile_bytes("ab" * 32))
    finally:
        await index.close()
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
            place = index.place(namespace, name, group, track.digests[group])
            assert place is not None
            key, begin, end = place
            assert key.startswith("s/")
            assert 0 < begin < end
            assert end - begin == size


def _manage(how: int, objects: dict[str, tuple[bytes, float]]) -> bool:
    found = _managed(BucketAdmin.inventory, _Objects(objects))
    if found is not None:
        _show(found)
    after = _Objects(objects)
    names = [made().namespace.prompt] if how & 1 else []
    freed = _managed(lambda admin: admin.remove(names, unnamed=bool(how & 2)), after)
    assert freed is None or freed >= 0
    if found is not None:
        _still_there(objects, after.objects, found, names)
    return found is not None and bool(found.holdings)


def _managed(work: Callable[[BucketAdmin], Coroutine[None, None, T]], objects: _Objects) -> T | None:
    """Return the result of managing a bucket; None if it is refused."""
    try:
        return _loop().run_until_complete(work(BucketAdmin(objects)))  # type: ignore[arg-type]  # all that it asks for
    except KvabrError:
        return None


def _show(found: Inventory) -> None:
    """Format it as `kvabr store ls` does."""
    shared = _shared(found.holdings)
    for each in found.holdings:
        json.dumps(_row(each, shared))
    assert total_bytes(found.holdings) >= 0


def _still_there(
    before: dict[str, tuple[bytes, float]],
    after: dict[str, tuple[bytes, float]],
    found: Inventory,
    removed: Sequence[str],
) -> None:
    """Assets that were not removed stay with all that they name, and so does what is none of kvabr's."""
    assert all(key in after for key in before if not key.startswith(("s/", "i/", "a/", "p/", "k/")))
    for each in found.holdings:
        if each.name not in removed:
            assert all(key in after for key in (catalog_key(each.name), *each.parts)), "a part of another asset went"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _bucket(data: bytes) -> bool:
    how, *parts = data.split(SEPARATOR)
    objects = _objects(parts)
    return _loop().run_until_complete(_find(_Objects(objects))) | _manage(how[0] if how else 0, objects)


def _valid() -> list[bytes]:
    def part(key: str, data: bytes, age: int = 0) -> bytes:
        return key.encode() + b"\0" + bytes([age]) + data

    found = []
    for hybrid in (False, True):
        known, catalog = stored(hybrid=hybrid), made(hybrid=hybrid)
        parts = [part(offer_key(0), json.dumps(json.loads(offer(hybrid=hybrid).dumps())).encode(), 200)]
        keys = [span_key("@", name) for name in known.spans]
        for key, (head, frames) in zip(keys, heads(hybrid=hybrid), strict=True):
            parts.append(part(key, head + b"\n" + frames, 200))
        last = heads(hybrid=hybrid)[-1][0]
        pointer = part(pointer_key("@", catalog.chunks[-1]), known.spans[-1].encode() + b" " + last, 200)
        found.append(SEPARATOR.join((b"\0", *parts, pointer)))
        strange = part("o/x", parts[0].partition(b"\0")[2][1:], 100)
        found.append(SEPARATOR.join((b"\x01", parts[0], strange, *parts[1:], pointer)))
        listed = part(catalog_key(catalog.namespace.prompt), known.dumps(), 90)
        others = part("g/ab/cd", b"group", 250), part("p/ab", b"profile", 250), part("s/x/y", b"a span", 250)
        found += [
            SEPARATOR.join((bytes([how]), *parts, pointer, listed, *some))
            for how, some in ((0b001, ()), (0b011, others), (0b110, others))
        ]
    assert offer().span_groups == SPAN_GROUPS
    return found


BUCKETS = Target(_bucket, _valid, most_bytes=12 << 10)
