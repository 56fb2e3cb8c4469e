"""Codec profiles that ship with the package: what is in them, whose caches they fit, and under which digest."""

import hashlib
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.group import decode_group, encode_group, payload_of
from kvabr.codec.profile import Profile
from kvabr.data.profiles import (
    shipped_bytes,
    shipped_profile,
    shipped_profiles,
)
from kvabr.engines.transformers.publish import find_profile
from kvabr.types.errors import ForeignError
from kvabr.types.kv import KVSpec, LayerClass, RopeSpec
from kvabr.types.naming import LAYERS
from kvabr_lab.bench import synthetic

ALL = pytest.mark.parametrize("shipped", shipped_profiles(), ids=lambda each: each.title)
CHUNK = "ab" * 32
FULL = (5, 11, 17)
GEMMA = KVSpec(
    "google/gemma-3-270m",
    "tokenizer",
    (
        LayerClass(
            "window", tuple({*range(18)} - {*FULL}), 1, 256, 256, "bfloat16", RopeSpec(10000.0, 256), window=512
        ),
        LayerClass("full", FULL, 1, 256, 256, "bfloat16", RopeSpec(1000000.0, 256)),
    ),
)
"""Gemma 3 270M under a name and a type of its own."""


def elsewhere(spec: KVSpec) -> KVSpec:
    """The same model in a folder of another name, in another type and cut into other groups."""
    classes = tuple(replace(each, dtype="bfloat16") for each in spec.classes)
    return replace(spec, model='somebody\'s "Modell"-ä', tokenizer="theirs", classes=classes, group_tokens=64)


@ALL
def test_the_file_is_the_one_that_the_table_names(shipped):
    data = shipped.read()
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (shipped.sha256, shipped.size)
    assert shipped.size < 8.5e6
    profile = Profile.from_bytes(data)
    assert profile.spec == shipped.spec
    assert set(profile.tracks) == {*LAYERS, "AC-5x"}


@ALL
def test_another_shape_has_none(shipped):
    spec = shipped.spec
    first, *others = spec.classes
    fewer = replace(first, layers=first.layers[:-1])
    turned = replace(first, rope=replace(first.rope, theta=first.rope.theta * 2))
    quantised = replace(first, dtype="float8_e4m3fn", scales=(1.0,))
    for changed in (turned, quantised, *([] if others else [fewer])):
        foreign = replace(spec, classes=(changed, *others))
        assert shipped_profile(foreign) is None
        assert find_profile(foreign) is None
        assert shipped_bytes("0" * 64, shipped.size, foreign) is None
        with pytest.raises(ForeignError, match="calibrated for"):
            Profile.from_bytes(shipped.read()).check(foreign)
    if others:
        assert all(shipped_profile(part) is None for part in spec.parts)


@ALL
def test_bound_to_a_model_it_has_its_names_and_the_same_numbers(shipped):
    spec = elsewhere(shipped.spec)
    data = shipped.bound(spec)
    profile, original = Profile.from_bytes(data), Profile.from_bytes(shipped.read())
    profile.check(spec)
    with pytest.raises(ForeignError):
        original.check(spec)
    length, before = (8 + int.from_bytes(each[:8], "little") for each in (data, shipped.read()))
    assert length % 8 == 0
    assert data[length:] == shipped.read()[before:]
    assert (profile.seen and profile.seen.to_json()) == (original.seen and original.seen.to_json())
    # Everybody makes the same bytes, whatever the groups.
    assert shipped.bound(replace(spec, group_tokens=128)) == data
    again = Profile.from_bytes(data)
    again.__dict__.pop("_file")
    assert json.loads(again.to_bytes()[8:length])["__metadata__"] == json.loads(data[8:length])["__metadata__"]


@ALL
def test_players_have_it_under_both_digests(shipped):
    spec = elsewhere(shipped.spec)
    data = shipped.bound(spec)
    name = hashlib.sha256(data).hexdigest()
    assert shipped_bytes(shipped.sha256, shipped.size, GEMMA) == shipped.read()
    assert shipped_bytes(name, len(data), spec) == data
    assert shipped_bytes(name, len(data), replace(spec, model="another")) is None
    assert shipped_bytes("0" * 64, len(data), spec) is None


@pytest.mark.parametrize("number", [0, 1])
def test_groups_of_every_class_of_gemma_are_coded(number):
    part = GEMMA.parts[number]
    profile = find_profile(GEMMA)
    kv = synthetic.cache(profile.of(part), 70)
    context, frames, errors = GroupContext(part, 0, 70, profile, memo={}), [], []
    for track in LAYERS:
        frames.append(encode_group(kv, track, context, CHUNK, 0, [payload_of(frame) for frame in frames]))
        out = torch.empty_like(kv)
        decode_group(frames[-1], track, context, CHUNK, 0, out, [payload_of(frame) for frame in frames[:-1]])
        errors.append(float((kv.float() - out.float()).square().mean()))
    assert all(finer < coarser / 2 for coarser, finer in pairwise(errors))
    bits = [8 * sum(map(len, frames[:count])) / kv.numel() for count in (1, 4)]
    assert bits[0] < 1
    assert bits[1] < 6
