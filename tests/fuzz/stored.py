"""Objects of a store, one at a time: spans, pointers, offers, catalogs; and the URLs of stores."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

from kvabr.store.admin.survey import Manifest
from kvabr.store.objects.layout import StoredCatalog, StoreOffer, span_key, span_names

from kvabr.link.objects.index import _parsed_catalog
from kvabr.store.objects import spans
from kvabr.store.url import StoreUrl, split_asset
from kvabr.types.catalog import Catalog, Level
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, KvabrError, UsageError
from kvabr.types.kv import KVSpec
from tests.client.classes import HYBRID
from tests.fuzz.target import Target, family, refused
from tests.store.objects.made import catalog_of, spans_of

SPAN_GROUPS = 2
_SPAN = struct.Struct("<4sHHIQ32s")


# ------------------------------------------------------- objects that are valid


@cache
def made(*, hybrid: bool = False) -> Catalog:
    """Return the catalog of a small asset: three groups in two spans."""
    return catalog_of(HYBRID if hybrid else None, 40)


@cache
def offer(*, hybrid: bool = False) -> StoreOffer:
    """Return the offer of `made`."""
    return replace(StoreOffer.of(made(hybrid=hybrid)), span_groups=SPAN_GROUPS, prefill=PrefillCost(0.1, 1e-3, 1e-7))


@cache
def heads(*, hybrid: bool = False) -> tuple[tuple[bytes, bytes], ...]:
    """Return the head of each span of `made`, as JSON, and the frames behind it."""
    found = []
    for data in spans_of(made(hybrid=hybrid), SPAN_GROUPS):
        begin = spans.head_bytes(data)
        found.append((zlib.decompress(data[_SPAN.size : begin]), data[begin:]))
    return tuple(found)


@cache
def stored(*, hybrid: bool = False) -> StoredCatalog:
    """Return the catalog of `made`, as it is stored."""
    catalog, of = made(hybrid=hybrid), offer(hybrid=hybrid).id
    names = span_names(catalog.spec, catalog.chunks, SPAN_GROUPS)
    begins = tuple(spans.head_bytes(span(head)) for head, _ in heads(hybrid=hybrid))
    return StoredCatalog(of, tuple(names), begins, SPAN_GROUPS, json.dumps(json.loads(catalog.dumps())).encode())


# ------------------------------------------------------- what would never be hit by chance


def span(head: bytes, frames: bytes = b"") -> bytes:
    """Return a span with the right digest, whatever its head is, and the size that its head says if it says one."""
    packed = zlib.compress(head)
    total = _SPAN.size + len(packed)
    try:
        total += sum(size for track in json.loads(head)["tracks"] for size in track["bytes"])
        header = _SPAN.pack(b"KVSP", 1, 0, len(packed), total, hashlib.sha256(packed).digest())
    except (KeyError, TypeError, ValueError, RecursionError, struct.error):
        total = _SPAN.size + len(packed) + len(frames)
        header = _SPAN.pack(b"KVSP", 1, 0, len(packed), total, hashlib.sha256(packed).digest())
    return header + packed + frames


def identified(data: bytes) -> bytes:
    """Return an offer with the right ID, if it says what that depends on."""
    try:
        value = json.loads(data)
        tracks = tuple(Level(str(each["name"]), refines=each["refines"]) for each in value["tracks"][:300])
        known = StoreOffer(
            KVSpec.from_json(value["spec"]),
            tracks,
            profile=value["profile"],
            span_groups=value["span_groups"],
            digest=value["digest"],
        )
        return json.dumps({**value, "id": known.id}).encode()
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError, KvabrError):
        return data


# ------------------------------------------------------- targets


def _span(data: bytes) -> bool:
    refused(lambda: spans.head_bytes(data), FormatError)
    head = refused(lambda: spans.parse_head(data), FormatError)
    if head is None:
        return False
    again = refused(lambda: spans.encode_head(head), UsageError)
    if again is not None:
        assert replace(spans.parse_head(again), begin=0) == replace(head, begin=0)
    at = head.begin
    for track in head.tracks:
        for number in range(len(track.bytes)):
            begin, end = head.place(track.name, track.first + number)
            assert begin == at < end
            at = end
        assert refused(lambda: head.place(track.name, track.first + len(track.bytes)), FormatError) is None  # noqa: B023
    assert at == head.total
    for known in (offer(), offer(hybrid=True)):
        refused(lambda: spans.check_span(head, known), FormatError)  # noqa: B023
    return True


def _pointer(data: bytes) -> bool:
    """The name of a span, a space, and its head as JSON; or as it is stored."""
    name, space, head = data.partition(b" ")
    if space and head.startswith(b"{"):
        data = struct.pack("<4sHH", b"KVPT", 1, len(name) % 65536) + name + span(head)
    found = refused(lambda: spans.parse_pointer(data), FormatError)
    if found is None:
        return False
    assert span_key(offer().id, found[0]).count("/") == 2
    return True


def _offer(data: bytes) -> bool:
    found = refused(lambda: StoreOffer.loads(identified(data)), FormatError)
    if found is None:
        return False
    assert StoreOffer.loads(found.dumps()) == found
    assert len(found.published) == len(found.tracks) * len(found.spec.parts)
    return True


def _catalog(data: bytes) -> bool:
    manifest = refused(lambda: Manifest.loads("a/x", data), FormatError)
    if manifest is not None:
        manifest.catalog.spec.model.encode()
        assert manifest.catalog.tokens > 0
        assert manifest.names >= {*manifest.spans, *manifest.pointers.values()}
        assert all(track.total_bytes > 0 for track in manifest.catalog.tracks)
    found = refused(lambda: StoredCatalog.loads(data), FormatError)
    if found is None:
        return False
    assert StoredCatalog.loads(found.dumps()) == found
    placed = refused(lambda: _parsed_catalog(memoryview(data)), FormatError)
    if placed is None:
        return False
    assert manifest is not None, "administration must see what plays use"
    assert set(manifest.spans) == {span_key(found.offer, name) for name in placed[1].names}
    catalog = found.parsed()
    for name, track in catalog.published.items():
        for group, size in enumerate(track.bytes):
            place = placed[1].place(name, group)
            assert place is not None
            assert place[2] - place[1] == size
            assert place[3] == track.digests[group]
    return True


def _url(data: bytes) -> bool:
    text = data.decode("utf-8", "replace")
    found = refused(lambda: StoreUrl.parse(text), UsageError)
    refused(lambda: split_asset(text), UsageError)
    if found is None:
        return False
    assert StoreUrl.parse(str(found)) == found
    assert not any(part in ("", ".", "..") for part in found.root.split("/")[:-1])
    if len(str(found)) < 1900:
        below, prompt = split_asset(found.below("ab" * 32))
        assert (below, prompt) == (found, "ab" * 32)
    return True


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _valid_pointers() -> list[bytes]:
    found = []
    for hybrid in (False, True):
        head, _ = heads(hybrid=hybrid)[-1]
        name = stored(hybrid=hybrid).spans[-1]
        found += [name.encode() + b" " + head, spans.encode_pointer(name, span(head))]
    return found


STORED = family(
    Target(_span, lambda: [span(*each) for each in heads()]),
    Target(lambda data: _span(span(data)), lambda: [head for each in (False, True) for head, _ in heads(hybrid=each)]),
    Target(_pointer, _valid_pointers),
    Target(
        _offer,
        lambda: [_json(json.loads(each.dumps())) for each in (offer(), offer(hybrid=True))],
    ),
    Target(_catalog, lambda: [stored().dumps(), stored(hybrid=True).dumps()], most_bytes=8192),
    Target(
        _url,
        lambda: [
            b"s3://bucket/a/b?tenant=t&endpoint=http://h:1&region=r&anonymous=true", b"gs://bucket", b"http://h:80/p",
            b"az://box/p?account=a", b"file:///a/b%20c?layout=objects", b"memory://name?tenant=x",
        ],
    ),
)  # fmt: skip
