"""The AC tracks: decoded values, size and rejected payloads of chains of layers, for all kinds of caches."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.ac import PARTED, split_payload
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.native import coder
from kvabr.codec.profile import Profile
from kvabr.codec.quantiser import below, nested, quantise
from kvabr.codec.unusual import NOTHING, is_unusual
from kvabr.types.errors import ForeignError, FormatError
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import LAYERS
from kvabr_lab.bench.code_length import ideal_bits
from tests.examples import examples
from tests.kvdata import related, spec

pytestmark = pytest.mark.slow

FIRST = 1000
"""Position of most groups here: behind the sinks."""


SHAPE = spec(6, 2, 32, group_tokens=4096)
SMALL = FitConfig(stack_layers=3, kept=(48, 64), classes=40, outliers=0.0)
TRACKS = (*LAYERS, "AC-5x")


@functools.cache
def fitted():
    return fit(SHAPE, lambda: [related(SHAPE, 600, seed) for seed in range(4)], SMALL)


@functools.cache
def payloads_of(track):
    return encode(related(SHAPE, 70, 68), fitted(), track, 0)


def chain_of(track):
    return (*chain_of(below(track)), track) if below(track) else (track,)


def encode(kv, side, track="AC-L3", first=FIRST, memo=None):
    """Return the payloads of a track and of those below it, base first."""
    context = GroupContext(side.spec, first, kv.shape[3], side, memo)
    payloads = []
    for name in chain_of(track):
        payloads.append(codec(name).encode(kv, context, payloads))
    return payloads


def decode(payloads, side, tokens, track="AC-L3", first=FIRST, dtype=torch.float32):
    out = torch.full(side.spec.shape(tokens), float("nan"), dtype=dtype)
    views = [memoryview(payload) for payload in payloads]
    codec(track).decode(views[-1], GroupContext(side.spec, first, tokens, side), out, views[:-1])
    return out


def off_by(kv, out, side, first=FIRST):
    """Return the error of the coefficients, [row, token]."""
    wanted, got = side.analysis.analyse(kv, first).rows, side.analysis.analyse(out, first).rows
    return (wanted - got).abs()


def outliers_of(payload, context, track):
    return codec(track).outliers(memoryview(payload), context)


def near(out, kv, bits=8):
    """Return whether all errors are within a number of bits, with a scale per token, layer and K/V."""
    largest = kv.abs().amax(dim=(2, 4) if kv.dim() == 5 else (2, 3), keepdim=True)
    return bool(((out - kv).abs() <= largest / (2 ** (bits - 1) - 1) * 0.51).all())


def test_a_chain_decodes_to_just_what_its_finest_quantiser_gives():
    kv = related(SHAPE, 300, 50, FIRST)
    payloads = encode(kv, fitted())
    context = GroupContext(SHAPE, FIRST, 300, fitted())
    parts = [split_payload(payload, context, 0, track) for track, payload in zip(LAYERS, payloads, strict=True)]
    index, references = None, parts[0].references
    for track, part in zip(LAYERS, parts, strict=True):
        index = coder.decode_indices(fitted().depth(track).coder, part.coded, 300, index, references)
    rows = fitted().analysis.analyse(kv, FIRST).rows
    assert np.array_equal(index, quantise(rows, fitted().depth("AC-L3").step).numpy())


def test_layers_cost_what_one_quantiser_would_and_the_coder_adds_nothing():
    finest = fitted().depth("AC-L3").step
    both = dataclasses.replace(SMALL, steps=dict(SMALL.steps) | {"AC-5x": finest})
    side = fit(SHAPE, lambda: [related(SHAPE, 600, seed) for seed in range(4)], both)
    kv = related(SHAPE, 1024, 53, FIRST)
    layers, single = encode(kv, side), encode(kv, side, "AC-5x")
    assert sum(map(len, layers)) < 1.02 * len(single[0])
    rows = side.analysis.analyse(kv, FIRST).rows
    index = quantise(rows, finest).numpy().astype(np.int16)
    assert 8 * len(single[0]) < 1.005 * ideal_bits(side.depth("AC-5x").coder, index) + 8 * 300  # states, counts


def test_only_the_first_tokens_of_a_prompt_are_sinks():
    side = dataclasses.replace(fitted(), sinks=5)
    kv = related(SHAPE, 8, 56, FIRST)
    for first, sinks in ((0, 5), (3, 2), (5, 0)):
        context = GroupContext(SHAPE, first, 8, side)
        out = decode(encode(kv, side, "AC-L1", first), side, 8, "AC-L1", first)
        assert sum(near(out[:, :, :, token], kv[:, :, :, token]) for token in range(8)) == sinks
        assert outliers_of(encode(kv, side, "AC-L0", first)[0], context, "AC-L0") == 0


@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("finer", [1, 8, 70])
def test_the_last_tokens_of_a_prompt_are_stored_finer_and_no_reader_needs_to_know(track, finer):
    kv = related(SHAPE, 70, 71, FIRST)
    context = GroupContext(SHAPE, FIRST, 70, fitted(), finer=finer)
    payloads: list[bytes] = []
    for name in chain_of(track):
        payloads.append(codec(name).encode(kv, context, payloads))
        parted = finer == 70 and name != "AC-L3"  # fewer tokens of so few numbers are not in parts
        assert (payloads[-1][: len(PARTED)] == PARTED) == parted
        assert outliers_of(payloads[-1], context, name) == 0  # they do not stand out
    plain = decode(encode(kv, fitted(), track), fitted(), 70, track)
    out = decode(payloads, fitted(), 70, track)
    last, rest = slice(70 - finer, 70), slice(0, 70 - finer)
    bits = {"AC-L0": 6, "AC-L1": 8}.get(track, 10) if finer == 70 else 8
    assert near(out[:, :, :, last], kv[:, :, :, last], bits)
    assert not near(plain[:, :, :, last], kv[:, :, :, last], bits)
    assert float(off_by(kv, out, fitted())[:, rest].sum()) <= 1.05 * float(off_by(kv, plain, fitted())[:, rest].sum())
    each = bits / 8 * SHAPE.elements_per_token + 2 * SHAPE.layers * 2 + 4  # codes, scales, and an offset
    assert sum(map(len, payloads)) <= sum(map(len, encode(kv, fitted(), track))) + finer * each


def test_tokens_that_stand_out_are_kept_separately_and_if_they_are_many_another_codec_takes_the_group():
    wary = dataclasses.replace(SMALL, outliers=0.002)
    side = fit(SHAPE, lambda: [related(SHAPE, 600, seed) for seed in range(4)], wary)
    kv = related(SHAPE, 256, 69, FIRST)
    context = GroupContext(SHAPE, FIRST, 256, side)
    assert max(outliers_of(encode(kv, side, track)[0], context, track) for track in ("AC-L0", "AC-5x")) <= 3
    kv[2, 0, :, 77] *= 8
    for track in TRACKS:
        payloads = encode(kv, side, track)
        assert near(decode(payloads, side, 256, track)[:, :, :, 77], kv[:, :, :, 77])
    noise = torch.randn(SHAPE.shape(256)) * 20
    payloads = encode(noise, side)
    assert [outliers_of(each, context, track) for track, each in zip(LAYERS, payloads, strict=True)] == [
        256,
        0,
        0,
        256,
    ]


@pytest.mark.parametrize("value", [60000.0, -65504.0, 3000.0])
def test_tokens_out_of_range_are_kept_exact_and_counted_and_hurt_no_other(value):
    kv = related(SHAPE, 100, 57, FIRST)
    wild = kv.clone()
    wild[2, 1, 0, 30, 7] = wild[4, 0, 1, 99, 3] = value
    payloads = encode(wild, fitted())
    out, tame = decode(payloads, fitted(), 100), decode(encode(kv, fitted()), fitted(), 100)
    context = GroupContext(SHAPE, FIRST, 100, fitted())
    counted = [outliers_of(payload, context, track) for track, payload in zip(LAYERS, payloads, strict=True)]
    assert sum(counted) == 2
    others = [token for token in range(100) if token not in {30, 99}]
    assert torch.equal(out[:, :, :, [30, 99]], wild[:, :, :, [30, 99]].half().float())
    assert torch.equal(out[:, :, :, others], tame[:, :, :, others])


@pytest.mark.parametrize("track", TRACKS)
def test_a_cache_far_from_the_calibration_is_coded_as_well_only_longer(track):
    """The transform is complete: it represents what the calibration never saw."""
    noise = torch.randn(SHAPE.shape(150), generator=torch.Generator().manual_seed(1)) * 4 + 2
    payloads = encode(noise, fitted(), track)
    out = decode(payloads, fitted(), 150, track)
    assert float(off_by(noise, out, fitted()).max()) <= 1.05 * fitted().depth(track).step
    exact = is_unusual(payloads[0])  # where FP16 is smaller
    assert exact == (track == "AC-5x")
    assert outliers_of(payloads[0], GroupContext(SHAPE, FIRST, 150, fitted()), chain_of(track)[0]) == 150 * exact


def test_constant_channels_and_silent_layers():
    def constant(seed):
        kv = related(SHAPE, 300, seed)
        kv[1] = 0
        kv[3, 1, :, :, 5] = 7.0
        return kv

    side = fit(SHAPE, lambda: map(constant, range(3)), SMALL)
    side = Profile.from_bytes(side.to_bytes())
    for track in TRACKS:
        out = decode(encode(constant(9), side, track), side, 300, track)
        assert bool(torch.isfinite(out).all())
        assert float(out[1].abs().max()) < 1e-4
        assert float((out[3, 1, :, :, 5] - 7).abs().max()) <= 4 * side.depth(track).step
    # And a channel that was constant in the calibration but varies in a prompt.
    moved = constant(9)
    moved[1] += torch.randn(moved[1].shape)
    out = decode(encode(moved, side), side, 300)
    assert float((out - moved).abs().max()) < 0.5


KINDS = [
    KVSpec.uniform("mha", "t", 3, 8, 16, "bfloat16", RopeSpec(1e6, 16)),
    KVSpec.uniform("partial", "t", 2, 2, 80, "float16", RopeSpec(10000.0, 32, "interleaved")),
    KVSpec.uniform("none", "t", 4, 1, 48, "float32"),
    KVSpec.uniform("odd", "t", 1, 3, 24, "float16", RopeSpec(500.0, 8)),
    KVSpec.uniform("wide", "t", 2, 12, 64, "float16", RopeSpec(10000.0, 64)),
    KVSpec.uniform("scaled", "t", 2, 2, 32, "bfloat16", RopeSpec(1e4, 32, "half", tuple(0.7**n for n in range(16)))),
    KVSpec.uniform("longer", "t", 2, 2, 40, "float16", RopeSpec(1e4, 8, "interleaved", (0.9, 0.1, 4e-3, 2e-7), 1.36)),
]


@pytest.mark.parametrize(
    ("shape", "transform"),
    [*((shape, True) for shape in KINDS), *((KINDS[at], False) for at in (0, 3))],
    ids=lambda given: getattr(given, "model", given),
)
def test_attention_of_every_kind(shape, transform):
    side = fit(shape, lambda: [related(shape, 400, seed) for seed in range(2)], FitConfig(transform=transform))
    side = Profile.from_bytes(side.to_bytes())
    kv = related(shape, 40, 60, FIRST).to(shape.torch_dtype)
    layers = encode(kv, side, LAYERS[-1])
    chains = {track: layers[: depth + 1] for depth, track in enumerate(LAYERS)} | {"AC-5x": encode(kv, side, "AC-5x")}
    for track in TRACKS:
        out = decode(chains[track], side, 40, track)
        assert float(off_by(kv, out, side).max()) <= 1.05 * side.depth(track).step


def test_what_was_worked_out_for_one_track_serves_the_next_and_changes_nothing():
    kv = related(SHAPE, 100, 61, FIRST)
    assert encode(kv, fitted()) == encode(kv, fitted(), memo={})
    memo = {}
    first = encode(kv, fitted(), memo=memo)
    other = related(SHAPE, 100, 62, FIRST)
    assert encode(other, fitted(), memo=memo) == encode(other, fitted()) != first
    # A base by another encoder: its indices are decoded, regardless of the memo.
    coarse = dataclasses.replace(fitted().depth("AC-L0"), dead=0.3)
    lazy = dataclasses.replace(fitted(), depths=dict(fitted().depths) | {"AC-L0": coarse})
    base = encode(kv, lazy, "AC-L0")[0]
    assert base != first[0]
    context = GroupContext(SHAPE, FIRST, 100, fitted(), memo)
    payload = codec("AC-L1").encode(kv, context, [base])
    out = decode([base, payload], fitted(), 100, "AC-L1")
    assert torch.equal(out, decode(first[:2], fitted(), 100, "AC-L1"))


@examples(150)
@given(st.data(), st.sampled_from(TRACKS))
def test_truncated_and_changed_payloads_are_refused(data, track):
    payloads = list(payloads_of(track))
    which = data.draw(st.integers(0, len(payloads) - 1))
    bad = bytearray(payloads[which])
    if data.draw(st.booleans()):
        bad = bad[: data.draw(st.integers(0, len(bad) - 1))]
    else:
        place = data.draw(st.integers(0, len(bad) - 1))
        bad[place] ^= 1 << data.draw(st.integers(0, 7))
    payloads[which] = bytes(bad)
    # A flipped bit of an exact token or of an escaped index is undetectable here.
    try:
        out = decode(payloads, fitted(), 70, track, first=0)
    except FormatError:
        return
    assert bool(torch.isfinite(out).all())
    assert len(bad) == len(payloads_of(track)[which])


@given(st.binary(max_size=600), st.sampled_from(TRACKS))
def test_garbage_is_refused(garbage, track):
    with pytest.raises(FormatError):
        decode([*payloads_of(track)[:-1], garbage], fitted(), 70, track, first=0)


def test_lists_of_outliers_of_that_no_encoder_writes():
    kv = related(SHAPE, 60, 64, FIRST)
    kv[0, 1, 0, [10, 20], 0] = 60000.0
    payload = encode(kv, fitted(), "AC-5x")[0]
    far = 1 << 31
    for changed in ([far + 20, far + 10], [far + 10, far + 10], [far + 10, far + 70]):
        bad = payload[:4] + np.array(changed, "<u4").tobytes() + payload[12:]
        with pytest.raises(FormatError, match="not in ascending order"):
            decode([bad], fitted(), 60, "AC-5x")
    with pytest.raises(FormatError, match="lists 2147483641 tokens"):
        decode([b"\xf9" + b"\xff" * 3 + payload[4:]], fitted(), 60, "AC-5x")
    nan = payload[:12] + b"\xff\xff" + payload[14:]
    with pytest.raises(FormatError, match="not finite"):
        decode([nan], fitted(), 60, "AC-5x")


def test_a_wrong_profile_is_refused():
    kv = related(SHAPE, 64, 65, FIRST)
    other = fit(SHAPE, lambda: [related(SHAPE, 500, seed) for seed in (70, 71)], SMALL)
    foreign = fit(spec(6, 2, 32, rope=None), lambda: [related(SHAPE, 300, 1)], SMALL)
    for track in TRACKS:
        payloads = encode(kv, fitted(), track)
        with pytest.raises(FormatError, match="of another profile"):
            decode(payloads, other, 64, track)
        context = GroupContext(SHAPE, FIRST, 64, foreign)
        views = [memoryview(payload) for payload in payloads]
        with pytest.raises(ForeignError, match="calibrated for"):
            codec(track).decode(views[-1], context, torch.empty(SHAPE.shape(64)), views[:-1])
    with pytest.raises(FormatError, match="asset has none"):
        codec("AC-L0").encode(kv, GroupContext(SHAPE, 0, 64))


def test_a_layer_missing_in_the_middle_is_named():
    kv = related(SHAPE, 64, 66, FIRST)
    payloads = encode(kv, fitted())
    for chosen in (payloads[2:], [payloads[0], payloads[2]], []):
        with pytest.raises(FormatError, match="AC-L2 needs the payloads of AC-L0 and AC-L1"):
            codec("AC-L2").decode(
                memoryview(payloads[2]),
                GroupContext(SHAPE, FIRST, 64, fitted()),
                torch.empty(SHAPE.shape(64)),
                [memoryview(payload) for payload in chosen[:-1]],
            )
    with pytest.raises(FormatError, match="AC-L1 needs"):
        codec("AC-L2").encode(kv, GroupContext(SHAPE, FIRST, 64, fitted()), [payloads[1]])
    # Swapped layers are rejected.
    with pytest.raises(FormatError):
        decode([payloads[1], payloads[0], payloads[2]], fitted(), 64, "AC-L2")
    with pytest.raises(FormatError):
        decode([payloads[0], payloads[2]], fitted(), 64, "AC-L1")


def test_a_profile_may_have_fewer_layers():
    steps = {"AC-L0": 1.5, "AC-L1": 0.5}
    side = fit(SHAPE, lambda: [related(SHAPE, 300, 1)], dataclasses.replace(SMALL, steps=steps))
    kv = related(SHAPE, 64, 67, FIRST)
    assert float(off_by(kv, decode(encode(kv, side, "AC-L1"), side, 64, "AC-L1"), side).max()) <= 0.53
    with pytest.raises(FormatError, match="no AC-5x, only AC-L0, AC-L1"):
        encode(kv, side, "AC-5x")
    for bad in ({"AC-L1": 1.0}, {"AC-L0": 1.0, "AC-L1": 0.5}, {"AC-L0": 1.0, "Int4": 1.0}, {}):
        with pytest.raises(FormatError, match="profile:"):
            nested(bad)


@examples(25)
@given(
    st.sampled_from(TRACKS),
    st.integers(1, 200),
    st.integers(0, 5000),
    st.floats(1e-3, 100),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_whatever_comes_is_coded_to_within_a_step(track, tokens, first, loud, dtype):
    kv = (related(SHAPE, tokens, first, first) * loud).clamp(-60000, 60000)
    side = fitted()
    payloads = encode(kv, side, track, first)
    while payloads[-1] == NOTHING:  # of a few tokens FP16 is as small
        payloads.pop()
    track = chain_of(track)[len(payloads) - 1]
    out = decode(payloads, side, tokens, track, first)
    sinks = min(tokens, max(0, side.sinks - first))
    # Separately stored tokens are exact to FP16.
    slack = float(kv.abs().max()) * 2**-11 / float(side.transform.norm.min()) * 4
    assert bool((off_by(kv, out, side, first)[:, sinks:] <= 1.05 * side.depth(track).step + slack).all())
    assert torch.equal(decode(payloads, side, tokens, track, first, dtype), out.to(dtype))
