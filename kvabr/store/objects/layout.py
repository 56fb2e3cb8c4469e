"""What objects are called and what is in them: names, spans, pointers, offers, and catalogs as they are stored.

Under ``PREFIX/v1/TENANT/`` of a bucket:

    o/<n>                offer n = 0, 1, 2 ...: a spec and its tracks; readers count them from 0 without a gap
    s/<offer>/<name>     span: up to `SPAN_GROUPS` groups of tokens on all tracks
    i/<offer>/<key>      pointer: which span a group is in; not of the last group of a full span, which has its name
    a/<prompt digest>    catalog, written last
    p/<sha256>           codec profile
    g/<xx>/<digest>      single group of a relay's or client's cache
    probe/<random>       left behind by `Bucket.probe_sync` where a publisher may not delete

These are created once and never change, except that a user may replace a catalog. A lifecycle rule of the bucket may
remove all but offers and profiles at any time.
Everything here is bytes from an untrusted source: all sizes are bounded and all fields checked, and `FormatError` says
what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct

from kvabr.types.catalog import (
    MAX_CATALOG_BYTES,
    MAX_GROUPS,
    MAX_TRACKS,
    Catalog,
    CommonFacts,
    Level,
    check_tracks,
    level_of,
)
from kvabr.types.digests import KINDS, SHA256
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LOOKUP_RUN
from kvabr.types.records import check, decode, fields_of, read, read_schema, to_json

SPAN_GROUPS = LOOKUP_RUN
"""Groups of tokens in a span."""
MAX_SPAN_BYTES = 5 << 30
"""What S3 takes in one request."""
MAX_OFFER_BYTES = 1 << 20
MAX_OFFERS = 256
MAX_STORED_CATALOG_BYTES = MAX_CATALOG_BYTES + (8 << 20)
_MAX_FRONT_BYTES = 8 << 20
MAX_SPAN_GROUPS = 256

OFFER_SCHEMA = "kvabr.offer/1"
CATALOG_SCHEMA = "kvabr.stored-catalog/1"

SPAN_NAME = r"[0-9a-f]{16}(\.end)?"
"""Pattern of a span's name."""
_OFFER_KEY = re.compile(r"o/(?:0|[1-9][0-9]{0,2})")
_ORDER = "id", "span_groups", "digest", "spec", "tracks", "profile", "profile_bytes", "prefill", "loss_method"
"""Fields of an offer in the order in which they are written; others come before them."""


# ------------------------------------------------------- names


CATALOGS, SPANS, POINTERS, PROFILES, OFFERS, GROUPS = "a/", "s/", "i/", "p/", "o/", "g/"
PROBES = "probe/"


def offer_key(number: int) -> str:
    """Return the key of an offer."""
    return f"o/{number}"


def check_offer_key(key: str) -> None:
    """Raise `FormatError` unless this is the key of an offer."""
    if _OFFER_KEY.fullmatch(key) is None:
        raise FormatError(f"{key[:40]!r} is not the name of an offer")


def span_name(digest: str, *, end: bool = False) -> str:
    """Return the name of the span whose last group has this chained digest.

    ``end``: it is the last one of an asset with recurrent states, and has the snapshot at the asset's end.
    """
    return digest[:16] + (".end" if end else "")


def span_key(offer: str, name: str) -> str:
    """Return the key of a span."""
    return f"s/{offer}/{name}"


def pointer_key(offer: str, digest: str) -> str:
    """Return the key of the pointer of the group with this chained digest."""
    return f"i/{offer}/{digest[:16]}"


def catalog_key(prompt: str) -> str:
    """Return the key of the catalog of a prompt."""
    return f"a/{prompt}"


def profile_key(sha256: str) -> str:
    """Return the key of a codec profile."""
    return f"p/{sha256}"


def group_key(digest: str) -> str:
    """Return the key of a single group with this digest, of any kind."""
    return f"g/{digest[-64:][:2]}/{digest}"


def has_states(spec: KVSpec) -> bool:
    """Return whether spans at the end of an asset have a name of their own."""
    return any(each.kind == "state" for each in spec.classes)


def span_names(spec: KVSpec, chunks: Sequence[str], span_groups: int = SPAN_GROUPS) -> list[str]:
    """Return the names of the spans of an asset with these chained digests."""
    lasts = [min(first + span_groups, len(chunks)) - 1 for first in range(0, len(chunks), span_groups)]
    return [span_name(chunks[last], end=has_states(spec) and last == len(chunks) - 1) for last in lasts]


# ------------------------------------------------------- offers


@dataclass(frozen=True)
class StoreOffer(CommonFacts):
    """What all spans of one folder ``s/<id>`` have in common: a spec, the tracks, and what else their assets share."""

    spec: KVSpec
    tracks: Annotated[tuple[Level, ...], Meta(min_length=1, max_length=MAX_TRACKS)]
    """Levels, each after the one that it refines; base first."""
    span_groups: Annotated[int, Meta(ge=1, le=MAX_SPAN_GROUPS)] = SPAN_GROUPS
    digest: str = SHA256
    """Kind of the frames' digests."""

    def __post_init__(self) -> None:
        check(self, "offer")
        check_tracks(self.tracks, "offer")
        if self.digest not in KINDS:
            raise FormatError(
                f"offer: digests of kind {self.digest[:40]!r}, which this version does not know; upgrade kvabr"
            )

    @classmethod
    def of(cls, catalog: Catalog) -> StoreOffer:
        """Return the offer of an asset."""
        tracks = tuple(map(level_of, catalog.tracks))
        return cls(catalog.spec, tracks, digest=catalog.digest_kind, **fields_of(catalog, CommonFacts))

    @cached_property
    def id(self) -> str:
        """16 hex digits that stand for all that decides the bytes of frames."""
        decides = [
            self.spec.digest().hex(),
            [[track.name, track.refines] for track in self.tracks],
            self.profile,
            self.span_groups,
            self.digest,
        ]
        return hashlib.sha256(b"kvabr.offer/1\0" + json.dumps(decides).encode()).hexdigest()[:16]

    @cached_property
    def published(self) -> tuple[str, ...]:
        """Names of the tracks as published, one per level and class, in the order in which spans have them."""
        return tuple(part.track_name(track.name) for track in self.tracks for part in self.spec.parts)

    def dumps(self) -> bytes:
        """Return the offer as an object."""
        always = ("span_groups", "digest", "profile", "profile_bytes", "prefill", "loss_method")
        value = {"schema": OFFER_SCHEMA, **to_json(self, *always, last=_ORDER)}
        return json.dumps({**value, "id": self.id}, indent=1).encode() + b"\n"

    @classmethod
    def loads(cls, data: bytes | memoryview) -> StoreOffer:
        """Parse what `dumps` returned, from an untrusted source."""
        if len(data) > MAX_OFFER_BYTES:
            raise FormatError(f"offer: {len(data)} bytes, more than the {MAX_OFFER_BYTES} allowed")
        made = read(bytes(data), cls, "offer", OFFER_SCHEMA)
        if made.spec.part_of is not None or made.id != decode(data, _Named, "offer").id:
            raise FormatError("offer: its id is not that of its spec and tracks")
        return made


class _Named(Struct):
    """The field of an offer that `StoreOffer` does not have as one."""

    id: str = ""


# ------------------------------------------------------- catalogs


class _Front(Struct):
    """First line of a stored catalog."""

    offer: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    span_groups: Annotated[int, Meta(ge=1, le=MAX_SPAN_GROUPS)]
    spans: Annotated[
        tuple[Annotated[str, Meta(pattern=rf"^{SPAN_NAME}\Z")], ...], Meta(min_length=1, max_length=MAX_GROUPS)
    ]
    begins: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_SPAN_BYTES)], ...], Meta(max_length=MAX_GROUPS)]


@dataclass(frozen=True)
class StoredCatalog:
    """A catalog, and where in the store its frames are."""

    offer: str
    """Id of its `StoreOffer`."""
    spans: tuple[str, ...]
    """Names of its spans, in order, each of `span_groups` groups but the last."""
    begins: tuple[int, ...]
    """Bytes before the first frame in each span."""
    span_groups: int
    catalog: bytes
    """Catalog's JSON, not checked here."""

    @property
    def keys(self) -> list[str]:
        """Keys of its spans."""
        return [span_key(self.offer, name) for name in self.spans]

    def dumps(self) -> bytes:
        """Return the object: a line of JSON, and the catalog."""
        front = {
            "schema": CATALOG_SCHEMA,
            "offer": self.offer,
            "span_groups": self.span_groups,
            "spans": self.spans,
            "begins": self.begins,
        }
        return json.dumps(front, separators=(",", ":")).encode() + b"\n" + self.catalog

    @classmethod
    def loads(cls, data: bytes | memoryview) -> StoredCatalog:
        """Parse what `dumps` returned, from an untrusted source; the catalog itself is not looked at."""
        if len(data) > MAX_STORED_CATALOG_BYTES:
            raise FormatError(f"stored catalog: {len(data)} bytes, more than the {MAX_STORED_CATALOG_BYTES} allowed")
        front, newline, rest = bytes(data).partition(b"\n")
        if not newline:
            raise FormatError("stored catalog: truncated, or no catalog")
        if len(front) > _MAX_FRONT_BYTES:
            raise FormatError(f"stored catalog: a front of {len(front)} bytes")
        read_schema(front, "stored catalog", CATALOG_SCHEMA)
        found = decode(front, _Front, "stored catalog")
        if len(found.spans) != len(found.begins):
            raise FormatError("stored catalog: has not a begin of each span")
        return cls(found.offer, found.spans, found.begins, found.span_groups, rest)

    def parsed(self) -> Catalog:
        """Return the catalog; raise `FormatError` if it is damaged, or does not fit the spans."""
        catalog = Catalog.loads(self.catalog)
        self.check(catalog)
        return catalog

    def check(self, catalog: Catalog) -> None:
        """Raise `FormatError` unless the spans are those of this catalog."""
        if list(self.spans) != span_names(catalog.spec, catalog.chunks, self.span_groups):
            raise FormatError("stored catalog: its spans are not those of its groups")
