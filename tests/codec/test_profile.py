import contextlib
import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from kvabr.codec.base import GroupContext
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.group import decode_group, encode_group
from kvabr.codec.profile import Profile
from kvabr.codec.rope import rope_tables, rotate
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import RopeSpec
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


def test_flags_of_classes_or_of_rows_come_back():
    small = fit(SHAPE, lambda: [cache(SHAPE, 200)], FitConfig(transform=False, classes=4))
    assert load(small.to_bytes())["AC-L0.flags"].shape[1] <= 4
    again = Profile.from_bytes(small.to_bytes())
    for track, depth in small.depths.items():
        assert np.array_equal(again.depth(track).coder.flag_freq, depth.coder.flag_freq)
    assert ARRAYS["AC-L0.flags"].shape[1] == SHAPE.elements_per_token


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


IMPOSSIBLE = [
    {"format": "kvabr.profile/2"},
    {"sinks": -1},
    {"sinks": "many"},
    {"sinks": 1 << 40},
    {"spec": {}},
    {"spec": None},
    {"spec": spec(4, 2, 64).to_json()},
    {"spec": SHAPE.to_json() | {"layers": 1000, "kv_heads": 1000, "head_dim": 4000}},
    {"spec": SHAPE.to_json() | {"model": ["a", "list"]}},
    {"spec": SHAPE.to_json() | {"tokenizer": 7}},
    # 32.0 equals 32, so the error would otherwise only show when a decoder slices a tensor with it.
    {"spec": SHAPE.to_json() | {"rope": SHAPE.to_json()["rope"] | {"rotary_dim": 32.0}}},
    {"spec": SHAPE.to_json() | {"rope": SHAPE.to_json()["rope"] | {"theta": 10**400}}},
    {"spec": SHAPE.to_json() | {"rope": SHAPE.to_json()["rope"] | {"frequencies": [1.0] * 15}}},
    {"spec": SHAPE.to_json() | {"rope": SHAPE.to_json()["rope"] | {"frequencies": [float("nan")] * 16}}},
    {"spec": SHAPE.to_json() | {"rope": SHAPE.to_json()["rope"] | {"factor": 0.0}}},
    {"depths": {}},
    {"depths": None},
    {"depths": {"AC-L9": FACTS["depths"]["AC-L0"]}},
    {"depths": {name: depth for name, depth in FACTS["depths"].items() if name != "AC-L0"}},
    {"depths": depths(step=0)},
    {"depths": depths(step=float("nan"))},
    {"depths": depths(step=float("inf"))},
    {"depths": depths(step=2.9)},
    {"depths": depths(step="long")},
    {"depths": depths(dead=0.6)},
    {"depths": depths(dead=float("nan"))},
    {"structure": None},
    {"structure": structure(block_heads=0)},
    {"structure": structure(block_heads=1 << 30)},
    {"structure": structure(stacks=[])},
    {"structure": structure(stacks=[["k", 0, 4, 32]])},
    {"structure": structure(stacks=[["k", 0, 4, 32], ["v", 0, 5, 32]])},
    {"structure": structure(stacks=[["k", 0, 4, 32], ["v", 0, 4, 32], ["v", 0, 1, 32]])},
    {"structure": structure(stacks=[["k", 0, 4, 32], ["q", 0, 4, 32]])},
    {"structure": structure(stacks=[["k", 0, 4.0, 32], ["v", 0, 4, 32]])},
    {"structure": structure(stacks=[["k", 0, 1 << 62, 32], ["v", 0, 4, 32]])},
    {"structure": structure(stacks=[["k", 0, 4, 32]] * 100_000)},
    *({"structure": structure(stacks=[["k", 0, 4, kept], ["v", 0, 4, 32]])} for kept in (1 << 20, -2, 3, "all", None)),
    {"mean": None},
    {"mean": ARRAYS["mean"][:1]},
    {"mean": filled("mean", float("nan"))},
    {"norm": filled("norm", 0)},
    {"norm": filled("norm", float("inf"))},
    {"norm": filled("norm", 1e30)},
    {"norm": ARRAYS["norm"].double()},
    {"block": None},
    {"block": ARRAYS["block"][..., :-1]},
    {"block": ARRAYS["block"].float()},
    {"block__gain": None},
    {"stack__0": ARRAYS["stack.0"][:-2]},
    {"stack__1": None},
    {"stack__1__gain": ARRAYS["stack.1.gain"].short()},
    {"extra": torch.zeros(3)},
    {"AC_L0__class": filled("AC-L0.class", 255)},
    {"AC_L0__class": ARRAYS["AC-L0.class"][:-1]},
    {"AC_L0__radius": filled("AC-L0.radius", 127)},
    {"AC_L0__radius": filled("AC-L0.radius", 0)},
    {"AC_L0__delta": filled("AC-L0.delta", 8)},
    {"AC_L0__freqs": ARRAYS["AC-L0.freqs"] * 2},
    {"AC_L0__freqs": ARRAYS["AC-L0.freqs"][:, :, :-1]},
    {"AC_L0__freqs": filled("AC-L0.freqs", -1)},
    {"AC_L0__freqs": torch.zeros((1, 1, 1 << 20), dtype=torch.int16)},
    {"AC_L0__freqs": ARRAYS["AC-L1.freqs"].clone()},
    {"AC_L0__flags": filled("AC-L0.flags", 0)},
    {"AC_L0__flags": filled("AC-L0.flags", 4096)},
    {"AC_L0__flags": ARRAYS["AC-L0.flags"][:, :-1]},
    {  # A small file whose flags, expanded by row, would take 16 terabytes.
        "AC_L0__radius": ARRAYS["AC-L0.radius"][:1],
        "AC_L0__flags": torch.ones((2_000_000, 1), dtype=torch.int16),
        "AC_L0__class": torch.zeros(4_000_000, dtype=torch.uint8),
    },
    {
        "AC_L0__flags": torch.ones((1, len(ARRAYS["AC-L0.radius"])), dtype=torch.int16),
        "AC_L0__class": torch.zeros(0, dtype=torch.uint8),
    },
    {"AC_L1__flags": ARRAYS["AC-L1.flags"][:1]},
    {"AC_5x__class": None},
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


def test_a_pair_turns_by_its_own_frequency_and_grows_by_the_factor():
    rope = RopeSpec(10000.0, 4, "half", (0.5, 0.003), 1.5)
    cos, sin = rope_tables(rope, 70_000, 2)
    for token, position in enumerate((70_000, 70_001)):
        for pair, frequency in enumerate(rope.frequencies):
            assert cos[token, pair] == np.float32(1.5 * np.cos(position * frequency))
            assert sin[token, pair] == np.float32(1.5 * np.sin(position * frequency))
    plain, listed = RopeSpec(10000.0, 4), RopeSpec(10000.0, 4, "half", (1.0, 0.01))
    for ours, theirs in zip(rope_tables(plain, 5, 9), rope_tables(listed, 5, 9), strict=True):
        assert np.array_equal(ours, theirs)
