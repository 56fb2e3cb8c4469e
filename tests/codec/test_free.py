"""Groups of passages: encoded without a position, and decoded at any."""

from dataclasses import replace
from functools import cache as cache_result

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.container import unpack
from kvabr.codec.fit import fit
from kvabr.codec.group import decode_group, encode_group, payload_of
from kvabr.codec.rope import rope_shape
from kvabr.types.errors import FormatError
from kvabr.types.kv import RopeSpec
from kvabr.types.naming import LAYERS, LEVELS
from tests.examples import examples
from tests.kvdata import CHUNK, cache, framed, profile, spec, unframed

SCALED = tuple(0.5**n for n in range(16))
ROPES = {
    "half": RopeSpec(10000.0, 32),
    "interleaved": RopeSpec(10000.0, 32, "interleaved"),
    "partial": RopeSpec(500000.0, 10, "half", first=6),
    "yarn": RopeSpec(10000.0, 32, "half", SCALED, 1.1386294361),
    "shrinking": RopeSpec(10000.0, 8, "interleaved", SCALED[:4], 0.5),
}
TRACKS = (*LEVELS, *LAYERS, "Raw")


@cache_result
def shape(rope):
    return spec(2, 2, 32, dtype="float32").changed(rope=ROPES[rope])


def bare(given, tokens, seed=0):
    """A cache whose keys are not rotated."""
    return cache(given.changed(rope=None), tokens, seed)


def turned(kv, rope, at):
    """The same cache with its keys rotated in double precision by positions from ``at`` on."""
    half, interleaved = rope_shape(rope)[0] // 2, rope_shape(rope)[1]
    steps = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    steps = steps if rope.frequencies is None else torch.tensor(rope.frequencies, dtype=torch.float64)
    angle = torch.arange(at, at + kv.shape[3], dtype=torch.float64)[:, None] * steps
    wanted, end = kv.double(), rope.first + 2 * half
    one, other = (slice(rope.first, end, 2), slice(rope.first + 1, end, 2)) if interleaved else (
        slice(rope.first, rope.first + half), slice(rope.first + half, end)
    )  # fmt: skip
    keys, pair = wanted[:, 0], torch.complex(wanted[:, 0, ..., one], wanted[:, 0, ..., other])
    pair = pair * torch.polar(torch.full_like(angle, rope.factor), angle)
    keys[..., one], keys[..., other] = pair.real, pair.imag
    return wanted


@examples(60)
@given(
    st.sampled_from(sorted(ROPES)),
    st.sampled_from(TRACKS),
    st.sampled_from([1, 2, 31, 127, 128]),
    st.integers(0, 1_000_000),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_every_level_decodes_at_any_position(rope, track, tokens, at, first, strange):
    given = shape(rope)
    kv = bare(given, tokens)
    if strange:
        kv[:, :, :, tokens // 2] *= 8.0  # a token that AC stores separately
    context = GroupContext(given, first, tokens, profile(given), free=True)
    frames = framed(kv, track, context)
    stays = unframed(frames, track, context, torch.empty_like(kv))
    moved = unframed(frames, track, context, torch.empty_like(kv), at=at)
    wanted = turned(stays, given.rope, at)
    # Relative to the group's largest key, which is what float32 has its precision of.
    assert float((moved - wanted).abs().amax()) <= 1e-5 * float(wanted[:, 0].abs().amax())
    assert torch.equal(moved[:, 1], stays[:, 1])
    error = float((stays - kv).norm() / kv.norm())
    assert error < {"FP4": 0.14, "Int4": 0.13, "AC-5x": 0.3, "AC-L0": 0.6, "AC-L1": 0.3}.get(track, 0.1)
    assert unpack(frames[-1])[0].first_token == first


def test_no_token_of_a_passage_is_a_sink_of_the_prompt():
    given = shape("half")
    side, kv = profile(given), bare(given, 64)
    kv[:, :, :, 0] /= 3.0  # as it is behind other tokens: like all the rest
    assert side.sinks
    listed = {}
    for free in (True, False):
        context = GroupContext(given, 0, 64, side, free=free)
        payload = payload_of(encode_group(kv, "AC-5x", context, CHUNK, 0))
        listed[free] = len(payload), codec("AC-5x").outliers(payload, context)
    assert listed[True][1] == 0
    assert listed[True][0] < listed[False][0]


@pytest.mark.parametrize("track", ["FP16", "AC-5x"])
def test_what_a_rotation_makes_too_large_saturates(track):
    given = shape("half")
    kv = bare(given, 40)
    kv[:, 0, :, 11:14] = 65_000.0
    context = GroupContext(given, 0, 40, profile(given), free=True)
    out = unframed(framed(kv, track, context), track, context, torch.empty(kv.shape, dtype=torch.float16), at=5_000)
    assert bool(torch.isfinite(out).all())
    assert float(out.abs().amax()) == 65_504.0


@pytest.mark.parametrize("track", ["Raw", "Int8", "AC-5x"])
def test_a_cache_of_codes_is_rotated_by_its_numbers(track):
    only = replace(shape("half").only, dtype="float8_e4m3fn", scales=(0.25,))
    given = replace(shape("half"), classes=(only,))
    side = fit(given, lambda: (cache(shape("half"), 400, seed) for seed in (101, 102)))
    kv = bare(given, 50)
    context = GroupContext(given, 0, 50, side, free=True)
    frames = framed(kv, track, context)
    numbers = unframed(frames, track, context, at=321)
    codes = unframed(frames, track, context, torch.empty(kv.shape, dtype=torch.float8_e4m3fn), at=321)
    assert float((codes.float() * 0.25 - numbers).norm() / numbers.norm()) < 0.03


def test_without_a_rotary_embedding_nothing_can_be_moved():
    given = spec(rope=None)
    context = GroupContext(given, 0, 10, free=True)
    with pytest.raises(FormatError, match="rotated"):
        encode_group(torch.zeros(given.shape(10)), "FP16", context, CHUNK, 0)
    frame = encode_group(torch.zeros(given.shape(10)), "FP16", GroupContext(given, 0, 10), CHUNK, 0)
    with pytest.raises(FormatError, match="rotated"):
        decode_group(frame, "FP16", context, CHUNK, 0, torch.zeros(given.shape(10)), at=5)
