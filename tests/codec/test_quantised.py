"""Caches that an engine keeps in FP8 are carried code by code; other levels carry the numbers that the codes mean."""

from dataclasses import replace

import pytest
import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.container import header_bytes
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.group import decode_group, decode_payload, encode_group, payload_of
from kvabr.codec.quantised import codes_of, convert, numbers_of, scales_of
from kvabr.types.errors import FormatError, NotFiniteError
from kvabr.types.kv import KVSpec, LayerClass
from tests.codec.native import oracle
from tests.kvdata import CHUNK, framed, unframed

ALIKE = LayerClass("full", (0, 1), 2, 16, 16, "float8_e4m3fn", scales=(0.25,))
CLASSES = {
    "one scale": ALIKE,
    "per layer": replace(ALIKE, scales=(0.1, 0.2, 3.0, 0.04)),
    "per head": replace(ALIKE, scales=tuple(0.1 * n for n in range(1, 9))),
    "E5M2": replace(ALIKE, dtype="float8_e5m2", scales=(0.001, 0.2, 3.0, 1.0)),
    "unlike": replace(ALIKE, v_dim=9, scales=(0.1, 0.2, 3.0, 0.04)),
    "unlike per head": replace(ALIKE, k_dim=7, scales=tuple(0.1 * n for n in range(1, 9))),
    "latent": LayerClass("latent", (0, 1, 2), 1, 72, 0, "float8_e4m3fn", scales=(0.5, 1.0, 2.0)),
    "indexer": LayerClass("latent", (0,), 1, 16, 0, "float8_e5m2", role="indexer", scales=(1.0,)),
}


def spec_of(name):
    return KVSpec("test/model", "tokenizer", (CLASSES[name],), 128)


def codes(spec, tokens=40):
    """Every finite code of the type, in turn."""
    kind = spec.torch_dtype
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every.view(kind).float().isfinite()]
    count = torch.Size(spec.shape(tokens)).numel()
    return every.repeat(-(-count // len(every)))[:count].view(kind).reshape(spec.shape(tokens))


def same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def round_trip(kv, level, spec, out):
    context = GroupContext(spec, 0, kv.shape[3])
    (frame,) = framed(kv, level, context)
    unframed([frame], level, context, out)
    return frame


@pytest.mark.parametrize("name", CLASSES)
def test_codes_come_back_to_the_bit_and_are_never_wider(name):
    spec = spec_of(name)
    kv = codes(spec)
    out = torch.zeros(spec.shape(50), dtype=spec.torch_dtype)[:, :, :, 5:45]
    frame = round_trip(kv, "Raw", spec, out)
    assert same(out, kv)
    assert len(frame) == header_bytes("Raw") + kv.numel()
    assert bytes(payload_of(frame)) == kv.permute(3, 0, 1, 2, 4).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("path", ["avx2", "portable", oracle.ORACLE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLASSES)
def test_into_another_type_come_the_numbers(name, dtype, path):
    spec = spec_of(name)
    kv, out = codes(spec), torch.empty(spec.shape(40), dtype=dtype)
    with oracle.taking(path):
        round_trip(kv, "Raw", spec, out)
    wanted = kv.float() * scales_of(spec)
    if dtype == torch.float16:
        wanted = wanted.clamp(-65504, 65504)
    assert torch.equal(out, wanted.to(dtype))


def test_scales_are_those_of_their_layer_vector_and_head():
    assert scales_of(spec_of("one scale")).unique().tolist() == [0.25]
    layers = scales_of(spec_of("per layer"))
    assert layers.shape == (2, 2, 2, 1, 16)
    assert torch.allclose(layers[:, :, 1, 0, 3], torch.tensor([[0.1, 0.2], [3.0, 0.04]]))
    heads = scales_of(spec_of("per head"))
    assert torch.allclose(heads[1, 0, :, 0, 0], torch.tensor([0.5, 0.6]))
    unlike = scales_of(spec_of("unlike"))
    assert unlike.shape == (2, 1, 2, 1, 25)
    assert torch.allclose(unlike[1, 0, 0, 0, [0, 15, 16, 24]], torch.tensor([3.0, 3.0, 0.04, 0.04]))
    heads = scales_of(spec_of("unlike per head"))
    assert torch.allclose(heads[0, 0, :, 0, [6, 7]], torch.tensor([[0.1, 0.3], [0.2, 0.4]]))
    assert torch.allclose(scales_of(spec_of("latent"))[:, 0, 0, 0, 71], torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("level", ["FP16", "BF16", "FP8", "Int8", "FP4", "Int4"])
@pytest.mark.parametrize("name", ["per head", "E5M2", "unlike", "latent"])
def test_other_levels_carry_the_numbers(name, level):
    """They are coded as those of any cache, and become the engine's nearest codes again."""
    spec = spec_of(name)
    plain = KVSpec("test/model", "tokenizer", (replace(spec.only, dtype="float32", scales=None),), 128)
    numbers = torch.randn(spec.shape(40), generator=torch.Generator().manual_seed(1)) * scales_of(spec)
    kv = codes_of(numbers, spec)
    out, wanted, again = torch.zeros_like(kv), torch.empty(kv.shape), torch.empty(kv.shape)
    round_trip(numbers_of(kv, spec), level, plain, wanted)
    round_trip(kv, level, spec, again)
    assert torch.equal(again, wanted)
    round_trip(kv, level, spec, out)
    assert same(out, codes_of(wanted, spec))
    if level == "BF16":
        assert same(out, kv)


def test_numbers_become_codes_and_saturate():
    spec = spec_of("per layer")
    numbers = codes(spec).float() * scales_of(spec)
    out = torch.zeros(spec.shape(40), dtype=spec.torch_dtype)
    round_trip(numbers, "Raw", spec, out)
    assert torch.equal(out.float(), codes(spec).float())
    round_trip(torch.full(spec.shape(40), 1e4), "Raw", spec, out)
    assert out.float().unique().tolist() == [448.0]
    back = torch.empty(numbers.shape, dtype=torch.bfloat16)
    convert(out, back, spec)
    assert torch.equal(back, (448 * scales_of(spec)).expand(back.shape).bfloat16())
    convert(back, out.zero_(), spec)
    assert out.float().unique().tolist() == [448.0]


@pytest.mark.parametrize(("name", "bad"), [("latent", 0xFF), ("E5M2", 0x7C), ("E5M2", 0xFE)])
def test_codes_that_are_no_numbers_are_refused_by_publishers_and_players(name, bad):
    spec = spec_of(name)
    kv, context = codes(spec), GroupContext(spec, 0, 40)
    spoilt = kv.clone()
    spoilt.view(torch.uint8).view(-1)[7] = bad
    for level in ("Raw", "Int4"):
        with pytest.raises(NotFiniteError):
            encode_group(spoilt, level, context, CHUNK, 0)
    payload = bytearray(payload_of(encode_group(kv, "Raw", context, CHUNK, 0)))
    payload[100] = bad
    for dtype in (kv.dtype, torch.float32):
        with pytest.raises(FormatError, match="Raw: contains a number that is not finite"):
            decode_payload(memoryview(payload), "Raw", context, 0, torch.empty(kv.shape, dtype=dtype))


def test_codes_of_another_type_are_refused():
    spec, other = spec_of("one scale"), torch.float8_e5m2
    context = GroupContext(spec, 0, 40)
    with pytest.raises(FormatError, match=r"cannot encode torch.float8_e5m2: the class full of test/model is kept in"):
        encode_group(codes(spec).view(other), "Raw", context, CHUNK, 0)
    frame = encode_group(codes(spec), "Raw", context, CHUNK, 0)
    with pytest.raises(FormatError, match=r"cannot decode into torch.float8_e5m2"):
        decode_group(frame, "Raw", context, CHUNK, 0, torch.empty(spec.shape(40), dtype=other))
    plain = KVSpec.uniform("test/model", "tokenizer", 2, 2, 16, "bfloat16")
    with pytest.raises(FormatError, match=r"cannot encode torch.float8_e4m3fn: .* is kept in bfloat16"):
        encode_group(codes(spec), "Int4", GroupContext(plain, 0, 40), CHUNK, 0)


@pytest.mark.parametrize("name", CLASSES)
def test_ac_codes_the_numbers(name):
    """Whatever the scales are: a profile fitted to the codes knows the numbers, as one fitted to these does."""
    spec = spec_of(name)
    dice = torch.Generator().manual_seed(5)
    mixing = torch.randn(6, torch.Size(spec.shape(1)).numel(), generator=dice)

    def numbers():
        layers, halves, heads, _, dim = spec.shape(1)
        made = (
            (torch.randn(300, 6, generator=dice) @ mixing).view(300, layers, halves, heads, dim).permute(1, 2, 3, 0, 4)
        )
        return made * scales_of(spec) * 2

    seen = [codes_of(numbers(), spec) for _ in range(2)]
    made = fit(spec, lambda: seen, FitConfig(stack_layers=1, sinks=0, outliers=0.0))
    kv = codes_of(numbers(), spec)
    wanted = numbers_of(kv, spec)
    context = GroupContext(spec, 0, 300, made)
    frame = encode_group(kv, "AC-5x", context, CHUNK, 0)
    assert len(frame) < len(encode_group(kv, "Int8", context, CHUNK, 0)) / 2
    out, again = torch.empty(kv.shape), torch.empty_like(kv)
    for there in (out, again):
        decode_group(frame, "AC-5x", context, CHUNK, 0, there)
    assert same(again, codes_of(out, spec))
    for mine, theirs in zip(out, wanted, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.12
