"""Tokens that refer to others: the same values in fewer bytes, and payloads that are refused."""

import dataclasses
import functools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.ac import STREAMED
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.fit import fit
from kvabr.codec.native.references import (
    LANES,
    TILE,
    join_references,
    pack_references,
    read_references,
    references_size,
    tiles,
)
from kvabr.codec.profile import Profile
from kvabr.codec.referring import MARK
from kvabr.codec.rope import rotate
from kvabr.types.errors import FormatError
from tests.codec.native.models import some_references
from tests.codec.test_ac import FIRST, SHAPE, SMALL, TRACKS, chain_of, decode, encode
from tests.examples import examples
from tests.kvdata import related

pytestmark = pytest.mark.slow


def without(profile):
    """Return a profile that has no tables for tokens that refer to others."""
    plain = {
        track: dataclasses.replace(depth, coder=dataclasses.replace(depth.coder, near=None))
        for track, depth in profile.depths.items()
    }
    return dataclasses.replace(profile, depths=plain)


def repeated(tokens, seed=5, first=FIRST):
    """Return a cache of which each tile's second half resembles the first, in another order."""
    kv, noise = related(SHAPE, tokens, seed, first), related(SHAPE, tokens, seed + 1, first)
    kv[:, 0] = rotate(kv[:, 0], SHAPE.rope, first, undo=True)
    order = torch.randperm(LANES, generator=torch.Generator().manual_seed(seed))
    for tile in tiles(tokens):
        later = torch.arange(tile.start + LANES, tile.stop)
        like = order[: len(later)] + tile.start
        kv[:, :, :, later] = 0.98 * kv[:, :, :, like] + 0.02 * noise[:, :, :, later]
    kv[:, 0] = rotate(kv[:, 0], SHAPE.rope, first)
    return kv


@functools.cache
def fitted():
    """Return a profile that was calibrated on such caches."""
    return fit(SHAPE, lambda: [repeated(600, seed, 0) for seed in range(0, 6, 2)], SMALL)


@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("tokens", [128, 100, 300])
def test_values_are_the_same_in_fewer_bytes(track, tokens):
    kv = repeated(tokens)
    with_tables, plain = encode(kv, fitted(), track), encode(kv, without(fitted()), track)
    with_marks, without_any = ([payload.removeprefix(STREAMED) for payload in some] for some in (with_tables, plain))
    assert with_marks[0].startswith(MARK)
    assert not any(payload.startswith(MARK) for payload in without_any)
    assert sum(map(len, with_tables)) < sum(map(len, plain))
    assert torch.equal(decode(with_tables, fitted(), tokens, track), decode(plain, fitted(), tokens, track))


def test_layers_of_other_calls_know_the_references_of_their_base():
    """An encoder that has the payloads below, and nothing else, makes the same layers."""
    kv, memo = repeated(128), {}
    context = GroupContext(SHAPE, FIRST, 128, fitted())
    payloads = encode(kv, fitted(), memo=memo)
    again = [codec(track).encode(kv, context, payloads[:at]) for at, track in enumerate(chain_of("AC-L3"))]
    assert again == payloads


def test_the_road_of_profiles_with_tables_and_without():
    made = fitted()
    read = Profile.from_bytes(made.to_bytes()).of(SHAPE)
    for track, depth in made.depths.items():
        near = read.depths[track].coder.near
        assert np.array_equal(near.freqs, depth.coder.near.freqs)
        assert np.array_equal(near.bucket, depth.coder.near.bucket)
    assert Profile.from_bytes(without(made).to_bytes()).of(SHAPE).depths["AC-L0"].coder.near is None


@examples(30)
@given(seed=st.integers(0, 1 << 32), tokens=st.sampled_from((65, 100, 127, 128, 192, 193, 300)))
def test_references_are_read_as_they_were_written(seed, tokens):
    made = some_references(np.random.default_rng(seed), tokens)
    data = pack_references(made)
    read = read_references(data, tokens)
    assert len(data) == references_size(tokens)
    assert np.array_equal(read.place, made.place)
    assert np.array_equal(read.lane, made.lane)
    for tile in tiles(tokens):
        assert sorted(read.place[tile].tolist()) == list(range(tile.stop - tile.start))
    assert sorted(read.order.tolist()) == list(range(tokens))


@pytest.mark.parametrize(
    ("tokens", "change"),
    [
        (128, lambda data: data.__setitem__(0, data[0] ^ 1)),
        (128, lambda data: data.__setitem__(-1, LANES)),
        (100, lambda data: data.__setitem__(12, data[12] | 0x80)),
        (128, lambda data: data.append(0)),
        (128, lambda data: data.pop()),
    ],
)
def test_references_that_no_encoder_writes_are_refused(tokens, change):
    data = bytearray(pack_references(join_references({}, tokens)))
    change(data)
    with pytest.raises(FormatError, match="references"):
        read_references(data, tokens)


def test_payloads_that_lie_are_refused():
    payload = encode(repeated(128), fitted())[0]
    with pytest.raises(FormatError):
        decode([payload[: len(MARK) + 20]], fitted(), 128, "AC-L0")
    with pytest.raises(FormatError):
        decode([MARK + payload], fitted(), 128, "AC-L0")
    with pytest.raises(FormatError, match="64 tokens"):
        decode([payload], fitted(), 64, "AC-L0")
    with pytest.raises(FormatError, match="lists"):
        decode([payload, payload], fitted(), 128, "AC-L1")
    assert struct.unpack("<I", MARK)[0] < 0xFFFFFFFD
    assert TILE == 2 * LANES
