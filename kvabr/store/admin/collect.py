"""Collects the garbage of a bucket, next to publishers, players and other collectors, and after any crash.

What may go is found by one look at everything (`survey`), and deleted in batches. Before each batch, a sweep that names
it is written, and what may have changed since is looked at again; see `kvabr.store.objects.leases` for why that is
enough. The order:

1. Catalogs that are no roots any more (`kvabr.store.admin.rules`). A note of what they named keeps that for a grace.
2. Pointers to spans that no catalog, intent or such note names and that are older than the grace; then these spans;
   then offers that have no spans, and profiles.
3. Notes of processes that have ended.

Whatever is interrupted is found again by the next collector; nothing needs to be finished.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvabr.store.admin.rules import Eviction, Rules, evictions, total_bytes
from kvabr.store.admin.survey import (
    FIRST_BYTES,
    MAX_SMALL_BYTES,
    Manifest,
    ObjectFormat,
    Progress,
    Survey,
    check_size,
    pin_ends,
    protected,
    read_manifests,
    recently_evicted,
    survey,
)
from kvabr.store.objects.leases import (
    CATALOGS,
    COLLECTOR,
    DELETED_AT_ONCE,
    EVICTIONS,
    INTENTS,
    LEASES,
    OFFERS,
    PINS,
    PROBES,
    SWEEPS,
    TIMING,
    LeaseTiming,
    Note,
    Runtime,
    Sweep,
    is_young,
    listing,
    offer_note,
    store_time,
    sweeps,
)
from kvabr.store.objects.protocol import Objects
from kvabr.types.errors import FormatError, NotFoundError, UsageError


async def read_head(objects: Objects, layout: ObjectFormat, span: str) -> bytes | memoryview:
    """Return the head of a span; raise `NotFoundError` or `FormatError`."""
    data = await objects.get(span, 0, FIRST_BYTES, limit=FIRST_BYTES)
    size = layout.head_bytes(data)
    if size > len(data):
        data = await objects.get(span, 0, size, limit=MAX_SMALL_BYTES)
    return data[:size]


async def repoint(
    objects: Objects,
    layout: ObjectFormat,
    pointers: Mapping[str, str],
    *,
    now_s: float,
    timing: LeaseTiming,
    runtime: Runtime,
) -> set[str]:
    """Let pointers point to spans that stay; return those that do now.

    As a publisher does, this writes an intent first, so that no other collector removes these spans.

    Args:
        objects: The tenant's objects.
        layout: How to read and write them.
        pointers: The span that each is to point to, which has the pointer's group.
        now_s: The store's time.
        timing: How long notes are believed.
        runtime: The process's clock.
    """
    spans = sorted(set(pointers.values()))
    if not spans:
        return set()
    intent = f"{INTENTS}{secrets.token_hex(16)}"
    await objects.put(intent, Note(tuple(spans)).dumps())
    try:
        if await sweeps(objects, spans, now_s, timing):
            return set()

        async def write(span: str) -> list[str]:
            own = [pointer for pointer, to in pointers.items() if to == span]
            try:
                data = layout.pointer_to(span, await read_head(objects, layout, span))
            except (NotFoundError, FormatError):
                return []
            for pointer in own:
                await objects.put(pointer, data)
            return own

        return {pointer for done in await runtime.spread(map(write, spans)) for pointer in done}
    finally:
        await objects.delete([intent])


_NAMES_AT_ONCE = 20_000
_CATALOGS_AT_ONCE = 500
_SPANS_AT_ONCE = 250
"""With their pointers, about as many deletions as a store does in a second or two: publishers may wait for them."""


@dataclass(slots=True)
class Collected:
    """What a collector did, or would do."""

    evicted: list[Eviction] = field(default_factory=list)
    """Catalogs that went, and why."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Catalogs that stay although they are damaged, and what is wrong: see `kvabr store verify`."""
    kept: int = 0
    """Catalogs that stay."""
    pointers: int = 0
    spans: int = 0
    offers: int = 0
    """Kinds of assets of which there is none any more."""
    profiles: int = 0
    groups: int = 0
    """Single groups of caches that were deleted."""
    bytes: int = 0
    """Bytes of all objects that were deleted."""
    waiting: int = 0
    """Spans that nothing names, and that are younger than the grace, were named within it, or are of unknown offers."""
    excess: int = 0
    """Bytes by which the quota is still exceeded."""
    busy: int = 0
    """Catalogs and spans that were kept because they were used again during the collection."""
    swept: bool = True
    """False if no span may be deleted, because there are catalogs that cannot be read."""


class Collector:
    """One run over what a tenant has in a bucket."""

    def __init__(
        self,
        objects: Objects,
        layout: ObjectFormat,
        rules: Rules,
        *,
        timing: LeaseTiming = TIMING,
        runtime: Runtime | None = None,
        progress: Progress = lambda *_: None,
        dry_run: bool = False,
        cache_ttl_s: float = math.inf,
        take_over: bool = False,
        broken: AbstractSet[str] = frozenset(),
        bad_spans: AbstractSet[str] = frozenset(),
        bad_pointers: AbstractSet[str] = frozenset(),
    ) -> None:
        """Take what to collect; nothing is asked for yet.

        Args:
            objects: The tenant's objects.
            layout: How to read them.
            rules: What stays.
            timing: How long notes are believed.
            runtime: The process's clock, and how many requests are sent at once.
            progress: Hears how far it is.
            dry_run: Find out what would go, and delete nothing.
            cache_ttl_s: Seconds after which single groups that relays and clients cached go.
            take_over: Begin even if another collector seems to be at work.
            broken: Catalogs that go because they are damaged, pinned or not.
            bad_spans: Spans that go at once when no catalog names them.
            bad_pointers: Pointers that go.
        """
        self._objects, self._layout, self._rules = objects, layout, rules
        self._timing, self._runtime, self._progress = timing, runtime or Runtime(), progress
        self._dry_run, self._cache_ttl_s, self._take_over = dry_run, cache_ttl_s, take_over
        self._broken, self._bad_spans, self._bad_pointers = broken, bad_spans, bad_pointers
        self._done = Collected()
        self._began_s, self._store_s = 0.0, 0.0
        self._live, self._live_pointers = set[str](), dict[str, str | None]()
        """What catalogs that stay name, and the span that a pointer of theirs may point to."""

    async def run(self) -> Collected:
        """Collect; return what was done. Raises `UsageError` if another collector is at work."""
        await listing(self._objects, OFFERS)  # before anything is written: some stores make buckets that are missing
        self._began_s = self._runtime.now()
        self._store_s = await store_time(self._objects)
        if not self._dry_run:
            await self._claim()
        try:
            counts = self._rules.max_bytes is not None
            found = await survey(
                self._objects, self._layout, self._now(), self._runtime, self._progress, count_uses=counts
            )
            if found.unknown_expiry:
                raise FormatError(found.unknown_expiry)
            await self._evict(found)
            await self._sweep(found)
            await self._tidy(found)
        finally:
            if not self._dry_run:
                await self._objects.delete([COLLECTOR])
        return self._done

    def _now(self) -> float:
        """Return the store's time: what it was at the beginning, and what has passed since."""
        return self._store_s + self._runtime.now() - self._began_s

    async def _claim(self) -> None:
        """Take the collector's lease. It saves work; two collectors at once do no harm."""
        if await self._objects.put_new(COLLECTOR, Note().dumps()):
            return
        found = await self._objects.head(COLLECTOR)
        if found is not None and is_young(found.modified_s, self._now(), self._timing.sweep_s) and not self._take_over:
            left_s = self._timing.sweep_s - max(0.0, self._now() - found.modified_s)
            raise UsageError(
                f"another collector is at work here. If it was killed, try again in {math.ceil(left_s)} s, or run "
                "`kvabr store gc --take-over` now: two at once do no harm"
            )
        await self._objects.put(COLLECTOR, Note().dumps())

    @asynccontextmanager
    async def _sweeping(self, keys: Iterable[str]) -> AsyncIterator[Sweep]:
        """Have a sweep name ``keys``; yield what may delete some of them."""
        sweep, begin = f"{SWEEPS}{secrets.token_hex(16)}", self._runtime.now()
        await self._objects.put(COLLECTOR, Note().dumps())
        await self._objects.put(sweep, Note(tuple(keys)).dumps())
        yield Sweep(self._objects, self._runtime, begin + self._timing.deleting_s)
        # Not if anything failed: a request that was given up may still be carried out.
        await self._objects.delete([sweep])

    # ------------------------------------------------------- catalogs

    async def _evict(self, found: Survey) -> None:
        """Delete the catalogs that are no roots."""
        gone = evictions(
            [found.holding(catalog) for catalog in found.manifests], self._rules, self._now(), found.expired
        )
        gone += await self._lacking(found, {each.holding.name for each in gone})
        done = 0
        for batch in self._batches(gone, found):
            if self._dry_run:
                self._count_evicted(batch, found)
            else:
                await self._evict_some(batch, found)
            done += len(batch)
            self._progress("evicting", done, len(gone))
        self._done.kept = len(found.catalogs)
        if self._rules.max_bytes is not None:
            left = total_bytes(found.holding(catalog) for catalog in found.manifests)
            self._done.excess = max(0, left - self._rules.max_bytes)

    async def _lacking(self, found: Survey, known: set[str]) -> list[Eviction]:
        """Return the catalogs that lack a span and are not being repaired; pinned ones are only noted.

        With them come those that are known to be damaged.
        """
        self._done.damaged.update(found.unreadable | found.unknown_offers)
        self._done.swept = not found.unreadable
        broken = [
            Eviction(found.holding(catalog), "broken")
            for catalog in sorted(self._broken & found.manifests.keys())
            if catalog.removeprefix(CATALOGS) not in known
        ]
        known |= {each.holding.name for each in broken}
        lacking = {catalog: spans for catalog in found.manifests if (spans := found.missing(catalog))}
        if not lacking:
            return broken
        named = await protected(self._objects, self._now(), self._timing)
        for catalog, spans in lacking.items():
            holding = found.holding(catalog)
            if holding.name in known or catalog in named or await self._objects.head(spans[0]) is not None:
                continue
            if holding.is_pinned(self._now()):
                self._done.damaged[catalog] = f"{spans[0]} is missing"
            else:
                broken.append(Eviction(holding, "broken"))
        return broken

    def _batches(self, gone: Sequence[Eviction], found: Survey) -> Iterable[list[Eviction]]:
        """Cut evictions into batches that one note can name."""
        batch, names = list[Eviction](), 0
        for each in gone:
            more = len(found.manifests[f"{CATALOGS}{each.holding.name}"].spans) + 2
            if batch and (len(batch) == _CATALOGS_AT_ONCE or names + more > _NAMES_AT_ONCE):
                yield batch
                batch, names = [], 0
            batch.append(each)
            names += more
        if batch:
            yield batch

    async def _evict_some(self, batch: list[Eviction], found: Survey) -> None:
        wanted = {f"{CATALOGS}{each.holding.name}": each for each in batch}
        if self._rules.grace_s > 0:
            named = dict.fromkeys(
                span for key, each in wanted.items() if each.reason != "expired" for span in found.manifests[key].spans
            )
            besides = {name for key in wanted for name in found.manifests[key].besides}
            await self._objects.put(f"{EVICTIONS}{secrets.token_hex(16)}", Note((*named, *besides)).dumps())
        async with self._sweeping(wanted) as sweep:
            going = await self._still_unwanted(wanted, found)
            self._done.busy += len(wanted) - len(going)
            if await sweep.delete(list(going)):
                notes = [f"{LEASES}{each.holding.name}" for each in going.values()]
                notes += [pin for pin in found.pins if f"{CATALOGS}{pin.split('/')[1]}" in going]
                await sweep.delete(notes)
                self._count_evicted(list(going.values()), found)

    async def _still_unwanted(self, wanted: dict[str, Eviction], found: Survey) -> dict[str, Eviction]:
        """Return the evictions that nothing speaks against that was written since the survey."""
        named = await protected(self._objects, self._now(), self._timing)
        catalogs, leases = await listing(self._objects, CATALOGS), await listing(self._objects, LEASES)
        pins = await listing(self._objects, PINS)
        pinned = await pin_ends(self._objects, pins.keys() - found.pins.keys(), self._runtime)
        going = {}
        for key, each in wanted.items():
            lease, before = f"{LEASES}{each.holding.name}", found.leases.get(f"{LEASES}{each.holding.name}")
            used = lease in leases and (before is None or leases[lease].modified_s != before.modified_s)
            if key in named or key not in catalogs or catalogs[key].modified_s != found.catalogs[key].modified_s:
                continue
            if each.reason != "expired" and key not in self._broken and self._now() < pinned.get(key, -math.inf):
                continue
            if not (used and each.reason in ("unused", "over the quota")):
                going[key] = each
        return going

    def _count_evicted(self, batch: Sequence[Eviction], found: Survey) -> None:
        self._done.evicted += batch
        for each in batch:
            key = f"{CATALOGS}{each.holding.name}"
            self._done.bytes += found.catalogs.pop(key).size
            manifest = found.manifests.pop(key)
            if self._dry_run and each.reason != "expired" and self._rules.grace_s > 0:
                found.just_evicted.update(manifest.spans)

    # ------------------------------------------------------- spans

    async def _sweep(self, found: Survey) -> None:
        """Delete the spans that nothing names, with their pointers, and the profiles."""
        if not self._done.swept:
            return
        self._keep(found.manifests.values())
        named = await protected(self._objects, self._now(), self._timing)
        lately = await recently_evicted(self._objects, self._now(), self._rules.grace_s) | found.just_evicted
        doomed = []
        for span, info in found.spans.items():
            if span in self._live:
                continue
            waits = span in lately or is_young(info.modified_s, self._now(), self._rules.grace_s)
            if (
                span in named
                or found.is_unknown(span)
                or (waits and not found.is_stale(span) and span not in self._bad_spans)
            ):
                self._done.waiting += 1
            else:
                doomed.append(span)
        seen = {key: info.modified_s for key, info in found.catalogs.items()}
        for first in range(0, len(doomed), _SPANS_AT_ONCE):
            batch = doomed[first : first + _SPANS_AT_ONCE]
            if self._dry_run:
                self._count_swept(batch, found)
            elif not await self._sweep_some(batch, found, seen):
                return
            self._progress("sweeping", first + len(batch), len(doomed))
        await self._sweep_offers(found, named, seen)
        await self._sweep_profiles(found, named | lately, seen)

    async def _sweep_some(self, batch: list[str], found: Survey, seen: dict[str, float]) -> bool:
        heads = await self._runtime.spread(map(self._pointers_of, batch))
        pointers = dict(zip(batch, heads, strict=True))
        async with self._sweeping(batch) as sweep:
            named = await protected(self._objects, self._now(), self._timing)
            # Catalogs after intents: an intent goes when its catalog is there.
            if not await self._look_again(seen):
                return False
            doomed = [span for span in batch if span not in self._live and span not in named]
            self._done.busy += len(batch) - len(doomed)
            gone = await self._pointers_to(doomed, pointers, found)
            if await sweep.delete(gone) and await sweep.delete(doomed):
                self._done.pointers += len(found.pointers.keys() & set(gone))
                self._count_swept(doomed, found)
        return True

    def _keep(self, manifests: Iterable[Manifest]) -> None:
        """Note what catalogs that stay name."""
        for manifest in manifests:
            self._live.update(manifest.spans)
            size = manifest.span_groups
            for group, pointer in enumerate(manifest.pointers):
                named = size and (group + 1) % size != 0  # the last group of a full span has its name
                self._live_pointers[pointer] = manifest.spans[group // size] if named else None
            self._live.update(manifest.besides)

    async def _look_again(self, seen: dict[str, float]) -> bool:
        """Read the catalogs that were written since the survey; return False if one cannot be read."""
        now = await listing(self._objects, CATALOGS)
        fresh = {key: info for key, info in now.items() if seen.get(key) != info.modified_s}
        if fresh:
            manifests, bad = await read_manifests(self._objects, self._layout, fresh, self._runtime)
            self._keep(manifests.values())
            seen.update((key, now[key].modified_s) for key in manifests)
            self._done.damaged.update(bad)
            self._done.swept &= not bad
        return self._done.swept

    async def _pointers_of(self, span: str) -> tuple[str, ...]:
        """Return the names of a span's pointers; none if it is damaged."""
        try:
            return self._layout.pointers_of(span, await read_head(self._objects, self._layout, span))
        except (NotFoundError, FormatError):
            return ()

    async def _pointers_to(
        self, doomed: Sequence[str], pointers: dict[str, tuple[str, ...]], found: Survey
    ) -> list[str]:
        """Return the pointers that go with spans; those to groups that other spans have, too, point to these then."""
        gone = dict.fromkeys(pointer for span in doomed for pointer in pointers[span])
        shared = self._live_pointers.keys() & gone.keys()

        async def target(pointer: str) -> str | None:
            try:
                if pointer in found.pointers:
                    check_size(found.pointers[pointer], MAX_SMALL_BYTES)
                data = await self._objects.get(pointer, limit=MAX_SMALL_BYTES)
                return self._layout.target_of(pointer, data)
            except (NotFoundError, FormatError):
                return None

        places = sorted(shared)
        targets = await self._runtime.spread(map(target, places))
        alive = {each for each, to in zip(places, targets, strict=True) if to is not None and to not in pointers}
        stay = {each: span for each in shared - alive if (span := self._live_pointers[each]) is not None}
        alive |= await repoint(
            self._objects, self._layout, stay, now_s=self._now(), timing=self._timing, runtime=self._runtime
        )
        return [pointer for pointer in gone if pointer not in alive]

    def _count_swept(self, doomed: Sequence[str], found: Survey) -> None:
        self._done.spans += len(doomed)
        self._done.bytes += sum(found.spans.pop(span).size for span in doomed)

    async def _sweep_offers(self, found: Survey, named: set[str], seen: dict[str, float]) -> None:
        """Delete offers that have no spans. Each leaves a mark, for readers count offers until one is not there.

        The mark comes before its offer is deleted, so that a publisher that writes under the key of that offer sees it.
        """
        doomed = found.unused_offers(named, self._rules.grace_s)
        if doomed and not self._dry_run:
            async with self._sweeping([offer_note(found.offer_ids[key]) for key in doomed]) as sweep:
                named = await protected(self._objects, self._now(), self._timing)
                if not await self._look_again(seen):
                    return
                doomed = found.unused_offers(named | self._live, self._rules.grace_s)
                for key in doomed:
                    if not await self._mark_offer(sweep, key):
                        return
                if not await sweep.delete([key for key in doomed if key != self._layout.first_offer_key(key)]):
                    return
        self._done.offers += len(doomed)
        self._done.bytes += sum(found.offers[key].size for key in doomed)

    async def _mark_offer(self, sweep: Sweep, key: str) -> bool:
        """Tell readers where the next offer of a number comes; return whether there was time."""
        first = self._layout.first_offer_key(key)
        with contextlib.suppress(NotFoundError, FormatError):  # somebody removed it by hand
            now = await self._objects.get(first, limit=MAX_SMALL_BYTES)
            mark = self._layout.after_offer(key, now)
            if sweep.is_over:
                return False
            if mark is not None:
                await self._objects.put(*mark)
        return True

    async def _sweep_profiles(self, found: Survey, named: set[str], seen: dict[str, float]) -> None:
        offers = {span.split("/")[1] for span in found.spans}
        kept = named | self._live | {profile for offer, profile in found.profile_of.items() if offer in offers}
        doomed = [
            key
            for key, info in found.profiles.items()
            if not found.unknown_offers
            and key not in kept
            and not is_young(info.modified_s, self._now(), self._rules.grace_s)
        ]
        if not doomed:
            return
        if not self._dry_run:
            async with self._sweeping(doomed) as sweep:
                named = await protected(self._objects, self._now(), self._timing)
                if not await self._look_again(seen):
                    return
                doomed = [key for key in doomed if key not in named and key not in self._live]
                if not await sweep.delete(doomed):
                    return
        self._done.profiles += len(doomed)
        self._done.bytes += sum(found.profiles[key].size for key in doomed)

    # ------------------------------------------------------- notes

    async def _tidy(self, found: Survey) -> None:
        """Delete notes that mean nothing any more, and single groups that are old."""
        timing, now_s = self._timing, self._now()
        old = [key for key, info in found.groups.items() if not is_young(info.modified_s, now_s, self._cache_ttl_s)]
        self._done.groups += len(old)
        self._done.bytes += sum(found.groups[key].size for key in old)
        if self._dry_run:
            return
        lives_s = {INTENTS: timing.intent_s, PROBES: timing.intent_s, SWEEPS: 2 * timing.sweep_s}
        if self._done.swept:
            lives_s[EVICTIONS] = self._rules.grace_s
        old += self._bad_pointers
        for prefix, life_s in lives_s.items():
            notes = (await listing(self._objects, prefix)).values()
            old += [info.key for info in notes if not is_young(info.modified_s, now_s, life_s)]
        lease_s = max(self._rules.grace_s, timing.intent_s)
        old += [
            key
            for key, info in found.leases.items()
            if f"{CATALOGS}{key.removeprefix(LEASES)}" not in found.catalogs
            and not is_young(info.modified_s, now_s, lease_s)
        ]
        old += [key for key in found.pins if found.pin_ends_s.get(f"{CATALOGS}{key.split('/')[1]}", math.inf) < now_s]
        for first in range(0, len(old), DELETED_AT_ONCE):
            await self._objects.delete(old[first : first + DELETED_AT_ONCE])
            self._progress("tidying", min(first + DELETED_AT_ONCE, len(old)), len(old))
