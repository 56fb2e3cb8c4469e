import contextlib
import json
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Raw

from kvabr.client.lookup import catalog_limit
from kvabr.store.pages import Page, pages_of, with_pages
from kvabr.types import records
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog, CommonFacts, Level, Mix, Quality, Track
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError, VersionError
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.live import LiveCatalog
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import PassageNotes
from kvabr.types.records import IN_MEMORY, MAX_SKIPPED_BYTES, check, read, to_json
from kvabr.types.tails import TailLoss
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
        *({"tracks": (0, {"decode_s": bad})} for bad in (-1, 2e9, float("nan"), float("inf"))),
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
        with pytest.raises(UsageError, match="groups to skip must be"):
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


@dataclass(frozen=True)
class WiderTrack(Track):
    """A track with one more field, of which nothing else knows."""

    rank: Annotated[int, Meta(ge=0, le=9)] = 0


@dataclass(frozen=True)
class WiderCatalog(Catalog):
    """A catalog with one more field, of which nothing else knows."""

    tracks: Annotated[tuple[WiderTrack, ...], Meta(min_length=1)]
    priority: Annotated[int, Meta(ge=0, le=9)] = 0


def wider():
    made = full()
    tracks = tuple(WiderTrack(**vars(track), rank=3) for track in made.tracks)
    own = {each.name: getattr(made, each.name) for each in fields(made)}
    return WiderCatalog(**own | {"tracks": tracks, "priority": 7})


def test_a_field_that_is_added_to_the_definition_is_written_read_and_checked():
    made = wider()
    assert WiderCatalog.loads(made.dumps()) == made
    assert WiderCatalog.loads(catalog(2).dumps()).priority == 0  # an older asset has its default
    assert [track.rank for track in made.prefix(1).tracks] == [3] * len(made.tracks)
    assert made.suffix(1).priority == 7
    value = json.loads(made.dumps())
    value["tracks"][1]["rank"] = 10
    with pytest.raises(FormatError, match=r"<= 9, at tracks\[1\].rank"):
        WiderCatalog.loads(json.dumps(value))
    with pytest.raises(FormatError, match="<= 9, at priority"):
        replace(made, priority=10)
    # A version that does not know the fields reads the rest.
    assert Catalog.loads(made.dumps()) == full()


def full(groups=2):
    """A catalog in which no field that is published has its default."""
    made = catalog(groups)
    tails = TailLoss(16, 0.3, 0.1), TailLoss(128, 1e-05)
    tracks = tuple(
        replace(track, decode_s=0.25, packs=(2,), tails=tails, measured=Quality(1.5e-05, -0.25, 1.0, 2e-7, 0.1))
        for track in made.tracks
    )
    refined = replace(tracks[-1], name="finer", refines=tracks[-1].name)
    return replace(
        made,
        tracks=(*tracks, refined),
        mixes=(Mix((tracks[0].name,) * groups, 0.1, 1e-7),),
        asked=(0.25,) * groups,
        source="a text",
        position=640,
        **FACTS,
    )


FACTS = {
    "profile": "ab" * 32,
    "profile_bytes": 12345,
    "prefill": PrefillCost(0.25, 1e-05, 1e-09),
    "loss_method": "of another asset",
    "estimated": True,
}
NOTES = PassageNotes("mean", 32, bytes(range(256)), ((0.0, 0.25), (0.5, 1e-05)), "behind 8 contexts")


def published(kind):
    return {each.name: each for each in fields(kind) if each.metadata != IN_MEMORY}


def test_the_fields_that_are_tried_here_are_all_that_there_are():
    made = full()
    plain = {name for name, each in published(Catalog).items() if getattr(made, name) == each.default}
    assert plain == {"passage"}  # a passage has no position
    assert not [name for name, each in published(Track).items() if getattr(made.tracks[-1], name) == each.default]
    assert FACTS.keys() == published(CommonFacts).keys()


def test_the_road_of_the_json_and_of_a_live_record():
    made = full()
    assert Catalog.loads(made.dumps()) == made
    passage = replace(made, position=0, passage=NOTES)
    assert Catalog.loads(passage.dumps()) == passage
    live = LiveCatalog(made, (0.5, 1.25), "0123456789abcdef")
    assert LiveCatalog.loads(live.dumps().encode()) == live


def test_the_road_of_pages():
    """What a prompt finds by its pages is what was published, but for what is true of one asset as a whole."""
    made = full()
    pages = [Page.loads(page.dumps()) for page in pages_of(made)]
    assert pages == pages_of(made)
    (found,) = pages
    assert {name: getattr(found, name) for name in FACTS} == FACTS
    assert (found.spec, found.chunks, found.tokens, found.position) == (made.spec, made.chunks, made.tokens, 640)
    levels = [{name: getattr(track, name) for name in published(Level)} for track in made.tracks]
    assert [{name: getattr(level, name) for name in published(Level)} for level in found.levels] == levels
    assert with_pages(made, pages) == made


@dataclass(frozen=True)
class Sample:
    count: Annotated[int, Meta(ge=1, le=5)]
    names: tuple[str, ...] = ()
    inner: Quality | None = None
    away: int = 0

    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check(self, "sample")


def test_a_record_is_read_with_its_defaults_and_null():
    assert read(b'{"count": 3, "inner": null, "new": [1]}', Sample, "sample") == Sample(3)
    assert to_json(Sample(3), "away", last=("count",)) == {"away": 0, "count": 3}
    assert read(json.dumps(to_json(Sample(3, ("a",), Quality(1, 2, 3)))).encode(), Sample, "sample") == Sample(
        3, ("a",), Quality(1.0, 2.0, 3.0)
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"names": []}', "sample: a field is missing, count"),
        (b'{"count": 0}', "sample: Expected `int` >= 1, at count"),
        (b'{"count": 1.0}', "sample: Expected `int`, got `float`, at count"),
        (b'{"count": true}', "sample: Expected `int`, got `bool`, at count"),
        (b'{"count": 1, "names": ["a", 2]}', "sample: Expected `str`, got `int`, at names[1]"),
        (b'{"count": 1, "inner": {"kl": "x"}}', "sample: Expected `float`, got `str`, at inner.kl"),
        (b'{"count": 1, "inner": {"kl": 1, "dnll": 1, "top1": NaN}}', "sample: not JSON"),
        (b'{"count": 1e999}', "sample: Number out of range, at count"),
        (b'{"count": 1', "sample: not JSON"),
        (b'{"count": 1} 2', "sample: not JSON"),
        (b"\xff", "sample: not JSON"),
        (b'{"count": 1, "names": ["\xff"]}', "sample: not JSON"),
        (b"[]", "sample: Expected `object`, got `array`"),
        (b"[" * 100_000, "sample:"),
        (b'{"names":' + b"[" * 100_000, "values are nested too deeply"),
        (b'{"count": 1' + b" " * MAX_SKIPPED_BYTES + b"}", "bytes of fields that this version does not know"),
        (b'{"count": 1, "new": [' + b"1," * 9000 + b"1]}", "too many small values"),
        (b'{"count": 1, "new": [' + b'{"abcdefgh":12345678},' * 5000 + b"1]}", "too many small values"),
    ],
)
def test_what_is_no_such_record_is_refused_with_the_place(text, says):
    with pytest.raises(FormatError) as told:
        read(text, Sample, "sample")
    assert says in str(told.value)


def test_the_schema_is_looked_at_before_what_another_version_may_have_changed():
    with pytest.raises(VersionError, match="upgrade kvabr"):
        read(b'{"schema": "kvabr.sample/2", "count": "many"}', Sample, "sample", "kvabr.sample/1")
    with pytest.raises(FormatError, match="is this a sample"):
        read(b'{"count": 1}', Sample, "sample", "kvabr.sample/1")
    assert read(b'{"schema": "kvabr.sample/1", "count": 1}', Sample, "sample", "kvabr.sample/1") == Sample(1)
