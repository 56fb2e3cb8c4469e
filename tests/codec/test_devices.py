"""A cache on another device: payloads are copied there, not decoded tensors, and the result is the same."""

import pytest
import torch

from kvabr.codec import gpu
from kvabr.codec.base import GroupContext, codec
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
