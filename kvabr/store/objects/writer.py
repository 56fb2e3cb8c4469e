"""Publishes an asset into an object store: spans first, the catalog last, and nothing that is there is written again.

Of several publishers of one object, the first wins, and the others list what it wrote: its digests, sizes and losses.
So every catalog's digests are those of the stored bytes, no matter who wrote them. A publisher that ends before its
catalog is written leaves spans that nothing names, until a lifecycle rule of the bucket or `kvabr store rm` removes
them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedRandom
from typing import Self

from kvabr.store.asset import Prompt
from kvabr.store.objects.blocking import each
from kvabr.store.objects.layout import (
    MAX_OFFERS,
    StoredCatalog,
    StoreOffer,
    catalog_key,
    offer_key,
    pointer_key,
    profile_key,
    span_key,
    span_names,
)
from kvabr.store.objects.protocol import Objects
from kvabr.store.objects.reading import as_asset_errors, read_head, read_offers
from kvabr.store.objects.spans import (
    SpanHead,
    check_span,
    encode_pointer,
    encode_span,
    head_bytes,
    head_of,
    listing,
    parse_head,
    pointed,
    units_by_span,
)
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, FormatError, NotFoundError, UsageError
from kvabr.types.units import Unit

_SPANS_AT_ONCE = 2
"""Spans that are written at a time; each is in memory until then."""
_SMALL_AT_ONCE = 8
_ROUNDS = 5
_OFFER_ROUNDS = 50
"""Attempts to find or write a span while others write it."""
_PAUSE_S = 0.05


@dataclass(slots=True)
class _Span:
    """A span of the asset: what it is made of, and what is in the store."""

    number: int
    key: str
    units: Sequence[tuple[int, Unit]]
    head: SpanHead | None = None
    packed: bytes = b""
    """The object up to its first frame."""
    reused: bool = False


class ObjectAssetWriter:
    """An `AssetWriter`. Frames lie in a temporary file until `commit` sends them."""

    def __init__(self, bucket: Objects, prompt: str | None, *, force: bool = False) -> None:
        """Prepare to write the asset of a prompt digest, None: of the one that the catalog has."""
        self._bucket, self._prompt, self._force = bucket, prompt, force
        self._file: BufferedRandom | None = None
        self._frames: dict[tuple[str, int], tuple[int, int]] = {}
        """Begin and end in the file, by track and group."""
        self._profile = b""
        self.reused = 0
        """Spans that were there already."""
        self.published = False
        """Whether it is this writer's catalog that is in the store; another's may have been first."""

    @property
    def location(self) -> str:
        return self._bucket.url if self._prompt is None else self._bucket.where.below(self._prompt)

    def __enter__(self) -> Self:
        try:
            self._file = tempfile.TemporaryFile(prefix="kvabr-")
        except OSError as error:
            raise AssetError(f"{tempfile.gettempdir()}: no temporary file can be made ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def frame(self, group: int, track: str, frame: bytes) -> None:
        file = self._opened()
        try:
            begin = file.seek(0, os.SEEK_END)
            file.write(frame)
            file.flush()
        except OSError as error:
            raise AssetError(
                f"{tempfile.gettempdir()}: no room for the asset until it is sent ({error.strerror}); set TMPDIR to a "
                "larger disk"
            ) from error
        self._frames[track, group] = begin, begin + len(frame)

    def read_frame(self, group: int, track: str) -> bytes:
        begin, end = self._frames[track, group]
        return os.pread(self._opened().fileno(), end - begin, begin)

    def profile(self, data: bytes) -> None:
        self._profile = data

    def prompt(self, prompt: Prompt) -> None:
        """Keep nothing: token ids stay out of stores that many read, so `replay --verify` needs a folder."""

    def commit(self, catalog: Catalog) -> None:
        """See `AssetWriter.commit`. If another publisher's catalog of this prompt is there by now, it stays."""
        self._opened()
        prompt = catalog.namespace.prompt
        if self._prompt not in (None, prompt):
            raise UsageError(f"this is the writer of {self._prompt}, not of {prompt}")
        try:
            with as_asset_errors():
                self._commit(catalog, prompt)
        except FormatError as error:
            raise AssetError(f"{error}; what another publisher left there cannot be used, remove it") from error

    def _commit(self, catalog: Catalog, prompt: str) -> None:
        bucket, offer = self._bucket, StoreOffer.of(catalog)
        expected, self._prompt = self._prompt, prompt
        if expected is None and not self._force and bucket.head_sync(catalog_key(prompt)) is not None:
            raise UsageError(f"{bucket.where.below(prompt)}: this asset exists; add --force to replace it")
        profile = None if catalog.profile is None else profile_key(catalog.profile)
        if profile is not None and hashlib.sha256(self._profile).hexdigest() != catalog.profile:
            raise UsageError("the profile that was written is not the one that the catalog names")
        names = span_names(catalog.spec, catalog.chunks, offer.span_groups)
        spans = [
            _Span(number, span_key(offer.id, names[number]), units)
            for number, units in enumerate(units_by_span(catalog, offer.span_groups))
        ]
        if profile is not None and bucket.head_sync(profile) is None:
            bucket.put_new_sync(profile, self._profile)
        self._put_offer(offer)
        each(_SPANS_AT_ONCE, lambda span: self._put_span(catalog, offer, span), spans)
        self.reused = sum(span.reused for span in spans)
        self._put_pointers(offer, spans, names)
        stored = self._stored(catalog, offer, spans, names)
        if self._force:
            bucket.put_sync(catalog_key(prompt), stored)
            self.published = True
        else:
            self.published = bucket.put_new_sync(catalog_key(prompt), stored)

    def _put_offer(self, offer: StoreOffer) -> None:
        """Write the offer under the first key that is free, unless it has one."""
        for attempt in range(_OFFER_ROUNDS):
            known = [found for _, found in read_offers(self._bucket)]
            if any(isinstance(found, StoreOffer) and found.id == offer.id for found in known):
                return
            if len(known) == MAX_OFFERS:
                raise AssetError(
                    f"{self._bucket.url}: has {MAX_OFFERS} kinds of assets, and no room for another. Each profile, "
                    "model and set of tracks is one: encode with one profile for all assets of a model (--profile), "
                    "or use another prefix or tenant"
                )
            if self._bucket.put_new_sync(offer_key(len(known)), offer.dumps()):
                return
            # Some stores refuse all writers but one before that one's object is there.
            time.sleep(_PAUSE_S * min(attempt, _ROUNDS))
        raise AssetError(f"{self._bucket.url}: too many publish other kinds of assets at the same time; try again")

    def _put_span(self, catalog: Catalog, offer: StoreOffer, span: _Span) -> None:
        """Write a span, or take the one that is there."""
        digests = catalog.chunks[span.number * offer.span_groups :][: offer.span_groups]
        for attempt in range(_ROUNDS):
            try:
                found, packed = read_head(self._bucket, span.key)
            except NotFoundError:
                head = head_of(catalog, span.number, span.units, offer.span_groups)
                frames = [
                    self.read_frame(track.first + place, track.name)
                    for track in head.tracks
                    for place in range(len(track.bytes))
                ]
                data = encode_span(head, frames)
                if self._bucket.put_new_sync(span.key, data):
                    span.packed = data[: head_bytes(data)]
                    span.head, span.reused = parse_head(span.packed), False
                    return
                # Somebody else was quicker, or is about to be: some stores refuse all but one before that one is there.
                time.sleep(_PAUSE_S * attempt)
            else:
                check_span(found, offer, digests)
                if found.position != catalog.position:
                    raise FormatError(f"{self._bucket.below(span.key)}: is of another place in a prompt")
                span.head, span.packed, span.reused = found, packed, True
                return
        raise AssetError(f"{self._bucket.below(span.key)}: is refused as being there, and is not there; try again")

    def _put_pointers(self, offer: StoreOffer, spans: Sequence[_Span], names: Sequence[str]) -> None:
        """Write the pointers into new spans, and those into others that a publisher may have left out when it died."""
        wanted = [
            (pointer_key(offer.id, digest), names[span.number], span)
            for span in spans
            if span.head is not None
            for digest in pointed(span.head, offer.span_groups)
        ]
        each(
            _SMALL_AT_ONCE,
            lambda one: self._bucket.put_new_sync(one[0], encode_pointer(one[1], one[2].packed)),
            wanted,
        )

    def _stored(self, catalog: Catalog, offer: StoreOffer, spans: Sequence[_Span], names: Sequence[str]) -> bytes:
        """Return the catalog's object, with what is in the store."""
        heads = [span.head for span in spans if span.head is not None]
        listed = listing(catalog, heads)
        begins = tuple(head.begin for head in heads)
        return StoredCatalog(offer.id, tuple(names), begins, offer.span_groups, listed.dumps().encode()).dumps()

    def _opened(self) -> BufferedRandom:
        if self._file is None:
            raise UsageError("an asset is written inside its writer's with statement")
        return self._file
