"""Checks what a bucket holds: each catalog's spans are there, and are what it says; on demand also every frame."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvabr.store.admin.protocol import Damage, Progress
from kvabr.store.admin.survey import FIRST_BYTES, MAX_SMALL_BYTES, Survey, check_size, spread
from kvabr.store.objects.layout import (
    CATALOGS,
    MAX_STORED_CATALOG_BYTES,
    StoredCatalog,
    profile_key,
    span_key,
)
from kvabr.store.objects.protocol import Objects
from kvabr.store.objects.spans import SpanHead, head_bytes, parse_head, parse_pointer
from kvabr.types.catalog import MAX_PROFILE_BYTES, Catalog
from kvabr.types.digests import has_digest
from kvabr.types.errors import FormatError, NotFoundError, VersionError

_PIECE_BYTES = 4 << 20
"""Bytes of frames that are read at once: a span may have hundreds of megabytes, and many are checked at once."""
_UNREAD = "upgrade kvabr if a newer version publishes here; otherwise remove the object"


@dataclass(slots=True)
class BucketCheck:
    """A check of all catalogs of a survey, and what it found. Spans that no catalog names are not looked at."""

    bucket: Objects
    found: Survey
    progress: Progress
    deep: bool = False
    """Whether to read all frames and pointers."""
    damages: list[Damage] = field(default_factory=list)
    catalogs: set[str] = field(default_factory=set)
    """Catalogs that should go."""
    spans: set[str] = field(default_factory=set)
    """Spans that are damaged in themselves: no publisher may adopt them."""
    pointers: set[str] = field(default_factory=set)
    """Pointers to what is not there."""
    _heads: dict[str, SpanHead] = field(default_factory=dict)
    _wrong: dict[str, str] = field(default_factory=dict)
    _unknown: dict[str, str] = field(default_factory=dict)
    """Spans of another version of kvabr."""

    async def run(self) -> None:
        """Check; the fields tell what is wrong."""
        found = self.found
        self.damages += [Damage(key.removeprefix(CATALOGS), what, _UNREAD) for key, what in found.unreadable.items()]
        self.damages += [Damage(key, what, _UNREAD) for key, what in found.unknown_offers.items()]
        named = sorted({span for manifest in found.manifests.values() for span in manifest.spans})
        await spread(self._look(span, len(named)) for span in named)
        await spread(map(self._compare, sorted(found.manifests)))
        if self.deep:
            await spread(map(self._point, sorted(found.pointers)))

    async def _look(self, span: str, total: int) -> None:
        try:
            self._heads[span] = await _checked_span(self.bucket, span, deep=self.deep)
        except NotFoundError:
            self._wrong[span] = f"{span} is missing"
        except VersionError as error:
            self._unknown[span] = f"{span}: {error}"
        except FormatError as error:
            self._wrong[span] = f"{span}: {error}"
            self.spans.add(span)
        self.progress("spans", len(self._heads) + len(self._wrong) + len(self._unknown), total)

    async def _compare(self, key: str) -> None:
        unknown = [self._unknown[span] for span in self.found.manifests[key].spans if span in self._unknown]
        if unknown:
            self.damages.append(Damage(key.removeprefix(CATALOGS), unknown[0], _UNREAD))
            return
        try:
            await _check_catalog(self.bucket, key, self._heads, self._wrong)
        except NotFoundError:
            return  # was removed meanwhile, or is new
        except VersionError as error:
            self.damages.append(Damage(key.removeprefix(CATALOGS), str(error), _UNREAD))
        except FormatError as error:
            self.catalogs.add(key)
            self.damages.append(Damage(key.removeprefix(CATALOGS), str(error)))

    async def _point(self, key: str) -> None:
        try:
            check_size(self.found.pointers[key], MAX_SMALL_BYTES)
            name, _ = parse_pointer(await self.bucket.get(key, limit=MAX_SMALL_BYTES))
            target = span_key(key.split("/")[1], name)
            what = None if target in self.found.spans else f"points to {target}, which is missing"
        except NotFoundError:
            return
        except VersionError as error:
            self.damages.append(Damage(key, str(error), _UNREAD))
            return
        except FormatError as error:
            what = str(error)
        if what is not None:
            self.pointers.add(key)
            self.damages.append(Damage(key, what))


async def _checked_span(bucket: Objects, key: str, *, deep: bool) -> SpanHead:
    """Return the head of a span; raise `FormatError` if something is wrong with it."""
    first = await bucket.get(key, 0, FIRST_BYTES, limit=FIRST_BYTES)
    size = head_bytes(first)
    head = parse_head(first if size <= len(first) else await bucket.get(key, 0, size, limit=MAX_SMALL_BYTES))
    info = await bucket.head(key)
    if info is None:
        raise NotFoundError(key)
    if info.size != head.total:
        raise FormatError(f"has {info.size} bytes, its head says {head.total}")
    if not key.rpartition("/")[2].startswith(head.digests[-1][:16]):
        raise FormatError("is that of another prompt")
    if deep:
        for begin, end, frames in _pieces(head):
            piece = await bucket.get(key, begin, end, limit=end - begin)
            for at, until, digest, what in frames:
                if not has_digest(digest, piece[at - begin : until - begin]):
                    raise FormatError(f"{what} is damaged (its digest differs)")
    return head


def _pieces(head: SpanHead) -> Iterator[tuple[int, int, list[tuple[int, int, str, str]]]]:
    """Yield runs of frames of at most `_PIECE_BYTES`, or one: begin, end, and of each frame also digest and name."""
    run: list[tuple[int, int, str, str]] = []
    for track in head.tracks:
        for place, digest in enumerate(track.digests):
            begin, end = head.place(track.name, track.first + place)
            if run and end - run[0][0] > _PIECE_BYTES:
                yield run[0][0], run[-1][1], run
                run = []
            run.append((begin, end, digest, f"group {track.first + place} of {track.name}"))
    yield run[0][0], run[-1][1], run


async def _check_catalog(bucket: Objects, key: str, heads: dict[str, SpanHead], wrong: dict[str, str]) -> None:
    stored = StoredCatalog.loads(await bucket.get(key, limit=MAX_STORED_CATALOG_BYTES))
    catalog = stored.parsed()
    if catalog.namespace.prompt != key.removeprefix(CATALOGS):
        raise FormatError("is the catalog of another prompt")
    chunks: list[str] = []
    for number, span in enumerate(stored.keys):
        if span in wrong:
            raise FormatError(wrong[span])
        if span not in heads:
            raise NotFoundError(span)  # a new catalog
        _compare(catalog, span, heads[span], number * stored.span_groups)
        chunks += heads[span].digests
    if tuple(chunks) != tuple(catalog.chunks):
        raise FormatError("its spans have other groups than it says")
    if catalog.profile is not None:
        place = profile_key(catalog.profile)
        try:
            data = await bucket.get(place, limit=MAX_PROFILE_BYTES)
        except NotFoundError:
            raise FormatError(f"its profile {place} is missing") from None
        if hashlib.sha256(data).hexdigest() != catalog.profile:
            raise FormatError(f"its profile {place} is damaged")


def _compare(catalog: Catalog, span: str, head: SpanHead, first: int) -> None:
    """Raise `FormatError` if a span is not what the catalog says."""
    if head.first != first:
        raise FormatError(f"{span}: begins at group {head.first}, not {first}")
    for track in head.tracks:
        listed = catalog.published_track(track.name)
        end = track.first + len(track.bytes)
        same = tuple(track.bytes) == tuple(listed.bytes[track.first : end])
        if not same or tuple(track.digests) != tuple(listed.digests[track.first : end]):
            raise FormatError(f"{span}: has other frames of {track.name} than the catalog says")
