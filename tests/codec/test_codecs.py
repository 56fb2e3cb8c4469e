"""Every codec over every shape, dtype and group size, against the error that its own arithmetic allows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.group import decode_group, encode_group, payload_of
from kvabr.codec.unusual import crowded
from kvabr.types.errors import FormatError, NotFiniteError
from kvabr.types.naming import LAYERS, LEVELS
from tests.examples import examples
from tests.kvdata import cache, profile, spec

SHAPES = [(1, 1, 32), (3, 2, 64), (2, 3, 64), pytest.param((1, 4, 128), marks=pytest.mark.slow), (2, 1, 80)]
BITS = {"FP16": 16, "BF16": 16, "FP8": 8, "Int8": 8, "FP4": 4, "Int4": 4}


def round_trip(kv, track, shape, *, first=0, side=None, out=None):
    tokens = kv.shape[3]
    context = GroupContext(shape, first, tokens, side)
    frame = encode_group(kv, track, context, "ab" * 32, 7)
    out = torch.empty(shape.shape(tokens)) if out is None else out
    decode_group(frame, track, context, "ab" * 32, 7, out)
    return out, frame


def largest_in_blocks(rows):
    """The largest magnitude of the 32 neighbours in the last axis that share a scale."""
    return torch.cat([b.abs().amax(dim=-1, keepdim=True).expand_as(b) for b in rows.split(32, dim=-1)], dim=-1)


def allowed(kv, track):
    """The largest error that each element may have, by the codec's definition."""
    if track == "FP16":
        return kv.abs() * 2**-11 + 2**-24
    if track == "BF16":
        return kv.abs() * 2**-8
    if track == "FP8":
        top = kv.abs().amax(dim=3, keepdim=True)
        return kv.abs() * (2**-4 * 1.01) + top * 2**-16 + 2**-24 * 448
    if track in {"Int8", "Int4"}:
        steps = 2.0 ** BITS[track] - 1
        keys = kv[:, 0].amax(dim=2, keepdim=True) - kv[:, 0].amin(dim=2, keepdim=True)
        flat = kv[:, 1].transpose(1, 2).flatten(2)
        # A scale serves whole tokens that together have 128 channels.
        rows = torch.arange(flat.shape[1]) // -(-128 // flat.shape[2])
        span = torch.stack([
            flat[:, rows == row].amax(dim=(1, 2)) - flat[:, rows == row].amin(dim=(1, 2)) for row in rows.tolist()
        ], dim=1)  # fmt: skip
        both = torch.stack((keys.expand_as(kv[:, 0]), span[:, None, :, None].expand_as(kv[:, 1])), dim=1)
        # Half a step, and the half precision of offset and scale.
        return both / steps * 0.51 + kv.abs().amax() * 2**-10
    if track == "FP4":
        # Blocks of 32: tokens of a key channel, channels of a token's values. The widest gap is that from 4 to 6, and
        # the scale puts the largest element at 3 to 6.4: a fifth of it is the most that rounding may cost.
        keys = largest_in_blocks(kv[:, 0].transpose(2, 3)).transpose(2, 3)
        by_token = kv[:, 1].transpose(1, 2)
        values = largest_in_blocks(by_token.flatten(1)).reshape(by_token.shape).transpose(1, 2)
        return torch.stack((keys, values), dim=1) / 5 * 1.001 + 2**-18
    raise ValueError(track)


def check_ac_error(out, kv, track, side, first):
    """Where AC quantises, no coefficient is off by more than a step; separately stored tokens have 8 bits."""
    wanted, got = side.analysis.analyse(kv, first), side.analysis.analyse(out, first)
    if crowded(wanted.outlying):
        assert bool(((out - kv).abs() <= allowed(kv, "Int8")).all())
        return
    aside = wanted.outlying.clone()
    aside[: max(0, side.sinks - first)] = True
    error = (out - kv).abs()[:, :, :, aside]
    assert bool((error <= kv[:, :, :, aside].abs().amax(dim=(2, 4), keepdim=True) / 250).all())
    # Half a step of rounding, and the rounding of what the stack transform gives.
    assert bool(((got.rows - wanted.rows)[:, ~aside].abs() <= 1.05 * side.depth(track).step).all())


@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("tokens", [1, 5, 127, 128, 130])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_round_trip_within_the_error_that_the_codec_allows(track, tokens, sizes):
    shape = spec(*sizes, group_tokens=130)
    side = profile(shape) if track == "AC-5x" else None
    for first in (0, 260):
        kv = cache(shape, tokens, seed=first)
        out, _ = round_trip(kv, track, shape, first=first, side=side)
        if track == "AC-5x":
            check_ac_error(out, kv, track, side, first)
        else:
            error, limit = (out - kv).abs(), allowed(kv, track)
            assert bool((error <= limit).all()), float((error - limit).max())
        assert float((out - kv).norm() / kv.norm()) < {"FP4": 0.14, "Int4": 0.13, "AC-5x": 0.3}.get(track, 0.05)


@pytest.mark.parametrize("track", BITS)
@pytest.mark.parametrize("sizes", [(3, 3, 64), (2, 8, 128), (2, 2, 128), (2, 1, 64), (1, 1, 96), (1, 5, 80)], ids=str)
def test_size_per_weight_is_the_drafts_and_scales_cost_at_most_a_sixteenth(track, sizes):
    shape = spec(*sizes)
    kv = cache(shape, 128)
    _, frame = round_trip(kv, track, shape)
    payload = len(payload_of(frame))
    least = kv.numel() * BITS[track] // 8
    assert least <= payload <= least * 1.0625
    assert len(frame) - payload < 120


@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_float_dtype_in_and_out_and_any_strides(track, dtype):
    shape = spec(2, 2, 32)
    side = profile(shape)
    kv = cache(shape, 64).to(dtype)
    plain, _ = round_trip(kv.float(), track, shape, side=side)
    wide = torch.full((2, 2, 32, 200, 2), float("nan"), dtype=dtype)
    strided = wide.permute(0, 4, 1, 3, 2)[:, :, :, 50:114]
    turned = kv.permute(0, 1, 2, 4, 3).contiguous().permute(0, 1, 2, 4, 3)
    assert not turned.is_contiguous()
    round_trip(turned, track, shape, side=side, out=strided)
    assert torch.equal(strided, plain.to(dtype))
    assert int(torch.isnan(wide).sum()) == wide.numel() - strided.numel()


@pytest.mark.parametrize("track", LEVELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_is_refused_and_its_place_named(track, bad):
    shape = spec(2, 1, 32)
    kv = cache(shape, 8)
    kv[1, 1, 0, 3, 5] = kv[1, 1, 0, 6, 7] = bad
    with pytest.raises(NotFiniteError) as refused:
        round_trip(kv, track, shape, first=100, side=profile(shape))
    error = refused.value
    assert (error.layer, error.half, error.first, error.last) == (1, "values", 103, 106)


def test_a_tensor_of_another_shape_is_not_written_to():
    """copy_() would silently broadcast one token to five."""
    shape = spec(1, 1, 32)
    context = GroupContext(shape, 0, 1)
    frame = encode_group(cache(shape, 1), "Int8", context, "ab" * 32, 0)
    for out in (torch.zeros(shape.shape(5)), torch.zeros(shape.shape(1), dtype=torch.int32)):
        with pytest.raises(FormatError, match="cannot decode into"):
            decode_group(frame, "Int8", context, "ab" * 32, 0, out)
        assert not out.any()


@pytest.mark.parametrize("track", [*LEVELS, *LAYERS, "Raw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_track_keeps_a_number_or_refuses_it(track, dtype):
    """Whatever a group's largest number is: what comes back is as near as ever, or nothing does."""
    shape = spec(1, 2, 32).changed(dtype=str(dtype).removeprefix("torch."))
    most = codec(track).largest(shape)
    for magnitude in (1.0, 65504.0, 65505.0, 7e4, 1e9, 3.3e38):
        kv = cache(shape, 40).to(dtype)
        kv[0, 0, 0, 7, 3] = kv[0, 1, 1, 9, 4] = -magnitude
        top = float(kv.float().abs().max())
        if top > most:
            with pytest.raises(FormatError, match=f"{track} ends at"):
                round_trip(kv, track, shape, side=profile(shape))
        elif track not in LAYERS[1:]:
            out = torch.empty(kv.shape, dtype=dtype)
            round_trip(kv, track, shape, side=profile(shape), out=out)
            assert float((out.double() - kv.double()).abs().max()) <= 0.25 * top


@pytest.mark.parametrize(
    ("track", "dtype"), [("FP16", torch.float16), ("BF16", torch.bfloat16), ("Raw", torch.bfloat16)]
)
def test_exact_tracks_keep_every_finite_number_to_the_bit(track, dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = bits[torch.isfinite(bits)]  # with both zeros, and all subnormals
    shape = spec(1, 1, 32).changed(dtype=str(dtype).removeprefix("torch."))
    kv = finite[: len(finite) // 64 * 64].reshape(1, 2, 1, -1, 32)
    kv = torch.cat((kv, finite[-64:].reshape(1, 2, 1, 1, 32)), dim=3)
    out = torch.empty(kv.shape, dtype=dtype)
    round_trip(kv, track, shape, out=out)
    assert torch.equal(out.view(torch.int16), kv.view(torch.int16))


SEPARABLE = [*(track for track in LEVELS if track != "AC-5x"), "Raw"]
UNITS = [(3, 3, 64), (1, 8, 128), (2, 1, 80), (1, 1, 129), (3, 1, 5), (1, 7, 9)]


def encoded(track, sizes, tokens):
    shape = spec(*sizes, group_tokens=256, rope=None)
    context = GroupContext(shape, 0, tokens)
    payload = codec(track).encode(cache(shape, tokens), context)
    return context, payload, codec(track).layout(shape, tokens)


def decoded(track, context, payload):
    out = torch.empty(context.spec.shape(context.tokens))
    codec(track).decode(memoryview(payload), context, out)
    return out


def bounds(layout, unit):
    """Bytes and tokens of one unit."""
    begin = layout.head_bytes + unit * layout.unit_bytes
    size = layout.unit_bytes if unit < layout.units - 1 else layout.last_bytes
    first = unit * layout.unit_tokens
    return (begin, begin + size), (first, min(layout.tokens, first + layout.unit_tokens))


@examples(60)
@given(st.sampled_from(SEPARABLE), st.sampled_from(UNITS), st.integers(2, 150), st.data())
def test_a_run_decodes_from_the_head_and_its_own_units(track, sizes, tokens, data):
    context, payload, layout = encoded(track, sizes, tokens)
    whole = decoded(track, context, payload)
    first = data.draw(st.integers(0, layout.units - 1))
    last = data.draw(st.integers(first, layout.units - 1))
    (begin, _), (first_token, _) = bounds(layout, first)
    (_, end), (_, last_token) = bounds(layout, last)
    alone = payload[: layout.head_bytes] + bytes(begin - layout.head_bytes) + payload[begin:end]
    out = decoded(track, context, alone + bytes(len(payload) - end))
    assert torch.equal(out[:, :, :, first_token:last_token], whole[:, :, :, first_token:last_token])


@pytest.mark.parametrize("track", SEPARABLE)
def test_a_payload_of_another_size_is_refused(track):
    context, payload, _ = encoded(track, (2, 2, 32), 70)
    for wrong in (b"", payload[:-1], payload + b"\0"):
        with pytest.raises(FormatError, match="bytes of payload, expected"):
            decoded(track, context, wrong)


@pytest.mark.parametrize("track", SEPARABLE)
def test_groups_beyond_one_run_decode_as_those_within(track):
    """A large model's group is coded in several runs, without seams."""
    shape = spec(32, 8, 128, rope=None)
    kv = cache(shape, 70)
    context = GroupContext(shape, 0, 70)
    out = decoded(track, context, codec(track).encode(kv, context))
    assert float((out - kv).norm() / kv.norm()) < {"FP4": 0.14, "Int4": 0.13}.get(track, 0.05)
    first, last = (out[:, :, :, part] - kv[:, :, :, part] for part in (slice(32), slice(64, 70)))
    assert 0.5 < float(first.square().mean() / last.square().mean()) < 2.0 or track in {"FP16", "BF16", "Raw"}
