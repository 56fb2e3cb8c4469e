"""How publishers and collectors of a bucket keep out of each other's way, without a lock.

Both write a note before they look, so of two that meet at least the second sees the other's note:

- A publisher writes an *intent*, which names its catalog and spans, looks for sweeps and tombstones, and only then
  uploads or adopts spans. Its catalog is last; then the intent goes.
- A collector writes a *sweep*, which names what it is about to delete, looks for intents, and for catalogs, leases and
  pins that are new, and only then deletes what nothing names. Then it removes the sweep.
- A pin is written before its catalog is looked for, and so is a tombstone before what it expires.

A publisher waits while a sweep names its spans. What a killed process left is ignored after a while (`LeaseTiming`), by
the store's clock; the living stop well before, by their own monotonic clocks. A wrong local clock does no harm: ages
are differences of the store's own times.

    l/i/<random>        intent          l/a/<prompt digest>  lease: its age is the time since the last use
    l/e/<random>        eviction: spans of evicted catalogs, kept for a grace; its age counts
    x/sweep/<random>    sweep           x/m/<digest>         tombstone of a model
    pin/<digest>/<random> pin           l/gc                 lease of the collector
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from kvabr.store.objects.blocking import pause
from kvabr.store.objects.protocol import Objects, StoredObject
from kvabr.types.errors import AssetError, FormatError, NotFoundError, UsageError
from kvabr.types.records import check_schema, convert

T = TypeVar("T")

INTENTS, LEASES, EVICTIONS, PINS = "l/i/", "l/a/", "l/e/", "pin/"
MARKS, SWEEPS, TOMBSTONES = "x/", "x/sweep/", "x/m/"
COLLECTOR = "l/gc"
PROBES = "probe/"
"""Of tries whether conditional writes work, which a publisher leaves behind that may not delete."""
CATALOGS, SPANS, POINTERS, PROFILES, OFFERS, GROUPS = "a/", "s/", "i/", "p/", "o/", "g/"

MAX_NOTE_BYTES = 8 << 20
DELETED_AT_ONCE = 1000
_SCHEMA = "kvabr.note/1"


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """How long notes are believed. All who use a bucket need the same."""

    intent_s: float = 3600.0
    """Seconds that an intent protects what it names."""
    sweep_s: float = 180.0
    """Seconds that a sweep is respected: longer than a request may take that a collector sent in time."""
    wait_s: float = 30.0
    """Seconds that a publisher waits for sweeps before it gives up."""
    poll_s: float = 0.25
    """Seconds between two looks while waiting."""

    @property
    def publishing_s(self) -> float:
        """Seconds after which a publisher does not trust its own intent any more."""
        return 0.75 * self.intent_s

    @property
    def deleting_s(self) -> float:
        """Seconds after which a collector does not trust its own sweep any more."""
        return self.sweep_s / 3


TIMING = LeaseTiming()


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a process that works on a bucket needs of its surroundings."""

    now: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    sleep: Callable[[float], Awaitable[None]] = pause
    lanes: int = 1
    """Requests at once; more than 1 needs an event loop."""

    async def spread(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Await several coroutines, `lanes` at a time, and return their results in order."""
        if self.lanes == 1:
            return [await work for work in works]
        left, results = iter(enumerate(works)), dict[int, T]()

        async def lane() -> None:
            for number, work in left:
                results[number] = await work

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.lanes):
                    group.create_task(lane())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [results[number] for number in sorted(results)]


@dataclass(frozen=True, slots=True)
class Note:
    """The content of an intent, sweep, eviction, tombstone, lease or pin."""

    keys: tuple[str, ...] = ()
    """Objects that it is about."""
    model: str = ""
    until_s: float = 0.0
    """Of a pin, when it ends; of a tombstone, the time before which everything is expired."""
    uses: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    """Of a lease, how often its asset was used."""

    def dumps(self) -> bytes:
        """Return this as JSON."""
        value = {"schema": _SCHEMA, "keys": self.keys, "model": self.model, "until_s": self.until_s, "uses": self.uses}
        return json.dumps({name: each for name, each in value.items() if each}, separators=(",", ":")).encode()

    @classmethod
    def loads(cls, data: bytes | memoryview) -> Note:
        """Parse what `dumps` returned, from an untrusted source; raise `FormatError` if it is something else."""
        try:
            value = json.loads(bytes(data))  # which also knows infinity, as the end of a pin
        except (ValueError, RecursionError) as error:
            raise FormatError(f"note: not {_SCHEMA} ({error})") from error
        check_schema(value.get("schema") if isinstance(value, dict) else None, "note", _SCHEMA)
        note = convert(value, cls, "note")
        if math.isnan(note.until_s):
            raise FormatError(f"note: not {_SCHEMA}")
        return note


@dataclass(frozen=True, slots=True)
class Sweep:
    """Deletes while publishers believe its note; what is left then is the next collector's."""

    objects: Objects
    runtime: Runtime
    end_s: float
    """By the process's clock."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may be deleted any more."""
        return self.runtime.now() > self.end_s

    async def delete(self, doomed: Sequence[str]) -> bool:
        """Delete objects; return whether there was time for all."""
        for first in range(0, len(doomed), DELETED_AT_ONCE):
            if self.is_over:
                return False
            await self.objects.delete(doomed[first : first + DELETED_AT_ONCE])
        return True


def offer_note(offer: str) -> str:
    """Return what publishers and collectors name an offer by in their notes, whatever key it has."""
    return f"{OFFERS}{offer}"


def tombstone_key(model: str) -> str:
    """Return the name of a model's tombstone."""
    return f"{TOMBSTONES}{hashlib.sha256(os.fsencode(model)).hexdigest()[:32]}"


def is_young(modified_s: float, now_s: float, seconds: float) -> bool:
    """Return whether something was written less than ``seconds`` ago; the future counts as now."""
    return now_s - modified_s < seconds


async def listing(objects: Objects, prefix: str) -> dict[str, StoredObject]:
    """Return the objects whose names begin with ``prefix``, by name."""
    return {found.key: found async for found in objects.list(prefix)}


async def read_note(objects: Objects, key: str) -> Note | None:
    """Return a note; None if it is gone. Raises `FormatError` if it is damaged."""
    try:
        return Note.loads(await objects.get(key, limit=MAX_NOTE_BYTES))
    except NotFoundError:
        return None
    except FormatError as error:
        raise type(error)(f"{key}: {error}; remove it if nothing else uses this bucket") from error


async def sweeps(objects: Objects, keys: Iterable[str], now_s: float, timing: LeaseTiming) -> bool:
    """Return whether a living collector is about to delete one of ``keys``."""
    wanted = frozenset(keys)
    for found in (await listing(objects, SWEEPS)).values():
        if is_young(found.modified_s, now_s, timing.sweep_s):
            note = await read_note(objects, found.key)
            if note is not None and not wanted.isdisjoint(note.keys):
                return True
    return False


async def unswept(objects: Objects, keys: Sequence[str], now_s: float, timing: LeaseTiming, runtime: Runtime) -> bool:
    """Wait until no collector is about to delete one of ``keys``; return False if that takes too long."""
    begin = runtime.now()
    while await sweeps(objects, keys, now_s + runtime.now() - begin, timing):
        if runtime.now() - begin > timing.wait_s:
            return False
        await runtime.sleep(timing.poll_s)
    return True


async def touch(objects: Objects, catalog: str) -> None:
    """Note that an asset was used: renew its lease, and count."""
    key = f"{LEASES}{catalog}"
    try:
        note = await read_note(objects, key)
    except FormatError:
        note = None
    await objects.put(key, Note(uses=min((0 if note is None else note.uses) + 1, 1 << 52)).dumps())


async def store_time(objects: Objects) -> float:
    """Return the time on the store's clock: when an object that is written now was written."""
    key = f"{INTENTS}{secrets.token_hex(16)}"
    await objects.put(key, Note().dumps())
    found = await objects.head(key)
    await objects.delete([key])
    if found is None:
        raise AssetError(f"{key}: vanished right after it was written; check the bucket's lifecycle rules")
    return found.modified_s


async def pin(
    objects: Objects, catalog: str, seconds: float, timing: LeaseTiming = TIMING, runtime: Runtime | None = None
) -> float:
    """Keep an asset for a time that begins now, and return when it ends by the store's clock.

    Raises `NotFoundError` if there is no such asset.
    """
    target, now_s = f"{CATALOGS}{catalog}", await store_time(objects)
    key = f"{PINS}{catalog}/{secrets.token_hex(8)}"
    await objects.put(key, Note(until_s=now_s + seconds).dumps())
    free = await unswept(objects, [target], now_s, timing, runtime or Runtime())
    if not free or await objects.head(target) is None:
        await objects.delete([key])
        raise NotFoundError(f"{catalog}: no such asset; kvabr store ls lists them")
    return now_s + seconds


async def unpin(objects: Objects, catalog: str) -> bool:
    """End all pins of an asset; return whether there was one."""
    pins = list(await listing(objects, f"{PINS}{catalog}/"))
    await objects.delete(pins)
    return bool(pins)


_TICK_S = 0.001
"""What times of a store that tells fractions are rounded to at worst."""


async def expire(objects: Objects, model: str, before_s: float | None = None) -> float:
    """Write a model's tombstone and return its time: what is older is garbage, and is not published again.

    ``before_s`` is a time of the store's clock; None: now, up to the next millisecond, or the next whole second where
    the store tells no fractions. A tombstone is never replaced by one of an earlier time.
    """
    if not model:
        raise UsageError("name the model whose caches expire")
    at_s = before_s
    if at_s is None:
        now_s = await store_time(objects)
        at_s = now_s + (_TICK_S if now_s % 1.0 else 1.0)
    before = await read_note(objects, tombstone_key(model))
    at_s = at_s if before is None else max(at_s, before.until_s)
    await objects.put(tombstone_key(model), Note(model=model, until_s=at_s).dumps())
    return at_s


async def tombstones(objects: Objects) -> Mapping[str, float]:
    """Return the time before which everything is expired, by model."""
    notes = [await read_note(objects, key) for key in await listing(objects, TOMBSTONES)]
    return {note.model: note.until_s for note in notes if note is not None}
