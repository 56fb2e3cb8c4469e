"""Layer classes: what a spec of several may be, how it is cut into units, and which of these a prompt needs."""

import json
import tracemalloc
from dataclasses import replace

import pytest

from kvabr.types.catalog import Catalog, Track
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec, LayerClass, RopeSpec
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.units import (
    Unit,
    hit,
    needed,
    unit_of,
    units_of,
    with_snapshots_of,
)

FULL = LayerClass("full", (0, 3), 2, 8, 8, "bfloat16", RopeSpec(10000.0, 8))
WINDOW = LayerClass("window", (1, 2), 2, 8, 8, "bfloat16", window=40)
STATE = LayerClass("state", (4,), 2, 6, 5, "float32", interval=32)
CONVOLUTION = LayerClass("state", (4,), 1, 10, 3, "float16", interval=32, role="convolution")
QUANTISED = LayerClass("full", (0, 1), 2, 8, 8, "float8_e4m3fn", scales=(0.1, 0.25, 3.0, 1e-3))
SPEC = KVSpec("test/hybrid", "tokenizer", (FULL, WINDOW, STATE, CONVOLUTION), 16)


def test_a_spec_of_several_classes_round_trips_and_each_class_has_a_digest():
    assert KVSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC
    assert SPEC.names == ("full", "window40", "state", "state-convolution")
    for part in SPEC.parts:
        assert KVSpec.from_json(json.loads(json.dumps(part.to_json()))) == part
    assert len({SPEC.digest(), *(part.digest() for part in SPEC.parts)}) == 5
    # The class of another model, or of one that differs elsewhere, is another.
    other = replace(SPEC, classes=(FULL, replace(WINDOW, window=41), STATE, CONVOLUTION))
    assert other.parts[0].digest() != SPEC.parts[0].digest()


@pytest.mark.parametrize("scales", [(0.1,), (0.1, 0.25, 3.0, 1e-3), tuple(range(1, 9))])
def test_the_scales_of_a_quantised_cache_are_part_of_what_it_is(scales):
    spec = KVSpec("m", "t", (replace(QUANTISED, scales=scales),))
    read = KVSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert (read, read.digest()) == (spec, spec.digest())
    others = [replace(QUANTISED, scales=(*scales[:-1], 7.5)), replace(QUANTISED, scales=scales, dtype="float8_e5m2")]
    assert len({spec.digest(), *(KVSpec("m", "t", (other,)).digest() for other in others)}) == 3
    broken = spec.to_json()
    broken["classes"][0]["scales"] = "1.0"
    with pytest.raises(FormatError, match="so must its scales"):
        KVSpec.from_json(broken)


def test_a_quantised_cache_is_taken_by_engines_that_have_the_same_or_none():
    quantised = KVSpec("m", "t", (QUANTISED,))
    plain = KVSpec("m", "t", (replace(QUANTISED, dtype="bfloat16", scales=None),))
    other = KVSpec("m", "t", (replace(QUANTISED, scales=(1.0,)),))
    assert plain.with_dtypes(quantised).digest() == quantised.digest()
    for asset in (plain, other):
        assert quantised.with_dtypes(asset).digest() == quantised.digest() != asset.digest()


@pytest.mark.parametrize(
    "classes",
    [
        (FULL, replace(WINDOW, layers=(1, 2, 3))),
        (FULL, replace(WINDOW, layers=(1,))),
        (replace(FULL, layers=(1,)),),
        (),
        (FULL, WINDOW, replace(STATE, interval=24)),  # its snapshots do not lie between groups
    ],
)
def test_classes_that_overlap_or_leave_out_layers_are_refused(classes):
    assert KVSpec("m", "t", (FULL, WINDOW), 16).classes == (FULL, WINDOW)
    with pytest.raises(FormatError):
        KVSpec("m", "t", classes, 16)


IMPOSSIBLE = [
    *((WINDOW, {"window": bad}) for bad in (0, None, True)),
    *((FULL, bad) for bad in ({"window": 8}, {"interval": 16}, {"kind": "spiral"}, {"dtype": "int8"})),
    *((FULL, {"layers": bad}) for bad in ((), (1, 0), (0, 0), (-1, 0), [0])),
    *((FULL, bad) for bad in ({"heads": 0}, {"k_dim": 0}, {"v_dim": -1}, {"k_dim": 4, "v_dim": 0})),
    *((FULL, bad) for bad in ({"role": "Index/1"}, {"kind": "latent", "rope": None})),
    *((STATE, bad) for bad in ({"v_dim": 0}, {"rope": RopeSpec(1e4, 4)}, {"interval": 0})),
    *((FULL, bad) for bad in ({"scales": (1.0,)}, {"dtype": "float8_e4m3fn"})),
    *((QUANTISED, {"scales": bad}) for bad in ((), (1.0,) * 2, [1.0])),
    *((QUANTISED, {"scales": (bad,)}) for bad in (0.0, -1.0, 1e12, float("nan"), True, "1")),
    (QUANTISED, {"scales": (1.0,) * 3, "v_dim": 0}),
]


@pytest.mark.parametrize(("base", "change"), IMPOSSIBLE)
def test_impossible_classes_are_refused(base, change):
    with pytest.raises(FormatError):
        replace(base, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "spiral"}, {"kind": None}, {"layers": "01"}, {"layers": [1 << 40]}, {"extra": 1}, {"rope": 5},
        {"heads": "2"},
    ],
)  # fmt: skip
def test_classes_from_elsewhere_are_checked(change):
    value = SPEC.to_json()
    value["classes"][0] |= change
    with pytest.raises(FormatError):
        KVSpec.from_json(value)
    for broken in ({"classes": {}}, {"classes": [SPEC.to_json()["classes"][0]] * 17}, {"part_of": "abc"}):
        with pytest.raises(FormatError):
            KVSpec.from_json(SPEC.to_json() | broken)


def test_units_are_in_the_order_of_their_ends():
    units = units_of(SPEC, 70)
    assert [unit.chunk for unit in units] == sorted(unit.chunk for unit in units)
    assert [unit for unit in units if unit.part == 2] == [
        Unit(2, 0, 1, 32, 6),
        Unit(2, 1, 3, 64, 6),
        Unit(2, 2, 4, 70, 6),
    ]
    assert [unit.tokens for unit in units if unit.part == 1] == [16, 16, 16, 16, 6]
    for unit in units:
        assert unit_of(SPEC, unit.part, unit.group, 70) == unit
    for part in range(4):
        with pytest.raises(IndexError):
            unit_of(SPEC, part, 5, 70)


def test_a_catalog_that_claims_millions_of_units_is_refused_before_they_are_made():
    """With 16 classes a catalog of a few megabytes can claim units that would take a gigabyte."""
    classes = tuple(LayerClass("full", (layer,), 1, 2, 2, "float16") for layer in range(16))
    spec = KVSpec("m", "t", classes, 1)
    value = catalog().to_json() | {"spec": spec.to_json(), "tokens": 20_000, "chunks": [f"{7:064x}"] * 20_000}
    text = json.dumps(value)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="of each of 320000 groups"):
            Catalog.loads(text)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    finally:
        tracemalloc.stop()


WINDOWS = [(16, 40, 0), (40, 40, 0), (48, 40, 0), (64, 40, 1), (70, 40, 1), (80, 16, 4), (80, 17, 3), (80, 1, 4)]
CHUNKS = [(64, [0, 1, 2, 3]), (70, [4]), (80, [4]), (128, [4, 5, 6, 7]), (129, [8])]


@pytest.mark.parametrize(
    ("kind", "window", "tokens", "groups"),
    [
        *(("window", window, tokens, list(range(first, -(-tokens // 16)))) for tokens, window, first in WINDOWS),
        *(("chunked", 64, tokens, groups) for tokens, groups in CHUNKS),
    ],
)
def test_a_window_needs_what_is_still_seen_and_a_chunk_its_own_tokens_and_the_last_before(kind, window, tokens, groups):
    spec = KVSpec("m", "t", (LayerClass(kind, (0,), 1, 4, 4, "float16", window=window),), 16)
    units = units_of(spec, tokens)
    assert [units[index].group for index in needed(spec, units, tokens)] == groups


def test_a_hit_is_the_minimum_over_the_classes():
    assert [hit(SPEC, groups, 70) for groups in range(6)] == [
        (0, None), (0, "state"), (2, None), (2, "state"), (4, None), (5, None),
    ]  # fmt: skip
    alone = replace(SPEC, classes=(FULL, WINDOW, replace(STATE, interval=None), replace(CONVOLUTION, interval=48)))
    assert [hit(alone, groups, 70)[0] for groups in range(6)] == [0, 0, 0, 0, 0, 5]
    apart = replace(SPEC, classes=(FULL, WINDOW, STATE, replace(CONVOLUTION, interval=48)))
    assert [hit(apart, groups, 200)[0] for groups in (5, 6, 7, 12, 13)] == [0, 6, 6, 12, 13]


def test_how_often_there_are_snapshots_is_no_property_of_a_model():
    often = replace(SPEC, classes=(FULL, WINDOW, replace(STATE, interval=16), replace(CONVOLUTION, interval=None)))
    assert SPEC.same_cache(often)
    assert SPEC.parts[2].same_cache(often.parts[2])
    assert not SPEC.parts[2].same_cache(often.parts[3])
    assert not SPEC.same_cache(replace(SPEC, classes=(FULL, WINDOW, STATE)))
    assert with_snapshots_of(SPEC, often) == often
    assert with_snapshots_of(often, SPEC) == SPEC
    other = replace(SPEC, classes=(FULL, replace(WINDOW, window=41), STATE, CONVOLUTION))
    assert with_snapshots_of(SPEC, other) == SPEC
    assert with_snapshots_of(SPEC, KVSpec.uniform("m", "t", 2, 2, 8, "float16")) == SPEC


def catalog(tokens=70):
    units = units_of(SPEC, tokens)
    sizes = tuple(1000 * unit.part + unit.group + 1 for unit in units)
    sums = tuple(f"{unit.part:032x}{unit.group:032x}" for unit in units)
    losses = tuple(0.001 * (1 + index) for index in range(len(units)))
    tracks = tuple(
        Track(name, sizes, losses, sums, refines=lower) for name, lower in (("Int8", None), ("finer", "Int8"))
    )
    chunks = chain(list(range(tokens)), model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=16)
    return Catalog(TrackNamespace(SPEC.model, chunks[-1]), SPEC, tokens, tuple(chunks), tracks)


def test_a_catalog_of_several_classes_is_published_as_a_track_of_each():
    whole = catalog()
    assert Catalog.loads(whole.dumps()) == whole
    assert len(whole.published) == 8
    lower = whole.published["finer.window40"]
    assert (lower.bytes, lower.refines) == ((1001, 1002, 1003, 1004, 1005), "Int8.window40")
    for group, unit in enumerate(whole.units):
        name, number = whole.address(group, "Int8")
        assert whole.published[name].digests[number] == whole.track("Int8").digests[group]
        assert SPEC.level_of(name) == ("Int8", unit.part)
    for bad in ("Int8", "Int8.spiral", ".full.", "full"):
        with pytest.raises(FormatError, match="names no layer class"):
            SPEC.level_of(bad)
    with pytest.raises(FormatError, match="only one layer class"):
        replace(whole, spec=SPEC.parts[0])


def test_a_play_has_only_what_it_needs():
    whole = catalog()
    play = whole.to_play
    assert play.to_play is play
    assert [(unit.part, unit.group) for unit in play.units] == [
        (0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (0, 4), (1, 4), (2, 2), (3, 2),
    ]  # fmt: skip
    assert [(span.first, span.tokens) for span in play.spans] == [(0, 70), (16, 54), (70, 6), (70, 10)]
    for group in range(play.groups):
        name, number = play.address(group, "Int8")
        assert whole.published[name].bytes[number] == play.track("Int8").bytes[group]
    assert play.fp16_bytes == 2 * (70 * 64 + 54 * 64 + 60 + 30)
    assert max(map(play.share, range(play.groups))) == 1.0
    known = dict(play.known_digests())
    assert [bool(digest) for digest in known["Int8.window40"]] == [False, True, True, True, True]


def test_a_prefix_has_its_own_windows_and_snapshots():
    part = catalog().prefix(4)
    assert (part.tokens, len(part.chunks)) == (64, 4)
    assert [(unit.part, unit.group) for unit in part.units if unit.part] == [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
    # What a window loses depends on the distance from the end.
    losses = {(unit.part, unit.group): loss for unit, loss in zip(part.units, part.track("Int8").loss, strict=True)}
    whole = catalog()
    ends = {(unit.part, unit.group): loss for unit, loss in zip(whole.units, whole.track("Int8").loss, strict=True)}
    assert [losses[1, group] for group in (1, 2, 3)] == [ends[1, group] for group in (2, 3, 4)]
    assert [losses[0, group] for group in range(4)] == [ends[0, group] for group in range(4)]
    assert losses[2, 1] == ends[2, 2]
    with pytest.raises(UsageError, match="no snapshot of state"):
        whole.prefix(3)
    with pytest.raises(UsageError, match="got 48"):
        whole.prefix(4, end=48)
    with pytest.raises(UsageError, match="no snapshot of its states"):
        whole.prefix(4, end=60)
    assert whole.playable(3) == (2, "state")


def test_a_prefix_can_be_shortened_and_what_an_engine_has_is_left_out():
    whole = catalog()
    assert whole.to_play.prefix(2) == whole.prefix(2)
    assert whole.to_play.prefix(2).prefix(2) == whole.prefix(2)
    rest = whole.suffix(3)
    assert (rest.offset, rest.first_token, rest.tokens, len(rest.chunks)) == (3, 48, 22, 2)
    assert [(unit.part, unit.group, unit.chunk) for unit in rest.units] == [
        (0, 3, 0), (1, 3, 0), (0, 4, 1), (1, 4, 1), (2, 2, 1), (3, 2, 1),
    ]  # fmt: skip
    assert rest.chunks == whole.chunks[3:]
    assert rest.suffix(1) == whole.suffix(4)
    assert rest.prefix(1) == whole.prefix(4).suffix(3)
    assert rest.playable(2) == (2, None)
    assert rest.playable(1) == (1, None)
    assert whole.suffix(1).playable(2) == (1, "state")
    names = [rest.title(group) for group in range(rest.groups)]
    assert names[1] == "window40 #3"
    fewer = rest.with_tracks({"Int8"})
    assert [track.name for track in fewer.prefix(1).tracks] == ["Int8"]
