"""Native placing gives torch's bits, into tensors of any strides, and finds every number that is not finite."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.native import coder, placing
from kvabr.types.errors import FormatError
from tests.codec.native.models import spread_out
from tests.codec.native.test_paths import DTYPES, taking
from tests.examples import examples
from tests.kvdata import spec

TRACKS = ("FP16", "BF16", "Int8", "Int4")
EXTREMES = (
    0.0,
    -0.0,
    65504.0,
    -65504.0,
    65520.0,
    3e38,
    -3e38,
    2**-24,
    -(2**-25),
    2**-14,
    1e-30,
    1 + 2**-8,
    1 + 3 * 2**-9,
)
"""Largest, subnormal, vanishing, and halfway between two numbers of 16 bits."""
PATHS = ("avx2", "portable")

pytestmark = pytest.mark.skipif(not placing.places(torch.zeros(1)), reason="the extension is not built")


def decoded(path: str, track: str, payload: bytes, context: GroupContext, out: torch.Tensor) -> torch.Tensor:
    with taking(path):
        codec(track).decode(memoryview(payload), context, out)
    return out


@examples(60)
@given(
    track=st.sampled_from(TRACKS),
    path=st.sampled_from(PATHS),
    dtype=st.sampled_from(DTYPES),
    kind=st.integers(0, 4),
    heads=st.integers(1, 3),
    dim=st.sampled_from((2, 8, 16, 30, 64, 80)),
    tokens=st.integers(1, 40),
    scale=st.sampled_from((1e-7, 1e-3, 1.0, 3e4)),
    seed=st.integers(0, 1 << 32),
)
def test_every_path_gives_torchs_bits(track, path, dtype, kind, heads, dim, tokens, scale, seed):
    shape = spec(2, heads, dim)
    context = GroupContext(shape, 0, tokens)
    dice = torch.Generator().manual_seed(seed)
    group = torch.randn(shape.shape(tokens), generator=dice) * scale
    some = torch.randint(group.numel(), (len(EXTREMES),), generator=dice)
    if track in ("FP16", "BF16"):
        group.view(-1)[some] = torch.tensor(EXTREMES)
    payload = codec(track).encode(group, context)
    exact = decoded("reference", track, payload, context, torch.empty(group.shape, dtype=dtype))
    out = spread_out(tuple(group.shape), dtype, kind)
    everything = torch.empty(0, dtype=dtype).set_(out.untyped_storage()).fill_(7)
    decoded(path, track, payload, context, out)
    assert torch.equal(out.contiguous().view(torch.uint8), exact.view(torch.uint8))
    out.fill_(7)
    assert bool((everything == 7).all())  # nothing beside it was written


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("track", "bad"), [("FP16", 0x7C00), ("FP16", 0xFE01), ("BF16", 0x7F80), ("BF16", 0xFFC0)])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(track, bad, dtype, path):
    shape = spec(1, 1, 22)
    context = GroupContext(shape, 0, 9)
    payload = codec(track).encode(torch.randn(shape.shape(9)), context)
    out = torch.empty(shape.shape(9), dtype=dtype)
    decoded(path, track, payload, context, out)
    for at in range(0, len(payload), 2):
        broken = bytearray(payload)
        struct.pack_into("<H", broken, at, bad)
        with pytest.raises(FormatError, match=f"{track}: contains a number that is not finite"):
            decoded(path, track, bytes(broken), context, out)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("track", ["Int8", "Int4"])
def test_scales_that_are_not_finite_are_found(track, path):
    shape = spec(2, 2, 64)
    context = GroupContext(shape, 0, 5)
    payload = codec(track).encode(torch.randn(shape.shape(5)), context)
    layout = codec(track).layout(shape, 5)
    scales = 4 * shape.layers  # one block of heads
    for unit in range(layout.units):
        for at in range(0, scales, 2):
            broken = bytearray(payload)
            struct.pack_into("<H", broken, layout.head_bytes + unit * layout.unit_bytes + at, 0x7C00)
            with pytest.raises(FormatError, match="not finite"):
                decoded(path, track, bytes(broken), context, torch.empty(shape.shape(5)))


def test_sizes_that_do_not_belong_together_are_refused():
    out, units = torch.empty(2, 2, 3, 4, 8), torch.zeros(4, 2 * 2 * 3 * 8 * 2, dtype=torch.uint8)
    assert placing.cast(units, torch.float16, out)
    with pytest.raises(ValueError, match="not as many"):
        placing.cast(units[:3], torch.float16, out)
    coded = torch.zeros(4, 4 * 2 + 2 * 2 * 3 * 8, dtype=torch.uint8)
    head = torch.zeros(2, 2, 3, 8)
    assert placing.affine(coded, head, 8, 1, 1, out)
    for units, keys, bits, tokens, blocks in (
        (coded[:3], head, 8, 1, 1),
        (coded, head[:1], 8, 1, 1),
        (coded, head, 4, 1, 1),
        (coded, head, 5, 1, 1),
        (coded, head, 8, 3, 1),
        (coded, head, 8, 0, 1),
        (coded, head, 8, 1, 2),
        (coded, head, 8, 1, 0),
    ):
        with pytest.raises(ValueError, match="do not belong"):
            placing.affine(units, keys, bits, tokens, blocks, out)


def test_torch_takes_what_native_code_cannot(monkeypatch):
    assert not placing.places(torch.zeros(2, dtype=torch.float64))
    assert not placing.places(torch.zeros(2, device="meta"))
    monkeypatch.setenv(coder.VARIABLE, "reference")
    assert not placing.places(torch.zeros(2))
