"""What the AC tracks do with groups that are unlike others: repeated texts, absurd numbers, and very short groups."""

import functools
import itertools

import pytest
import torch

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.centred import Centred
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.group import payload_of
from kvabr.codec.rope import rotate
from kvabr.codec.unusual import (
    LAYERED,
    NOTHING,
    NOTHING_ABOVE,
    OTHER,
    OTHERS,
    is_unusual,
    read_chain,
    repeated,
)
from kvabr.types.errors import FormatError
from kvabr.types.naming import LAYERS
from tests.kvdata import framed, related, spec, unframed

SHAPE = spec(4, 2, 32, group_tokens=128)
TRACKS = (*LAYERS, "AC-5x")
FIRST = 500


@functools.cache
def fitted(outliers=0.0):
    small = FitConfig(stack_layers=2, kept=(32, 32), classes=16, outliers=outliers)
    return fit(SHAPE, lambda: [related(SHAPE, 500, seed) for seed in range(4)], small)


def frames_of(kv, track):
    return framed(kv, track, GroupContext(SHAPE, FIRST, kv.shape[3], fitted(), memo={}))


def decoded(frames, track, tokens):
    return unframed(frames, track, GroupContext(SHAPE, FIRST, tokens, fitted()))


def kind(frame):
    return int.from_bytes(payload_of(frame)[:4], "little")


def copies(each=1, tokens=128):
    """Return a cache of the same few tokens again and again: equal but for the rotation of keys."""
    some = related(SHAPE, each, 11, FIRST)
    some[:, 0] = rotate(some[:, 0], SHAPE.rope, FIRST, undo=True)
    kv = some.repeat(1, 1, 1, tokens // each, 1)
    kv[:, 0] = rotate(kv[:, 0], SHAPE.rope, FIRST)
    return kv


def with_repeated_words(period, length=None, tokens=128):
    """Return a cache of unlike tokens, whose words, in the first layer, are those of ``period`` tokens before."""
    kv = related(SHAPE, tokens, 12, FIRST)
    end = tokens if length is None else period + length
    for token in range(period, end):
        kv[0, 1, :, token] = kv[0, 1, :, token - period]
    return kv


@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 128])
@pytest.mark.parametrize("loud", [1, 30, 1000, 60000])
def test_every_finite_cache_is_encoded_and_none_is_larger_than_fp16(track, tokens, loud):
    kv = related(SHAPE, tokens, 21, FIRST)
    kv[..., : max(1, tokens // 2), :] *= loud
    kv = kv.clamp(-65504, 65504)
    frames = frames_of(kv, track)
    assert sum(len(payload_of(frame)) for frame in frames) <= 1.01 * 2 * kv.numel() + 4 * len(frames)
    out = decoded(frames, track, tokens)
    assert bool(torch.isfinite(out).all())
    loudest = kv.abs().amax(dim=(1, 2, 3, 4))
    assert bool(((out - kv).abs().amax(dim=(1, 2, 3, 4)) <= 0.5 * loudest + 60).all())


@pytest.mark.parametrize("far", [1.0, 500.0])
def test_tokens_that_are_all_alike_keep_what_they_have_in_common(far):
    kv = (far * copies()).clamp(-65504, 65504)
    kv += 0.001 * torch.randn(kv.shape, generator=torch.Generator().manual_seed(4))
    context, out = GroupContext(SHAPE, FIRST, 128), torch.empty(kv.shape)
    payload = Centred("Int4").encode(kv, context)
    Centred("Int4").decode(memoryview(payload), context, out)
    assert float((out - kv)[:, 1].abs().max()) <= 0.001 + float(kv.abs().max()) / 2**11
    assert 8 * len(payload) / kv.numel() < 4.7


def test_medians_never_move_values_out_of_reach():
    kv = torch.full(SHAPE.shape(128), -65504.0)
    kv[..., :60, :] = 65504
    context, out = GroupContext(SHAPE, FIRST, 128), torch.empty(kv.shape)
    Centred("Int4").decode(memoryview(Centred("Int4").encode(kv, context)), context, out)
    assert float((out - kv).abs().max()) <= 64
    for payload in (b"", Centred("Int4").encode(kv, context)[:-1], b"\xff" * len(Centred("Int4").encode(kv, context))):
        with pytest.raises(FormatError):
            Centred("Int4").decode(memoryview(payload), context, out)


def test_a_group_that_is_smaller_in_fp16_is_in_fp16():
    noise = (100 * torch.randn(SHAPE.shape(1), generator=torch.Generator().manual_seed(3))).half().float()
    frames = frames_of(noise, "AC-5x")
    assert kind(frames[0]) == OTHER
    assert len(payload_of(frames[0])) == 5 + 2 * noise.numel()
    assert torch.equal(decoded(frames, "AC-5x", 1), noise)


def test_one_token_many_times_is_coded_by_an_integer_codec():
    kv = copies()
    frames = frames_of(kv, "AC-L3")
    assert [kind(frame) for frame in frames] == [OTHER, NOTHING_ABOVE, NOTHING_ABOVE, OTHER]
    out = torch.empty(SHAPE.shape(128))
    context = GroupContext(SHAPE, FIRST, 128, fitted())
    coarse, fine = Centred("Int4"), Centred("Int8")
    for depth, (track, made) in enumerate(zip(LAYERS, (coarse, coarse, coarse, fine), strict=True)):
        made.decode(memoryview(made.encode(kv, context)), context, out)
        assert torch.equal(decoded(frames[: depth + 1], track, 128), out)
    assert codec("AC-L0").outliers(payload_of(frames[0]), context) == 128
    assert codec("AC-L1").outliers(payload_of(frames[1]), context) == 0


@pytest.mark.parametrize("each", [4, 8, 16])
def test_the_base_of_copies_contains_the_layers_above_with_their_values(each, monkeypatch):
    kv = copies(each)
    frames = frames_of(kv, "AC-L3")
    assert kind(frames[0]) == LAYERED
    inside = payload_of(frames[0])[4]
    assert [bytes(payload_of(frame)) == NOTHING for frame in frames[1:]] == [place < inside for place in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr("kvabr.codec.unusual._COPIES", ())
        patch.setattr("kvabr.codec.unusual._MIN_REPEATED_SHARE", 2)
        usual = frames_of(kv, "AC-L3")
    assert not any(is_unusual(payload_of(frame)) for frame in usual)
    for depth, track in enumerate(LAYERS):
        top = max(depth, inside)
        wanted = decoded(usual[: top + 1], LAYERS[top], 128)
        assert torch.equal(decoded(frames[: depth + 1], track, 128), wanted)
    # A publisher that makes layers later reads what is below from its store.
    context = GroupContext(SHAPE, FIRST, 128, fitted())
    below = [bytes(payload_of(frame)) for frame in frames]
    assert codec("AC-L3").encode(kv, context, below[:3]) == below[3]
    assert sum(map(len, frames)) < sum(map(len, usual)) + 64


@pytest.mark.parametrize(
    ("period", "length", "share"), [(70, 58, 58), (2, 126, 126), (40, 32, 32), (40, 31, 0), (90, 38, 38)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_repeated_words_are_counted_if_they_follow_each_other(period, length, share, dtype):
    kv = with_repeated_words(period, length).to(dtype)
    assert repeated(kv, SHAPE) == share / 128
    again = torch.cat((related(SHAPE, 128, 13, FIRST).to(dtype), kv), dim=3)
    assert repeated(again, SHAPE) == share / 128  # of the second tile


def test_the_base_of_repeated_words_contains_the_next_layer_although_its_errors_are_not_copies():
    for period, contains in ((70, True), (76, True), (100, False)):
        base, above = frames_of(with_repeated_words(period), "AC-L1")
        assert (kind(base) == LAYERED) == contains
        assert (bytes(payload_of(above)) == NOTHING) == contains
        if contains:
            assert payload_of(base)[4] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_at_the_end_of_a_type_are_decoded(dtype):
    kv = copies().to(dtype)
    kv[1, 1, :, :, 0] = 65_280.0  # the last in bfloat16 before FP16 ends
    for track in TRACKS:
        assert bool(torch.isfinite(decoded(frames_of(kv, track), track, 128)).all())


def test_payloads_that_no_encoder_writes_are_refused():
    plain = b"\0" * 300
    other = OTHER.to_bytes(4, "little")
    layers = LAYERED.to_bytes(4, "little")
    inside = layers + b"\1" + b"\1\0\0\0" * 2
    bad = [
        *(([each], "AC-L0") for each in (other, other + b"\5", NOTHING, layers, layers + b"\0" + b"\1\0\0\0" + b"x")),
        *(([inside + each], "AC-L0") for each in (b"x", b"xyz")),
        *(([each], "AC-5x") for each in (NOTHING + b"x", inside + b"xy")),
        *(([*each, plain], "AC-L0 AC-L1") for each in ([other + b"\0"], [inside + b"xy"])),
        ([plain, other + b"\0"], "AC-L0 AC-L1"),
        ([plain, NOTHING, plain], "AC-L0 AC-L1 AC-L2"),
    ]
    for payloads, tracks in bad:
        with pytest.raises(FormatError):
            read_chain(tracks.split(), payloads)
    good = read_chain(("AC-L0", "AC-L1", "AC-L2"), [inside + b"xy", NOTHING, plain])
    assert good.tracks == LAYERS[:3]
    assert not good.full
    assert read_chain(("AC-L0", "AC-L1"), [plain, NOTHING]).full
    assert len(OTHERS) == 5
    for one, two in itertools.pairwise(TRACKS[:4]):
        assert read_chain((one, two), [plain, plain]).tracks == (one, two)
