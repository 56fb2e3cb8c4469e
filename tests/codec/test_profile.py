import base64
import contextlib
import dataclasses
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from kvabr.codec.base import GroupContext
from kvabr.codec.calibration_fingerprint import MAX_MARKS, RUN, WINDOW, Seen, marks_of
from kvabr.codec.fit import fit
from kvabr.codec.group import decode_group, encode_group
from kvabr.codec.profile import Profile
from kvabr.codec.rope import rotate
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import RopeSpec
from tests import kvdata
from tests.examples import examples
from tests.kvdata import cache, profile, spec

SHAPE = spec(4, 2, 32)
GOOD = profile(SHAPE)
DATA = GOOD.to_bytes()
ARRAYS = load(DATA)


def facts_of(data):
    return json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["kvabr"])


FACTS = facts_of(DATA)


def test_round_trip_and_name():
    again = Profile.from_bytes(DATA)
    assert again.digest == GOOD.digest
    assert again.spec == SHAPE
    assert dataclasses.replace(again).to_bytes() == DATA  # rebuilt from its parts
    assert fit(SHAPE, lambda: (cache(SHAPE, 400, seed) for seed in (101, 102, 103))).digest == GOOD.digest
    assert len({again, GOOD}) == 2  # comparing tensors field by field would raise


def test_it_is_bound_to_its_model_but_not_to_the_size_of_groups():
    for other in (spec(4, 2, 64), spec(4, 2, 32, rope="interleaved"), spec(4, 2, 32, rope=None)):
        with pytest.raises(ForeignError, match="kvabr calibrate"):
            GOOD.check(other)
    GOOD.check(spec(4, 2, 32, group_tokens=16))


def rescaled(shape, frequencies, factor=1.0):
    return shape.changed(rope=dataclasses.replace(shape.rope, frequencies=frequencies, factor=factor))


@pytest.mark.slow
def test_a_profile_of_another_scaling_is_refused():
    """Otherwise it would decode without error, to keys rotated by wrong angles."""
    one = rescaled(SHAPE, tuple(0.5**pair for pair in range(16)), 1.25)
    made = Profile.from_bytes(profile(one).to_bytes())
    assert (made.spec, made.transform.structure.spec.rope) == (one, one.rope)
    made.check(one)
    kv, chunk = cache(one, 10), "00" * 32
    frame = encode_group(kv, "AC-5x", GroupContext(one, 0, 10, made), chunk, 0)
    out = torch.empty(kv.shape)
    decode_group(frame, "AC-5x", GroupContext(one, 0, 10, made), chunk, 0, out)
    assert float((out - kv).norm() / kv.norm()) < 0.1
    for other in (SHAPE, rescaled(one, one.rope.frequencies, 1.5), rescaled(one, (*one.rope.frequencies[:-1], 1e-4))):
        with pytest.raises(ForeignError, match="kvabr calibrate"):
            made.check(other)
        theirs = profile(other)
        assert theirs.digest != made.digest
        with pytest.raises(ForeignError):
            decode_group(frame, "AC-5x", GroupContext(other, 0, 10, theirs), chunk, 0, out)


def file_of(**changes):
    """Return a file with some arrays and facts replaced, by name with _ for - and the dot; None removes one."""
    facts, arrays = dict(FACTS), dict(ARRAYS)
    for name, value in changes.items():
        if name in facts:
            facts[name] = value
        else:
            arrays[name.replace("__", ".").replace("_", "-")] = value
    kept = {name: array.contiguous() for name, array in arrays.items() if array is not None}
    return save(kept, metadata={"kvabr": json.dumps(facts)})


def depths(**changes):
    """Return the facts of the depths, with some of AC-L0's changed."""
    return FACTS["depths"] | {"AC-L0": FACTS["depths"]["AC-L0"] | changes}


def structure(**changes):
    return FACTS["structure"] | changes


def filled(name, value):
    return torch.full_like(ARRAYS[name], value)


ROPE = SHAPE.to_json()["rope"]
ALONE = {name: depth for name, depth in FACTS["depths"].items() if name != "AC-L0"}
GOOD_STACK = ["v", 0, 4, 32]
IMPOSSIBLE = [
    {"format": "kvabr.profile/2"},
    *({"sinks": bad} for bad in (-1, "many", 1 << 40)),
    *({"spec": bad} for bad in ({}, None, spec(4, 2, 64).to_json())),
    {"spec": SHAPE.to_json() | {"layers": 1000, "kv_heads": 1000, "head_dim": 4000}},
    *({"spec": SHAPE.to_json() | bad} for bad in ({"model": ["a", "list"]}, {"tokenizer": 7})),
    # 32.0 equals 32, so the error would otherwise only show when a decoder slices a tensor with it.
    *({"spec": SHAPE.to_json() | {"rope": ROPE | bad}} for bad in ({"rotary_dim": 32.0}, {"theta": 10**400})),
    *({"spec": SHAPE.to_json() | {"rope": ROPE | {"frequencies": bad}}} for bad in ([1.0] * 15, [math.nan] * 16)),
    *({"depths": bad} for bad in ({}, None, {"AC-L9": FACTS["depths"]["AC-L0"]}, ALONE)),
    *({"depths": depths(step=bad)} for bad in (0, math.nan, math.inf, 2.9, "long")),
    *({"depths": depths(dead=bad)} for bad in (0.6, math.nan)),
    *({"structure": bad} for bad in (None, structure(block_heads=0), structure(block_heads=1 << 30))),
    *(
        {"structure": structure(stacks=bad)}
        for bad in (
            *([], [GOOD_STACK], [["k", 0, 4, 32]] * 100_000, [["k", 0, 4, 32], GOOD_STACK, ["v", 0, 1, 32]]),
            *([[kind, 0, last, 32], GOOD_STACK] for kind, last in (("k", 4.0), ("k", 1 << 62), ("k", 5), ("q", 4))),
            *([["k", 0, 4, kept], GOOD_STACK] for kept in (1 << 20, -2, 3, "all", None)),
        )
    ),
    *({name: None} for name in ("mean", "block", "block__gain", "stack__1", "AC_5x__class")),
    *({"mean": bad} for bad in (ARRAYS["mean"][:1], filled("mean", math.nan))),
    *({"norm": bad} for bad in (*(filled("norm", each) for each in (0, math.inf, 1e30)), ARRAYS["norm"].double())),
    *({"block": bad} for bad in (ARRAYS["block"][..., :-1], ARRAYS["block"].float())),
    {"stack__0": ARRAYS["stack.0"][:-2]},
    {"stack__1__gain": ARRAYS["stack.1.gain"].short()},
    {"extra": torch.zeros(3)},
    *({"AC_L0__class": bad} for bad in (filled("AC-L0.class", 255), ARRAYS["AC-L0.class"][:-1])),
    *({"AC_L0__radius": filled("AC-L0.radius", bad)} for bad in (127, 0)),
    *({"AC_L0__freqs": bad} for bad in (ARRAYS["AC-L0.freqs"] * 2, ARRAYS["AC-L1.freqs"].clone())),
    {"AC_L0__freqs": torch.zeros((1, 1, 1 << 20), dtype=torch.int16)},
    *({"AC_L0__flags": filled("AC-L0.flags", bad)} for bad in (0, 4096)),
    {"AC_L0__flags": ARRAYS["AC-L0.flags"][:, :-1]},
    {  # A small file whose flags, expanded by row, would take 16 terabytes.
        "AC_L0__radius": ARRAYS["AC-L0.radius"][:1],
        "AC_L0__flags": torch.ones((2_000_000, 1), dtype=torch.int16),
        "AC_L0__class": torch.zeros(4_000_000, dtype=torch.uint8),
    },
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids="-".join)
def test_impossible_profiles_are_refused(changes):
    Profile.from_bytes(file_of())
    with pytest.raises(FormatError):
        Profile.from_bytes(file_of(**changes))


def test_an_array_of_no_elements_and_impossible_axes_is_refused():
    empty = {"dtype": "F16", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"kvabr": json.dumps(FACTS)}, "mean": empty}).encode()
    with pytest.raises(FormatError, match="not a profile file"):
        Profile.from_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("name", ["block", "stack__0"])
def test_a_matrix_without_an_inverse_can_be_decoded_with_but_not_encoded(name):
    """A decoder only multiplies and need not check; an encoder raises before it writes anything."""
    singular = Profile.from_bytes(file_of(**{name: filled(name.replace("__", "."), 1)}))
    with pytest.raises(FormatError, match="no inverse"):
        singular.analysis.analyse(cache(SHAPE, 8), 0)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(FormatError):
        Profile.from_bytes(data)


@examples(150)
@given(st.data())
def test_mutilated_files_are_read_or_refused(data):
    raw = bytearray(DATA)
    raw[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        Profile.from_bytes(bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2, 100]))]))


@given(
    st.sampled_from(["half", "interleaved"]),
    st.integers(0, 100_000),
    st.sampled_from([2, 16, 30, 32]),
    st.floats(100, 1e6),
    st.booleans(),
    st.sampled_from([1.0, 0.5, 1.1386294361, 30.0]),
    st.booleans(),
)
def test_rope_undone_and_redone_is_the_identity_and_keeps_lengths(layout, first, rotary, theta, listed, factor, last):
    keys = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(first))
    frequencies = tuple(1 / (1 + pair) for pair in range(rotary // 2)) if listed else None
    begin = 32 - rotary if last else 0
    rope = RopeSpec(theta, rotary, layout, frequencies, factor, begin)
    turned = rotate(keys, rope, first)
    assert torch.allclose(rotate(turned, rope, first, undo=True), keys, atol=1e-5)
    there, rest = slice(begin, begin + rotary), [dim for dim in range(32) if not begin <= dim < begin + rotary]
    assert torch.allclose(turned[..., there].norm(dim=-1), factor * keys[..., there].norm(dim=-1), rtol=1e-5)
    assert torch.equal(turned[..., rest], keys[..., rest])


DICE = random.Random(5)
TEXT = DICE.choices(range(40_000), k=5000)
OTHER = DICE.choices(range(40_000), k=5000)


@pytest.fixture(scope="module")
def seen():
    return Seen.of({"one": "what it says", "two": "what else"}, [("one", TEXT[:1000]), ("one", TEXT[2000:3000])])


def test_contexts_are_recognised_wherever_they_begin(seen):
    assert seen.share(TEXT[:1000]) == 1.0
    assert seen.share(TEXT[1000:2000]) == seen.share(OTHER) == 0.0
    assert 0.4 < seen.share(TEXT[500:1500]) < 0.6
    assert 0.4 < seen.share([*OTHER[:500], *TEXT[2100:2600]]) < 0.6


def test_any_run_that_is_long_enough_leaves_a_mark(seen):
    for start in range(2000, 2800, 37):
        assert seen.share([*OTHER[:300], *TEXT[start : start + RUN + WINDOW - 1], *OTHER[300:600]]) > 0


def test_marks_are_the_same_on_every_machine():
    assert [int(mark) for mark in marks_of(list(range(40)))] == [598692272594970376]


def test_a_profile_keeps_it(seen):
    profile = kvdata.profile(kvdata.spec(4, 2, 32))
    made = replace(profile, seen=seen)
    read = Profile.from_bytes(made.to_bytes())
    assert read.digest == made.digest != profile.digest
    assert read.seen is not None
    assert read.seen.to_json() == seen.to_json()
    assert read.seen.share(TEXT[:1000]) == 1.0
    assert Profile.from_bytes(profile.to_bytes()).seen is None


@pytest.mark.parametrize(
    "change",
    [
        *({"texts": bad} for bad in (3, [["a"]], [["a", "00", 1]], [["a" * 100, "00" * 32, 1]])),
        *({"texts": bad} for bad in ([["a", "00" * 32, -1]], [["a", "00" * 32, 1]] * 300)),
        *({"marks": base64.b64encode(bad).decode()} for bad in (b"1234567", bytes(8 * (MAX_MARKS + 1)))),
        *({"marks": bad} for bad in ("!", 7)),
    ],
)
def test_damage_is_refused(seen, change):
    with pytest.raises(FormatError, match="profile"):
        Seen.from_json(seen.to_json() | change)
    with pytest.raises(FormatError, match="profile"):
        Seen.from_json([])
