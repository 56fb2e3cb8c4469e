"""A cache on another device: payloads are copied there, not decoded tensors, and the result is the same."""

import numpy as np
import pytest
import torch

from kvabr.codec import gpu
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.block_slots import BlockLayers, BlockSlots, TensorPlace
from kvabr.codec.group import decode_group, encode_group
from kvabr.types.errors import FormatError
from tests.codec.elsewhere import Elsewhere, Reachable, moved
from tests.kvdata import cache, profile, spec

TRACKS = ("FP16", "BF16", "FP8", "Int8", "FP4", "Int4")
SHAPE = spec(2, 2, 32)
CHUNK = "ab" * 32


def crossed(way):
    before = dict(moved)
    return lambda: moved[way] - before[way]


@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize("track", TRACKS)
def test_a_payload_is_decoded_where_the_cache_is(track, tokens, monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: False)  # without Triton, torch does it
    context = GroupContext(SHAPE, 0, tokens)
    frame = encode_group(cache(SHAPE, tokens), track, context, CHUNK, 0)
    payload = codec(track).encode(cache(SHAPE, tokens), context)
    wanted = torch.empty(SHAPE.shape(tokens), dtype=torch.bfloat16)
    decode_group(frame, track, context, CHUNK, 0, wanted)
    out = Elsewhere(torch.full_like(wanted, float("nan")))
    there, back = crossed("there"), crossed("back")
    with Reachable():
        decode_group(frame, track, context, CHUNK, 0, out)
    assert torch.equal(out.inner, wanted)
    assert there() == len(payload)
    assert back() <= 16  # one check of the units, and one of the remaining ones


@pytest.mark.parametrize("track", TRACKS)
def test_a_cache_is_encoded_where_it_is(track):
    context = GroupContext(SHAPE, 0, 40)
    kv = cache(SHAPE, 40)
    wanted = codec(track).encode(kv, context)
    back = crossed("back")
    with Reachable():
        assert codec(track).encode(Elsewhere(kv), context) == wanted
    assert back() == len(wanted)


@pytest.mark.parametrize("track", ["BF16", "FP8", "Int4"])
def test_a_payload_that_is_not_finite_is_refused_there_too(track):
    context = GroupContext(SHAPE, 0, 5)
    payload = bytearray(codec(track).encode(cache(SHAPE, 5), context))
    layout = codec(track).layout(SHAPE, 5)
    payload[layout.head_bytes : layout.head_bytes + 2] = b"\xff\xff"
    out = Elsewhere(torch.empty(SHAPE.shape(5)))
    with Reachable(), pytest.raises(FormatError):
        codec(track).decode(memoryview(bytes(payload)), context, out)


def test_ac_without_triton_is_decoded_here_and_copied(monkeypatch):
    side = profile(SHAPE)
    context = GroupContext(SHAPE, 0, 40, side)
    payload = memoryview(codec("AC-L0").encode(cache(SHAPE, 40), context))
    wanted = torch.empty(SHAPE.shape(40))
    codec("AC-L0").decode(payload, context, wanted)
    monkeypatch.setattr(gpu, "find_spec", lambda _: None)
    gpu.available.cache_clear()
    out = Elsewhere(torch.full_like(wanted, float("nan")))
    try:
        with Reachable(), pytest.warns(RuntimeWarning, match="extra gpu"):
            codec("AC-L0").decode(payload, context, out)
    finally:
        gpu.available.cache_clear()
    assert torch.equal(out.inner, wanted)


BLOCK, HEADS, DIM = 4, 2, 8


def paged(dtype, layers=3):
    """[block, head, token, dim of key and value] of each layer, all zeros; and its halves."""
    own = [torch.zeros(9, HEADS, BLOCK, 2 * DIM).to(dtype) for _ in range(layers)]
    return own, BlockLayers([(cache[..., :DIM], cache[..., DIM:]) for cache in own])


def group_of(tokens, dtype, layers=3):
    return torch.randint(-9, 9, (layers, 2, HEADS, tokens, DIM)).to(dtype)


def numbers(tensor):
    return tensor.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "slots",
    [
        np.arange(8, 16),
        np.array([28, 29, 30, 31, 4, 5, 6, 7]),  # whole blocks, in any order
        np.array([-1, -1, 10, 11, 0, 1, 2, 3]),  # not all of it is wanted, or whole
        np.array([-1, -1, -1, -1, 12, 13, 14, 15]),
        np.array([5, 0, -1, 35, 17, 3, 2, 1]),
    ],
    ids=["in order", "blocks", "a part of a block", "the second block", "anywhere"],
)
def test_tokens_are_written_to_their_slots_and_nowhere_else(slots, dtype):
    own, layers = paged(dtype)
    group = group_of(len(slots), dtype)
    BlockSlots(layers, slots).write(group)
    wanted = [torch.zeros(9, HEADS, BLOCK, 2 * DIM) for _ in own]
    for token, slot in enumerate(slots):
        if slot >= 0:
            for layer, cache in enumerate(wanted):
                cache[slot // BLOCK, :, slot % BLOCK] = numbers(group[layer, :, :, token]).transpose(0, 1).flatten(1)
    assert all(torch.equal(numbers(cache), want) for cache, want in zip(own, wanted, strict=True))


def test_some_tokens_of_a_group_go_to_their_own_slots():
    own, layers = paged(torch.float32)
    group, tokens = group_of(2, torch.float32), np.array([1, 5])
    BlockSlots(layers, np.arange(8)).write(group, tokens)
    assert torch.equal(own[0][0, :, 1, :DIM], group[0, 0, :, 0])
    assert torch.equal(own[2][1, :, 1, DIM:], group[2, 1, :, 1])
    assert not own[0][0, :, 0].any()


def test_a_tensor_is_a_place_too():
    out = torch.zeros(3, 2, HEADS, 8, DIM)
    place, group = TensorPlace(out), group_of(8, torch.float32)
    assert place.fits(group.shape)
    assert not place.fits(group[:2].shape)
    place.direct.write(group)
    assert torch.equal(out, group)
    place.write(2 * group)
    assert torch.equal(out, 2 * group)
