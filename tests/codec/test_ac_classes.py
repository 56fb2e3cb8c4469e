"""The AC tracks of every kind of class: windows, chunks, latents, states, K = V, unlike keys and values."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from kvabr.codec.base import GroupContext
from kvabr.codec.columns import coded_spec, has_ac, turned, turned_back
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.group import encode_group
from kvabr.codec.profile import ModelProfile, Profile, joined
from kvabr.codec.rope import rotate
from kvabr.codec.transform import plain
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import KVSpec, LayerClass, RopeSpec
from kvabr.types.naming import LAYERS
from tests.codec.native import oracle
from tests.kvdata import CHUNK, framed, unframed

CLASSES = {
    "window": LayerClass("window", (0, 1, 3), 2, 16, 16, "float16", RopeSpec(1e4, 16), window=200),
    "full": LayerClass("full", (2,), 2, 16, 16, "float16", RopeSpec(1e6, 8)),
    "chunked": LayerClass("chunked", (4,), 1, 16, 16, "bfloat16", RopeSpec(1e4, 16, "interleaved"), window=256),
    "latent": LayerClass("latent", (5, 6), 1, 40, 0, "bfloat16", RopeSpec(1e4, 8, first=32)),
    "K = V": LayerClass("full", (7, 8), 2, 16, 0, "float16"),
    "wide keys": LayerClass("full", (9, 10), 2, 24, 16, "float16", RopeSpec(1e4, 8, "interleaved", first=16)),
}
SPEC = KVSpec("test/every-class", "tokenizer", tuple(CLASSES.values()))
PARTS = dict(zip(CLASSES, SPEC.parts, strict=True))


def cache_of(part, tokens, seed=0, first=0):
    """float32, channels that share causes, as those of a model do; keys turned by their positions from ``first`` on."""
    layers, halves, heads, _, dim = part.shape(1)
    fixed, dice = (torch.Generator().manual_seed(each) for each in (97, 1000 + seed))
    mixing = torch.randn(12, layers * halves * heads * dim, generator=fixed) / 3
    causes = torch.randn(tokens, 12, generator=dice) * 3 * 0.8 ** torch.arange(12)
    kv = (causes @ mixing).view(tokens, layers, halves, heads, dim).permute(1, 2, 3, 0, 4).contiguous()
    kv += 0.05 * torch.randn(kv.shape, generator=dice)
    kv[:, 0] = rotate(kv[:, 0], part.rope, first)
    return kv


def fitted(part, **options):
    config = FitConfig(stack_layers=3, kept=(8, 8), **options)
    return fit(part, lambda: (cache_of(part, 300, seed) for seed in (101, 102)), config)


@pytest.fixture(scope="module")
def profile():
    return joined(SPEC, [fitted(part) for part in SPEC.parts])


def played(part, profile, first, tokens=100, seed=1):
    """What each layer makes of a group at a position: the group, and the decoded tensors."""
    context = GroupContext(part, first, tokens, profile, memo={})
    kv = cache_of(part, tokens, seed, first)
    frames = framed(kv, LAYERS[-1], context)
    return kv, frames, [unframed(frames[: at + 1], track, context) for at, track in enumerate(LAYERS)]


def error(kv, out):
    return float((kv - out).square().mean() / kv.square().mean())


@pytest.mark.parametrize("first", [0, 896, 70_016])
@pytest.mark.parametrize("name", PARTS)
def test_every_class_plays_at_every_position(profile, name, first):
    """Finer with every layer; and far from the beginning as well as near to it."""
    kv, frames, outs = played(PARTS[name], profile, first)
    errors = [error(kv, out) for out in outs]
    assert errors[3] < 3e-3
    assert all(finer < coarser / 2 for coarser, finer in pairwise(errors))
    assert len(frames[0]) + len(frames[1]) < kv.numel() / 2  # less than 4 bits


def on_every_path(kv, part, profile, track):
    """Return what all paths decode a group to."""
    context = GroupContext(part, 384, kv.shape[3], profile)
    frames = framed(kv, track, context)
    found = {}
    for path in oracle.PATHS:
        with oracle.taking(path):
            found[path] = unframed(frames, track, context, torch.empty_like(kv))
            again = framed(kv, track, context)  # ties may be rounded otherwise
        assert abs(len(again[0]) - len(frames[0])) < 20
    assert all(torch.equal(out, found[oracle.ORACLE]) for out in found.values())
    return found[oracle.ORACLE]


@pytest.mark.parametrize("track", ["AC-5x", "AC-L0"])
@pytest.mark.parametrize("name", PARTS)
def test_every_path_decodes_the_same_bits(profile, name, track):
    kv = cache_of(PARTS[name], 70, 3, 384)
    assert error(kv, on_every_path(kv, PARTS[name], profile, track)) < (5e-3 if track == "AC-5x" else 0.5)


def test_a_file_holds_the_profiles_of_all_classes(profile):
    assert isinstance(profile, ModelProfile)
    again = Profile.from_bytes(profile.to_bytes())
    assert (again.digest, again.spec) == (profile.digest, SPEC)
    assert set(again.tracks) == {*LAYERS, "AC-5x"}
    ours, theirs = (played(PARTS["latent"], each, 384)[2] for each in (profile, again))
    assert all(map(torch.equal, ours, theirs))
    # The group's size does not matter, although the digest of a part covers it.
    small = replace(SPEC, group_tokens=32)
    again.check(small)
    assert again.of(small.parts[1]).spec == SPEC.parts[1]


def test_a_profile_of_one_class_is_refused_for_another(profile):
    window, full = PARTS["window"], PARTS["full"]
    alone = profile.of(window)
    assert Profile.from_bytes(alone.to_bytes()).spec == window
    kv = cache_of(full, 100)
    with pytest.raises(
        ForeignError, match=r"the class window200 of test/every-class .*, but the cache is of the class full"
    ):
        encode_group(kv, "AC-5x", GroupContext(full, 0, 100, alone), CHUNK, 0)
    with pytest.raises(ForeignError, match="the class window200 of"):
        alone.check(SPEC)
    other = replace(SPEC, model="test/another").parts[0]
    with pytest.raises(ForeignError, match="calibrated for test/every-class"):
        encode_group(cache_of(other, 100), "AC-5x", GroupContext(other, 0, 100, profile), CHUNK, 0)
    with pytest.raises(ForeignError, match="calibrated for"):
        joined(SPEC, [profile.of(part) for part in (*SPEC.parts[1:], SPEC.parts[0])])
    with pytest.raises(FormatError, match="got 5"):
        joined(SPEC, [profile.of(part) for part in SPEC.parts[1:]])


def rewritten(profile, change):
    data = profile.to_bytes()
    length = int.from_bytes(data[:8], "little")
    facts = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["kvabr"])
    arrays = load(data)
    change(facts, arrays)
    return save(arrays, metadata={"kvabr": json.dumps(facts, sort_keys=True)})


@pytest.mark.parametrize(
    "change",
    [
        lambda facts, _: facts["classes"].pop("latent"),
        lambda facts, _: facts["classes"].update(spiral=facts["classes"]["full"]),
        lambda facts, _: facts.update(classes=[]),
        lambda facts, _: facts.pop("classes"),
        lambda facts, _: facts.update(spec=SPEC.parts[0].to_json()),
        lambda facts, _: facts["spec"].update(classes=facts["spec"]["classes"][:1]),
        lambda facts, _: facts["classes"].update(latent=facts["classes"]["full"]),
        lambda facts, _: facts["classes"]["latent"]["structure"]["stacks"].append(["v", 0, 1, 0]),
        lambda _, arrays: arrays.update({"full/extra": np.zeros(1)}),
        lambda _, arrays: arrays.update({"mean": np.zeros(1)}),
        lambda _, arrays: arrays.pop("window200/mean"),
        lambda _, arrays: arrays.update({"latent/mean": arrays["full/mean"]}),
    ],
)
def test_a_broken_file_of_several_classes_is_refused(profile, change):
    with pytest.raises(FormatError):
        Profile.from_bytes(rewritten(profile, change))


def test_heads_that_no_decoder_takes_are_refused():
    huge = KVSpec("test/huge", "tokenizer", (LayerClass("full", (0,), 1, 4096, 4000, "float16"),))
    with pytest.raises(FormatError, match="channels per head must be at most 4096, got 8096"):
        plain(huge)


STATES = {
    "recurrent": LayerClass("state", (0, 2), 3, 24, 40, "float32", role="recurrent"),
    "convolution": LayerClass("state", (0, 2), 1, 300, 4, "bfloat16", role="convolution"),
    "none but one": LayerClass("state", (0, 2), 2, 5, 1, "float32", role="scan"),
}
HYBRID = KVSpec("test/hybrid", "tokenizer", (*STATES.values(), LayerClass("full", (1,), 2, 8, 8, "float16")))
STATE_PARTS = dict(zip(STATES, HYBRID.parts, strict=False))


def snapshots_of(part, count=1, seed=0):
    """Sums of keys times values: the rows have scales and causes in common, in each head its own."""
    layers, _, heads, rows, columns = part.shape(part.rows)
    fixed, dice = (torch.Generator().manual_seed(each) for each in (97, 1000 + seed))
    keys = torch.randn(layers, heads, rows, 3, generator=fixed) * (2.0 ** torch.arange(-4, 4)).repeat(rows)[:rows, None]
    made = [keys @ torch.randn(layers, heads, 3, columns, generator=dice) for _ in range(count)]
    noise = (0.03 * torch.randn(each.shape, generator=dice) for each in made)
    return torch.cat([each + more for each, more in zip(made, noise, strict=True)], dim=2)[:, None]


@pytest.fixture(scope="module")
def hybrid_profile():
    made = [
        fit(part, lambda part=part: (snapshots_of(part, 8, seed) for seed in (101, 102))) for part in HYBRID.parts[:3]
    ]
    return joined(HYBRID, [*made, fitted(HYBRID.parts[3])])


@pytest.mark.parametrize("name", STATES)
def test_columns_of_a_state_stand_for_tokens(name):
    part = STATE_PARTS[name]
    coded, kv = coded_spec(part), snapshots_of(part, 3)
    columns = turned(kv, part)
    assert tuple(columns.shape) == coded.shape(3 * part.only.v_dim)
    assert coded.only.k_dim <= 128
    assert torch.equal(turned_back(columns, part), kv)
    # One column of the second snapshot: all its rows, those of a wide one in pieces.
    one = kv[1, 0, 0, part.rows : 2 * part.rows, 0]
    pieces = part.rows // coded.only.k_dim
    assert torch.equal(columns[1, 0, :pieces, part.only.v_dim].flatten(), one)
    full = HYBRID.parts[3]
    assert turned(kv, full) is turned_back(kv, full) is kv


@pytest.mark.parametrize("name", ["recurrent", "convolution"])
def test_states_play_and_are_finer_with_every_layer(hybrid_profile, name):
    part = STATE_PARTS[name]
    profile = Profile.from_bytes(hybrid_profile.to_bytes())
    kv, context = snapshots_of(part, seed=1), GroupContext(part, 5000, part.rows, profile, memo={})
    frames, errors = framed(kv, LAYERS[-1], context), []
    for at, track in enumerate(LAYERS):
        # In a cache of several snapshots, and in 16 bits: the tensor is neither contiguous nor of the state's type.
        room = torch.full(part.shape(2 * part.rows), float("nan"), dtype=torch.bfloat16)
        out = room[:, :, :, part.rows :]
        unframed(frames[: at + 1], track, context, out)
        assert bool(room[:, :, :, : part.rows].isnan().all())
        errors.append(error(kv, out.float()))
    assert all(finer < coarser / 2 for coarser, finer in pairwise(errors))
    assert errors[3] < 3e-3
    if name == "recurrent":  # what rows have in common is not paid for
        plain_bits = len(encode_group(kv, "Int4", GroupContext(part, 5000, part.rows), CHUNK, 0))
        assert sum(map(len, frames)) < plain_bits


@pytest.mark.parametrize("name", STATES)
def test_every_path_decodes_the_same_state(hybrid_profile, name):
    part = STATE_PARTS[name]
    kv = snapshots_of(part, seed=3)
    kv[0, 0, 0, 0, 0] = 65_504.0  # beyond what is coded: its column is stored as it is
    out = on_every_path(kv, part, hybrid_profile, "AC-5x")
    assert float(out[0, 0, 0, 0, 0]) == 65504.0
    kv[0, 0, 0, :, 0], out[0, 0, 0, :, 0] = 0, 0
    assert error(kv, out) < 5e-3


def test_states_of_too_many_pieces_have_no_ac():
    wide = KVSpec("test/wide", "tokenizer", (LayerClass("state", (0,), 1000, 256, 8, "float32"),))
    assert has_ac(SPEC)
    assert has_ac(HYBRID)
    assert not has_ac(wide)
    with pytest.raises(FormatError, match=r"AC-5x: AC cannot code the states of test/wide .* too long"):
        encode_group(torch.zeros(wide.shape(256)), "AC-5x", GroupContext(wide, 0, 256), CHUNK, 0)
