import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kvabr.client.lookup import catalog_limit
from kvabr.types import records
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog, Track
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import TrackNamespace
from tests.catalogs import SPEC, catalog
from tests.examples import examples
from tests.hostile import DOCUMENTS


def test_an_asset_may_be_a_piece_of_a_prompt():
    piece = replace(catalog(5), position=1000)
    assert Catalog.loads(piece.dumps()) == piece
    assert json.loads(piece.dumps())["position"] == 1000
    assert "position" not in json.loads(catalog(5).dumps())
    assert piece.first_token == piece.unit(0).first == piece.spans[0].first == 1000
    behind = piece.suffix(2).prefix(2)
    assert behind.first_token == behind.unit(0).first == 1000 + 2 * SPEC.group_tokens
    assert behind.address(0, "FP16") == ("FP16", 2)


def test_digests_may_be_of_another_kind():
    plain = catalog(2)
    tracks = tuple(replace(track, digests=tuple(f"b3-{one}" for one in track.digests)) for track in plain.tracks)
    other = replace(plain, tracks=tracks)
    assert (plain.digest_kind, other.digest_kind) == ("sha256", "blake3")
    assert Catalog.loads(other.dumps()) == other
    assert other.prefix(1).digest_kind == "blake3"


@pytest.mark.parametrize(
    "change",
    [
        *({"tracks": (0, {"name": bad})} for bad in ("../../etc", "BF16")),
        *({"tracks": (0, {"bytes": bad})} for bad in ([1], [-1, 5])),
        *({"tracks": (0, {"loss": bad})} for bad in ([float("nan"), 0], [-1, 0])),
        *({"tracks": (0, {"decode_s": bad})} for bad in (-1, float("nan"), float("inf"))),
        {"tracks": (0, {"refines": "nothing"})},
        *({"tokens": bad} for bad in (0, 10**12, "many")),
        *({"position": bad} for bad in (-1, 1 << 33, None)),
        *({"chunks": []}, {"chunks": ["ab" * 32] * 3}, {"tracks": []}, {"spec": {}}),
        {"prefill": {"constant_s": -1, "per_token_s": 0, "attention_s": 0}},
        {"namespace": {"model": "m", "prompt": "short"}},
        {"schema": "kvabr.catalog/2"},
    ],
)
def test_bad_fields_are_refused(change):
    value = json.loads(catalog(2).dumps())
    match change:
        case {"tracks": (number, fields)}:
            value["tracks"][number] |= fields
        case _:
            value |= change
    with pytest.raises(FormatError):
        Catalog.loads(json.dumps(value))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(FormatError):
        Catalog.loads(data)


@examples(200)
@given(st.data())
def test_mutilated_json_is_read_or_refused_but_never_crashes(data):
    text = catalog(2).dumps()
    place = data.draw(st.integers(0, len(text) - 1))
    mutilated = text[:place] + data.draw(st.sampled_from(["", "0", "-", "[", "null", '"'])) + text[place + 1 :]
    with contextlib.suppress(FormatError):
        Catalog.loads(mutilated)


def test_spec_round_trip_and_digest():
    for rope in (SPEC.rope, RopeSpec(1e4, 16, "half", (0.5,) * 8, 1.5), RopeSpec(1e4, 16, "interleaved", first=8)):
        made = SPEC.changed(rope=rope)
        assert KVSpec.from_json(json.loads(json.dumps(made.to_json()))) == made
    others = [
        KVSpec.uniform("test/model", "tokenizer", 4, 2, 32, "float16", RopeSpec(10000.0, 16)),
        KVSpec.uniform("test/model", "tokenizer", 4, 2, 32, "bfloat16", RopeSpec(10000.0, 32)),
        KVSpec.uniform("test/model", "other", 4, 2, 32, "float16", RopeSpec(10000.0, 32)),
        KVSpec.uniform("test/model", "tokenizer", 4, 2, 32, "float16", None),
    ]
    assert len({spec.digest() for spec in (SPEC, *others)}) == 5


@pytest.mark.parametrize(
    "rope",
    [
        {"frequencies": []},
        {"frequencies": [0.5] * 15},
        {"frequencies": [0.5] * 17},
        {"frequencies": [0.5] * 10**6},
        *(
            {"frequencies": [0.5] * 15 + [bad]}
            for bad in (0, -0.5, float("nan"), float("inf"), 1025, 10**400, "0.5", None, True, [0.5])
        ),
        {"frequencies": 0.5},
        {"frequencies": "1" * 16},
        {"frequencies": {str(pair): 0.5 for pair in range(16)}},
        *(
            {"factor": bad}
            for bad in (0, -1, 1e-4, 2000, 10**400, float("nan"), float("inf"), "1", None, True, [1.0])
        ),
        {"rotary_dim": 30, "frequencies": [0.5] * 16},
        {"rotary_dim": True}, {"rotary_dim": 0}, {"rotary_dim": 34}, {"rotary_dim": 31},
        {"first": -1}, {"first": 1}, {"first": True}, {"first": 1.0}, {"rotary_dim": 16, "first": 17},
        {"theta": 0}, {"theta": -1}, {"theta": 1e-300}, {"theta": 10**400}, {"theta": "10000"}, {"theta": True},
        {"phase": 1.0},
    ],
)  # fmt: skip
def test_impossible_rotary_embeddings_are_refused(rope):
    value = SPEC.to_json()
    with pytest.raises(FormatError, match="KV spec"):
        KVSpec.from_json(value | {"rope": value["rope"] | rope})


def test_a_prefix_is_what_a_longer_asset_offers_a_shorter_prompt():
    whole = catalog(6, short=30)
    part = whole.prefix(4)
    assert (part.groups, part.tokens) == (4, 4 * SPEC.group_tokens)
    assert part.namespace == whole.namespace
    assert part.chunks == whole.chunks[:4]
    for ours, theirs in zip(part.tracks, whole.tracks, strict=True):
        assert (ours.bytes, ours.loss, ours.digests) == (theirs.bytes[:4], theirs.loss[:4], theirs.digests[:4])
        assert ours.measured is None
    assert whole.prefix(6) is whole
    assert Catalog.loads(part.dumps()) == part
    for groups in (0, -1, 7):
        with pytest.raises(UsageError, match="prefix of"):
            whole.prefix(groups)


def test_a_suffix_knows_where_its_groups_are_published():
    whole = catalog(6, short=30)
    part = whole.suffix(2)
    assert (part.groups, part.tokens, part.chunks) == (4, whole.tokens - 2 * SPEC.group_tokens, whole.chunks[2:])
    assert (part.offset, part.first_token) == (2, 2 * SPEC.group_tokens)
    for ours, theirs in zip(part.tracks, whole.tracks, strict=True):
        assert (ours.bytes, ours.loss, ours.digests) == (theirs.bytes[2:], theirs.loss[2:], theirs.digests[2:])
    assert whole.suffix(0) is whole
    assert part.suffix(1) == whole.suffix(3)
    assert part.prefix(2).offset == 2
    assert part.group_tokens(3) == whole.group_tokens(5)
    for groups in (-1, 6):
        with pytest.raises(UsageError, match="leaves nothing"):
            whole.suffix(groups)


@pytest.fixture
def decoded(monkeypatch):
    """What each call of the decoder was given, and as what."""
    calls: list[tuple[bytes, object]] = []
    decode = records.decode

    def counted(data, kind, *args):
        calls.append((bytes(data), kind))
        return decode(data, kind, *args)

    monkeypatch.setattr(records, "decode", counted)
    return calls


@pytest.mark.parametrize("what", DOCUMENTS)
def test_no_catalog_makes_the_decoder_build_much(what, decoded):
    """A call of the decoder does not let go of the interpreter; finding the members is fast, making values is not."""
    data = DOCUMENTS[what](1 << 20)
    with pytest.raises(FormatError):
        Catalog.loads(data)
    scans = {list[Raw], records._parts(Catalog)}
    built = [text for text, kind in decoded if kind not in scans]
    assert sum(text.count(b",") for text in built) <= len(data) / 8


def test_members_may_come_in_any_order_and_new_ones_are_ignored():
    made = catalog(3, layered=True)
    value = made.to_json()
    value["tracks"] = [dict(reversed(track.items())) | {"new": [1, {"a": None}]} for track in value["tracks"]]
    assert Catalog.loads(json.dumps(dict(reversed(value.items())) | {"newer": {}})) == made


def test_a_catalog_has_room_for_its_groups_on_every_track_and_not_for_much_more():
    def size(groups, tracks):
        chunk = "0" * 64
        lists = (1 << 40,) * groups, (1.2345678901234567e-05,) * groups, (chunk,) * groups
        made = tuple(Track(f"track-{number}", *lists) for number in range(tracks))
        spec = replace(SPEC, group_tokens=1)
        return len(Catalog(TrackNamespace("m", chunk), spec, groups, (chunk,) * groups, made).dumps())

    assert (size(40, 64) - size(20, 64)) * 50 <= catalog_limit(2024) - catalog_limit(1024)
    assert size(1, 64) < catalog_limit(1) == catalog_limit(1024) < catalog_limit(1025)
    assert catalog_limit(1) < 10e6
    assert catalog_limit(1 << 20) == MAX_CATALOG_BYTES
