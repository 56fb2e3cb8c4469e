"""Native placing gives torch's bits, into tensors of any strides, and finds every number that is not finite."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.native import placing
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec, LayerClass
from tests.codec.native import oracle
from tests.codec.native.models import spread_out
from tests.codec.native.test_paths import DTYPES
from tests.examples import examples
from tests.kvdata import spec

TRACKS = ("FP16", "BF16", "FP8", "Int8", "FP4", "Int4")
EXTREMES = (
    *(0.0, -0.0, 65504.0, -65504.0, 65520.0, 3e38, -3e38, 2**-24, -(2**-25), 2**-14, 1e-30),
    *(1 + 2**-8, 1 + 3 * 2**-9),
)
"""Largest, subnormal, vanishing, and halfway between two numbers of 16 bits."""
PATHS = ("avx2", "portable")


def of_class(kind: str, heads: int, keys: int, values: int) -> KVSpec:
    return KVSpec("test/model", "tokenizer", (LayerClass(kind, (0, 1), heads, keys, values, "float16"),), 128)


def decoded(path: str, track: str, payload: bytes, context: GroupContext, out: torch.Tensor) -> torch.Tensor:
    with oracle.taking(path):
        codec(track).decode(memoryview(payload), context, out)
    return out


@examples(120)
@given(
    track=st.sampled_from(TRACKS),
    path=st.sampled_from(PATHS),
    dtype=st.sampled_from(DTYPES),
    kind=st.integers(0, 4),
    heads=st.integers(1, 3),
    dim=st.sampled_from((2, 8, 16, 30, 64, 80)),
    unlike=st.sampled_from((None, 0, 1, 16, 24, 80)),
    tokens=st.integers(1, 40),
    scale=st.sampled_from((1e-7, 1e-3, 1.0, 3e4)),
    seed=st.integers(0, 1 << 32),
)
def test_every_path_gives_torchs_bits(track, path, dtype, kind, heads, dim, unlike, tokens, scale, seed):
    shape = spec(2, heads, dim) if unlike is None else of_class("full", heads, dim, unlike)
    same_bits(track, path, dtype, kind, shape, tokens, scale, seed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("shape", [(1, 576, 0), (2, 192, 128), (1, 4096, 4096), (1, 9, 0)], ids=str)
def test_latents_and_the_largest_rows_are_placed(shape, track, path):
    same_bits(track, path, torch.bfloat16, 0, of_class("latent" if not shape[2] else "full", *shape), 35, 1.0, 1)


def same_bits(track, path, dtype, kind, shape, tokens, scale, seed):
    context = GroupContext(shape, 0, tokens)
    dice = torch.Generator().manual_seed(seed)
    group = torch.randn(shape.shape(tokens), generator=dice) * scale
    some = torch.randint(group.numel(), (len(EXTREMES),), generator=dice)
    if track in ("FP16", "BF16"):
        group.view(-1)[some] = torch.tensor(EXTREMES)
    payload = codec(track).encode(group, context)
    exact = decoded(oracle.ORACLE, track, payload, context, torch.empty(group.shape, dtype=dtype))
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
@pytest.mark.parametrize("unlike", [None, 0, 5])
def test_a_number_in_e4m3_that_is_none_is_found_wherever_it_is(unlike, path):
    shape = spec(1, 1, 22) if unlike is None else of_class("full", 1, 22, unlike)
    context = GroupContext(shape, 0, 9)
    payload = codec("FP8").encode(torch.randn(shape.shape(9)), context)
    out = torch.empty(shape.shape(9))
    decoded(path, "FP8", payload, context, out)
    for at in range(codec("FP8").layout(shape, 9).head_bytes, len(payload)):
        broken = bytearray(payload)
        broken[at] |= 0x7F
        with pytest.raises(FormatError, match="FP8: an element is not a number"):
            decoded(path, "FP8", bytes(broken), context, out)


@pytest.mark.parametrize("path", PATHS)
def test_every_code_of_e4m3_means_what_torch_says(path):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    shape = of_class("latent", 1, len(codes), 0)
    out = torch.empty(shape.shape(1))
    scale = torch.linspace(0.5, 2, len(codes)).half()
    with oracle.taking(path):
        assert placing.cast_scaled(codes[None], scale, out[:1])
    wanted = codes.view(torch.float8_e4m3fn).float() * scale.float()
    assert torch.equal(out[0].flatten().view(torch.int32), wanted.view(torch.int32))


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


def dequantised(out, *, units, form, tokens, dim, head, blocks):
    return placing.dequantise(units, form, tokens, dim, out, head=head, blocks=blocks)


def test_sizes_that_do_not_belong_together_are_refused():
    out, units = torch.empty(2, 2, 3, 4, 8), torch.zeros(4, 2 * 2 * 3 * 8 * 2, dtype=torch.uint8)
    assert placing.cast(units, torch.float16, out)
    with pytest.raises(ValueError, match="not as many"):
        placing.cast(units[:3], torch.float16, out)
    with pytest.raises(ValueError, match="not as many"):
        placing.cast_scaled(units[:, :96], torch.ones(95), out)
    coded, head = torch.zeros(4, 4 * 2 + 2 * 2 * 3 * 8, dtype=torch.uint8), torch.zeros(2, 2, 3, 8)
    assert placing.dequantise(coded, "Int8", 1, 8, out, head=head, blocks=1)
    good = {"form": "Int8", "tokens": 1, "dim": 8, "head": head, "blocks": 1}
    for bad in (
        *({"head": each} for each in (head[:1], None)),
        *({"form": each} for each in ("Int4", "FP4")),
        *({"tokens": each} for each in (3, 0)),
        *({"dim": each} for each in (7, 0)),
        *({"blocks": each} for each in (2, 0, -1)),
        {"units": coded[:3]},
    ):
        with pytest.raises(ValueError, match="do not belong"):
            dequantised(out, **{"units": coded} | good | bad)
    latent, alone = out.reshape(4, 1, 3, 4, 8), torch.zeros(4, 4 * 3 * 8, dtype=torch.uint8)
    head = torch.zeros(2, 4, 3, 8)
    assert placing.dequantise(alone, "Int8", 1, 8, latent, head=head)
    for dim, blocks in ((8, 1), (7, 0), (9, 0)):
        with pytest.raises(ValueError, match="do not belong"):
            placing.dequantise(alone, "Int8", 1, dim, latent, head=head, blocks=blocks)
    with pytest.raises(ValueError, match="no such cache"):
        placing.cast(units, torch.float16, torch.empty(2, 3, 3, 4, 8))


def test_torch_takes_what_native_code_cannot(monkeypatch):
    assert not placing.places(torch.zeros(2, dtype=torch.float64))
    assert not placing.places(torch.zeros(2, device="meta"))
    assert placing.places(torch.zeros(2))
    monkeypatch.setattr(placing, "_kvplace", None)
    assert not placing.places(torch.zeros(2))
