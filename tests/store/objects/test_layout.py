"""What is in the objects: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest

from kvabr.store.objects import layout, spans
from kvabr.store.objects.layout import StoredCatalog, StoreOffer
from kvabr.types.errors import FormatError
from tests.catalogs import catalog
from tests.client.classes import HYBRID, SLIDING
from tests.store.objects.made import catalog_of, frame, spans_of

STATES = replace(HYBRID, classes=(*HYBRID.classes[:2], replace(HYBRID.classes[2], interval=64)))
SPECS = {"full": None, "sliding": SLIDING, "hybrid": HYBRID, "snapshots": STATES}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tokens", [1, 16, 250, 256, 257, 700])
def test_every_frame_is_where_the_head_says(name, tokens):
    made = catalog_of(SPECS[name], tokens)
    offer, total = StoreOffer.of(made), 0
    objects = spans_of(made)
    for number, data in enumerate(objects):
        head = spans.parse_head(data[: spans.head_bytes(data)])
        spans.check_span(head, offer, made.chunks[number * 16 : number * 16 + 16])
        assert (head.total, head.first) == (len(data), number * 16)
        assert replace(head, begin=0) == spans.head_of(made, number, spans.units_by_span(made)[number])
        total += head.tokens
        for index, unit in spans.units_by_span(made)[number]:
            for track in made.tracks:
                published, group = made.address(index, track.name)
                begin, end = head.place(published, group)
                assert data[begin:end] == frame(track.name, index)
                assert head.by_name[published].digests[group - head.by_name[published].first] == track.digests[index]
                assert unit.group == group
        base = head.by_name[head.tracks[0].name]
        assert head.place(base.name, base.first)[0] == head.begin  # the base comes first, as one range
        with pytest.raises(FormatError, match="has no group"):
            head.place(base.name, base.first + len(base.bytes))
        with pytest.raises(FormatError, match="has no group"):
            head.place("FP4", 0)
    assert total == tokens
    names = layout.span_names(made.spec, made.chunks)
    assert len(names) == len(objects)
    assert [one.endswith(".end") for one in names] == [False] * (len(names) - 1) + [name in ("hybrid", "snapshots")]


def test_a_head_of_all_tracks_comes_with_the_first_request():
    made = catalog(16, layered=True)
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(16)]
    made = replace(made, tracks=tuple(replace(track, digests=tuple(digests)) for track in made.tracks))
    made = replace(made, tracks=tuple(_scrambled(track) for track in made.tracks))
    assert len(spans.encode_head(spans.head_of(made, 0, spans.units_by_span(made)[0]))) <= spans.HEAD_BYTES


def _scrambled(track):
    """Digests and losses that do not repeat, as real ones do not."""
    digests = tuple(hashlib.sha256(f"{track.name}{group}".encode()).hexdigest() for group in range(len(track.bytes)))
    return replace(track, digests=digests, loss=tuple(float(f"{loss:.6g}") for loss in track.loss))


def test_a_span_of_another_prompt_or_offer_is_refused():
    made = catalog_of(None, 300)
    offer = StoreOffer.of(made)
    head = spans.parse_head(spans_of(made)[1])
    spans.check_span(head, offer)
    with pytest.raises(FormatError, match="another prompt"):
        spans.check_span(head, offer, made.chunks[:16])
    for changed, match in (
        (replace(head, first=3), "begins at group 3"),
        (replace(head, tokens=head.tokens + 16), "tokens do not make"),
        (replace(head, tracks=head.tracks[::-1]), "other tracks"),
        (replace(head, tracks=head.tracks[1:]), "lacks groups"),
        (replace(head, tracks=(replace(head.tracks[0], first=0), *head.tracks[1:])), "lacks groups"),
    ):
        with pytest.raises(FormatError, match=match):
            spans.check_span(changed, offer)


def test_a_pointer_has_the_head_of_its_span():
    made = catalog_of(HYBRID, 300)
    data = spans_of(made)[1]
    name = layout.span_names(made.spec, made.chunks)[1]
    head = data[: spans.head_bytes(data)]
    assert spans.parse_pointer(spans.encode_pointer(name, head)) == (name, spans.parse_head(data))
    for bad in (b"", spans.encode_pointer("0" * 16, head), spans.encode_pointer("../x", head), data[:400], head):
        with pytest.raises(FormatError):
            spans.parse_pointer(bad)


@pytest.mark.parametrize("name", SPECS)
def test_offers_are_read_back(name):
    made = catalog_of(SPECS[name], 40)
    offer = StoreOffer.of(replace(made, profile="ab" * 32, profile_bytes=7))
    assert StoreOffer.loads(offer.dumps()) == offer
    assert offer.id == StoreOffer.of(replace(made, profile="ab" * 32, profile_bytes=7, loss_method="other")).id
    assert offer.id != StoreOffer.of(made).id
    assert offer.id != replace(offer, tracks=offer.tracks[:2]).id
    assert len(offer.published) == 3 * len(made.spec.classes)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("schema", "kvabr.offer/2", "kvabr.offer/2.*upgrade"),
        ("id", "0" * 16, "its id"),
        ("digest", "md5", "upgrade"),
        ("span_groups", 0, ">= 1, at span_groups"),
        ("span_groups", 10**9, "<= 256, at span_groups"),
        ("tracks", [], "length >= 1, at tracks"),
        ("tracks", {}, "array"),
        ("profile", "../x", "at profile"),
        ("profile_bytes", 1 << 40, "at profile_bytes"),
        ("spec", None, "not a spec"),
    ],
)
def test_a_bad_offer_is_refused(field, value, match):
    good = json.loads(StoreOffer.of(catalog_of(None, 40)).dumps())
    with pytest.raises(FormatError, match=match):
        StoreOffer.loads(json.dumps({**good, field: value}).encode())


def test_catalogs_are_read_back():
    made = catalog_of(HYBRID, 700)
    names = layout.span_names(made.spec, made.chunks)
    stored = StoredCatalog("0" * 16, tuple(names), (100,) * len(names), 16, made.dumps().encode())
    assert StoredCatalog.loads(stored.dumps()) == stored
    assert stored.parsed() == made
    assert stored.keys[0] == f"s/{'0' * 16}/{made.chunks[15][:16]}"
    with pytest.raises(FormatError, match="not those of its groups"):
        replace(stored, spans=tuple(names[::-1])).parsed()


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("schema", "kvabr.stored-catalog/2", "stored-catalog/2.*upgrade"),
        ("offer", "x", "at offer"),
        ("spans", ["../../x"], r"at spans\[0\]"),
        ("spans", [], ">= 1, at spans"),
        ("begins", [], "not a begin of each"),
        ("begins", [-1], r">= 1, at begins\[0\]"),
        ("span_groups", 0, ">= 1, at span_groups"),
    ],
)
def test_a_bad_catalog_is_refused(field, value, match):
    made = catalog_of(None, 40)
    names = layout.span_names(made.spec, made.chunks)
    front, _, rest = StoredCatalog("0" * 16, tuple(names), (9,), 16, made.dumps().encode()).dumps().partition(b"\n")
    with pytest.raises(FormatError, match=match):
        StoredCatalog.loads(json.dumps({**json.loads(front), field: value}).encode() + b"\n" + rest)


def test_what_is_no_head_is_refused():
    data = spans_of(catalog_of(None, 40))[0]
    good = json.loads(zlib.decompress(data[52 : spans.head_bytes(data)]))
    with pytest.raises(FormatError, match=r"version 2.*upgrade"):
        spans.parse_head(data[:4] + struct.pack("<H", 2) + data[6:])
    with pytest.raises(FormatError, match="truncated"):
        spans.parse_head(data[:80])
    with pytest.raises(FormatError, match="damaged"):
        spans.parse_head(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    for change, match in (
        ({"digests": []}, ">= 1, at digests"),
        ({"digests": ["x"]}, r"digests\[0\]"),
        ({"tracks": []}, ">= 1, at tracks"),
        ({"tracks": [*good["tracks"], good["tracks"][0]]}, "a track twice"),
        ({"tracks": [{**good["tracks"][0], "loss": [-1] * 3}]}, r"tracks\[0\].loss\[0\]"),
        ({"tracks": [{**good["tracks"][0], "loss": [float("nan")] * 3}]}, "JSON"),
        ({"tracks": [{**good["tracks"][0], "bytes": [0] * 3}]}, r"tracks\[0\].bytes\[0\]"),
        ({"tracks": [{**good["tracks"][0], "bytes": [1]}]}, "each of its groups"),
        ({"tracks": [{**good["tracks"][0], "name": "../x"}]}, "track name"),
        ({"tokens": 1.5}, "`int`, got `float`, at tokens"),
        ({"first": True}, "`int`, got `bool`, at first"),
    ):
        with pytest.raises(FormatError, match=match):
            spans.parse_head(_packed(json.dumps({**good, **change}).encode(), len(data)))
    for junk in (b"[]", b"[" * 100_000, b"{", b'{"digests": 1}', b" " * (3 << 20)):
        with pytest.raises(FormatError):
            spans.parse_head(_packed(junk, len(data)))


def _packed(value: bytes, total: int) -> bytes:
    packed = zlib.compress(value)
    return struct.pack("<4sHHIQ32s", b"KVSP", 1, 0, len(packed), total, hashlib.sha256(packed).digest()) + packed


@hypothesis.given(st.data())
def test_damage_is_found_or_harmless(data):
    made = spans_of(catalog_of(HYBRID, 100))[0]
    good = made[: spans.head_bytes(made)]
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + data.draw(st.binary(max_size=9)) + good[at + data.draw(st.integers(0, 9)) :]
    for parse in (spans.parse_head, spans.parse_pointer, StoreOffer.loads, StoredCatalog.loads):
        try:
            found = parse(bad)
        except FormatError:
            continue
        assert parse is spans.parse_head
        assert found == spans.parse_head(good)
