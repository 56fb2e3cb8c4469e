"""What a bucket holds, at one look: listings, and what each catalog names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvabr.store.admin.rules import Holding
from kvabr.store.eviction import Part
from kvabr.store.objects.layout import MAX_STORED_CATALOG_BYTES
from kvabr.store.objects.leases import (
    CATALOGS,
    EVICTIONS,
    GROUPS,
    INTENTS,
    LEASES,
    OFFERS,
    PINS,
    POINTERS,
    PROFILES,
    SPANS,
    LeaseTiming,
    Note,
    Runtime,
    is_young,
    listing,
    read_note,
    tombstones,
)
from kvabr.store.objects.protocol import Objects, StoredObject
from kvabr.types.errors import FormatError, NotFoundError

FIRST_BYTES = 16 << 10
"""What is read first of a span; its head as a rule."""
MAX_SMALL_BYTES = (1 << 20) + (1 << 16)
"""Bound on the heads of spans, pointers and offers."""
Progress = Callable[[str, int, int], object]
"""Hears of a stage: its name, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a catalog of a bucket names."""

    model: str
    tokens: int
    spans: tuple[str, ...]
    """Names of its spans, in the order of the prompt."""
    profile: str | None = None
    """Name of its profile."""
    pointers: tuple[str, ...] = ()
    """Names that the pointers of its groups have, where there are such."""
    tracks: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each track."""
    span_tokens: int = 0
    """Tokens of a span, the last one may have fewer."""
    span_groups: int = 0
    """Groups of a span, the last one may have fewer."""
    measured: bool = False

    @property
    def besides(self) -> tuple[str, ...]:
        """What it names besides its spans."""
        return tuple(filter(None, (self.profile,)))


class ObjectFormat(Protocol):
    """How to read the objects of a bucket. All methods raise `FormatError` for damaged bytes."""

    def manifest(self, key: str, data: bytes | memoryview) -> Manifest:
        """Return what a catalog names."""

    def head_bytes(self, data: bytes | memoryview) -> int:
        """Return how many bytes the head of a span takes, from the first `FIRST_BYTES` of the span."""

    def pointers_of(self, key: str, head: bytes | memoryview) -> tuple[str, ...]:
        """Return the names that the pointers to the groups of a span have, from the first bytes of the span."""

    def pointer_to(self, span: str, head: bytes | memoryview) -> bytes:
        """Return what pointers to a span hold, given its head."""

    def target_of(self, key: str, data: bytes | memoryview) -> str:
        """Return the name of the span that a pointer points to."""

    def offer(self, data: bytes | memoryview) -> tuple[str, str, str | None] | None:
        """Return an offer's ID, which is part of the names of its spans, its model, and the name of its profile.

        None: an offer was here that has been collected.
        """

    def after_offer(self, key: str, first: bytes | memoryview) -> tuple[str, bytes] | None:
        """Return what to write in place of an offer that goes, and under which key.

        ``first`` is what the first key of its number holds now (`first_offer_key`). None: nothing, another collector
        has been here.
        """

    def first_offer_key(self, key: str) -> str:
        """Return the key by which readers look for an offer, which may tell them another one.

        Raises `FormatError` if this is no key of an offer.
        """


@dataclass(slots=True)
class Survey:
    """What a bucket holds for one tenant."""

    now_s: float
    """The store's time."""
    catalogs: dict[str, StoredObject] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """By the catalog's name."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Catalogs that are damaged, and how."""
    leases: dict[str, StoredObject] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    """By lease, where they were counted."""
    pins: dict[str, StoredObject] = field(default_factory=dict)
    pin_ends_s: dict[str, float] = field(default_factory=dict)
    """By the catalog's name."""
    expired: Mapping[str, float] = field(default_factory=dict)
    """By model, the time before which everything is expired."""
    unknown_expiry: str = ""
    """What is wrong with a tombstone that cannot be read: then nothing may be removed."""
    offers: dict[str, StoredObject] = field(default_factory=dict)
    offer_ids: dict[str, str] = field(default_factory=dict)
    """By an offer's key."""
    models: dict[str, str] = field(default_factory=dict)
    """By offer ID."""
    profile_of: dict[str, str] = field(default_factory=dict)
    """Names of profiles by offer ID."""
    unknown_offers: dict[str, str] = field(default_factory=dict)
    """Offers that cannot be read, and why: their spans and profiles cannot be told from others'."""
    spans: dict[str, StoredObject] = field(default_factory=dict)
    pointers: dict[str, StoredObject] = field(default_factory=dict)
    profiles: dict[str, StoredObject] = field(default_factory=dict)
    groups: dict[str, StoredObject] = field(default_factory=dict)
    """Single groups that relays and clients cached."""
    just_evicted: set[str] = field(default_factory=set)
    """Spans that would be kept for a grace if this were no dry run."""

    def missing(self, catalog: str) -> list[str]:
        """Return the spans that a catalog names and that were not there."""
        return [span for span in self.manifests[catalog].spans if span not in self.spans]

    def model_of_span(self, span: str) -> str:
        """Return the model of a span; an empty string if its offer is not known."""
        return self.models.get(span.split("/")[1], "")

    def unused_offers(self, named: Iterable[str], grace_s: float) -> list[str]:
        """Return the keys of offers that are older than the grace and have no span, neither there nor ``named``."""
        used = {key.split("/")[1] for key in (*self.spans, *named) if key.startswith((SPANS, OFFERS))}
        return [
            key
            for key, offer in self.offer_ids.items()
            if offer not in used and not is_young(self.offers[key].modified_s, self.now_s, grace_s)
        ]

    def is_unknown(self, span: str) -> bool:
        """Return whether a span may be of an offer that cannot be read."""
        return bool(self.unknown_offers) and span.split("/")[1] not in self.models

    def is_stale(self, span: str) -> bool:
        """Return whether a span is older than its model's expiry."""
        return self.spans[span].modified_s < self.expired.get(self.model_of_span(span), -math.inf)

    def holding(self, catalog: str) -> Holding:
        """Return what managing needs to know of a catalog that could be read."""
        found, manifest, digest = self.catalogs[catalog], self.manifests[catalog], catalog.removeprefix(CATALOGS)
        lease = self.leases.get(f"{LEASES}{digest}")
        parts, before = [], 0
        for span in manifest.spans:
            tokens = min(manifest.span_tokens, manifest.tokens - before)
            size = self.spans[span].size if span in self.spans else 0
            parts.append(Part(span, size, tokens))
            before += tokens
        written_s = [self.spans[span].modified_s for span in manifest.spans if span in self.spans]
        return Holding(
            name=digest,
            model=manifest.model,
            tokens=manifest.tokens,
            created_s=found.modified_s,
            used_s=found.modified_s if lease is None else max(lease.modified_s, found.modified_s),
            bytes=found.size + sum(part.bytes for part in parts),
            own_bytes=found.size,
            uses=self.uses.get(f"{LEASES}{digest}", 0),
            pinned_until_s=self.pin_ends_s.get(catalog),
            measured=manifest.measured,
            parts=tuple(parts),
            tracks=manifest.tracks,
            oldest_s=min(written_s, default=math.inf),
        )


def check_size(info: StoredObject, limit: int) -> None:
    """Raise `FormatError` if an object is larger than one of its kind can be."""
    if info.size > limit:
        raise FormatError(f"{info.size:,} bytes, more than the {limit:,} that this may have")


async def read_manifests(
    objects: Objects,
    layout: ObjectFormat,
    catalogs: Mapping[str, StoredObject],
    runtime: Runtime,
    progress: Progress = lambda *_: None,
) -> tuple[dict[str, Manifest], dict[str, str]]:
    """Return what catalogs name, and what is wrong with those that are damaged; those that are gone are left out."""
    found, bad = dict[str, Manifest](), dict[str, str]()

    async def read(key: str) -> None:
        try:
            check_size(catalogs[key], MAX_STORED_CATALOG_BYTES)
            found[key] = layout.manifest(key, await objects.get(key, limit=MAX_STORED_CATALOG_BYTES))
        except NotFoundError:
            pass
        except FormatError as error:
            bad[key] = str(error)
        progress("catalogs", len(found) + len(bad), len(catalogs))

    await runtime.spread(map(read, catalogs))
    return found, bad


async def survey(
    objects: Objects,
    layout: ObjectFormat,
    now_s: float,
    runtime: Runtime,
    progress: Progress = lambda *_: None,
    *,
    count_uses: bool = False,
) -> Survey:
    """Look at everything that a tenant has; ``count_uses`` also reads each lease.

    Catalogs come first: what they name was written before them, so it is in the later listings unless it was deleted.
    """
    found = Survey(now_s)
    found.catalogs = await listing(objects, CATALOGS)
    found.manifests, found.unreadable = await read_manifests(objects, layout, found.catalogs, runtime, progress)
    found.leases, found.pins = await listing(objects, LEASES), await listing(objects, PINS)
    found.pin_ends_s = await pin_ends(objects, found.pins, runtime)
    try:
        found.expired = await tombstones(objects)
    except FormatError as error:
        found.unknown_expiry = str(error)
    await _read_offers(found, objects, layout)
    if count_uses:

        async def read(key: str) -> None:
            with contextlib.suppress(FormatError):  # then it counts as unused: a publisher's next use mends it
                note = await read_note(objects, key)
                found.uses[key] = 0 if note is None else note.uses

        await runtime.spread(map(read, found.leases))
    for number, prefix in enumerate((SPANS, POINTERS, PROFILES, GROUPS)):
        progress("listing", number, 4)
        listed = await listing(objects, prefix)
        if prefix == SPANS:
            found.spans = listed
        elif prefix == POINTERS:
            found.pointers = listed
        elif prefix == PROFILES:
            found.profiles = listed
        else:
            found.groups = listed
    progress("listing", 4, 4)
    return found


async def _read_offers(found: Survey, objects: Objects, layout: ObjectFormat) -> None:
    found.offers = await listing(objects, OFFERS)
    for key, info in found.offers.items():
        try:
            check_size(info, MAX_SMALL_BYTES)
            layout.first_offer_key(key)
            known = layout.offer(await objects.get(key, limit=MAX_SMALL_BYTES))
        except NotFoundError:
            continue
        except FormatError as error:
            found.unknown_offers[key] = str(error)
            continue
        if known is None:
            continue
        offer, model, profile = known
        found.offer_ids[key] = offer
        found.models[offer] = model
        if profile is not None:
            found.profile_of[offer] = profile


async def pin_ends(objects: Objects, pins: Iterable[str], runtime: Runtime) -> dict[str, float]:
    """Return when the last pin of each asset ends, by the name of the catalog.

    A damaged pin never ends, so that nothing is lost by it.
    """
    ends = dict[str, float]()

    async def read(key: str) -> None:
        try:
            note = await read_note(objects, key)
        except FormatError:
            note = Note(until_s=math.inf)
        if note is not None:
            catalog = f"{CATALOGS}{key.split('/')[1]}"
            ends[catalog] = max(note.until_s, ends.get(catalog, -math.inf))

    await runtime.spread(map(read, pins))
    return ends


async def protected(objects: Objects, now_s: float, timing: LeaseTiming) -> set[str]:
    """Return the names of everything that publishers are about to name."""
    return await _named_in(objects, INTENTS, now_s, timing.intent_s)


async def recently_evicted(objects: Objects, now_s: float, grace_s: float) -> set[str]:
    """Return the names of everything that catalogs named which were evicted within the grace."""
    return await _named_in(objects, EVICTIONS, now_s, grace_s)


async def _named_in(objects: Objects, prefix: str, now_s: float, seconds: float) -> set[str]:
    named = set[str]()
    for found in (await listing(objects, prefix)).values():
        if is_young(found.modified_s, now_s, seconds):
            note = await read_note(objects, found.key)
            named.update(() if note is None else note.keys)
    return named
