"""Cast and integer levels expanded by a kernel: the processor's bits, in tensors of any strides and in blocks."""

from functools import partial

import pytest
import torch

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.block_slots import BlockSlots
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from tests.codec.gpu.cases import same
from tests.codec.gpu.conftest import DEVICE
from tests.codec.gpu.test_paged import LAYOUTS, UNTOUCHED, slots_of
from tests.codec.test_classes import ALONE

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import levels  # not without Triton

SPECS = {**ALONE, "usual": KVSpec.uniform("m", "t", 2, 2, 64, "bfloat16")}
SMALL = KVSpec.uniform("m", "t", 2, 1, 16, "bfloat16")
DTYPES = torch.float32, torch.float16, torch.bfloat16
INTERPRETED = DEVICE.type == "cpu"
# The interpreter is slow. Every class has a cast and an integer level, and every level has several classes; where a
# level is read is independent of where it is written.
PAIRS = [
    (name, level)
    for at, name in enumerate(SPECS)
    for nth, level in enumerate(levels.LEVELS)
    if name == "usual" or nth % 3 in {at % 3, (at // 3) % 3} or not INTERPRETED
]
PLACES = [
    (layout, level)
    for at, layout in enumerate(LAYOUTS)
    for nth, level in enumerate(levels.LEVELS)
    if nth % len(LAYOUTS) == at or not INTERPRETED
]


def encoded(spec, tokens, level):
    """Return the payload of random numbers, some of them large or tiny."""
    dice, shape = torch.Generator().manual_seed(tokens), spec.shape(tokens)
    kv = torch.randn(shape, generator=dice) * 10 ** torch.randint(-4, 4, shape, generator=dice).float()
    return bytearray(codec(level).encode(kv, GroupContext(spec, 0, tokens)))


def wanted(spec, tokens, level, payload, dtype=torch.float32):
    out = torch.empty(spec.shape(tokens), dtype=dtype)
    codec(level).decode(memoryview(payload), GroupContext(spec, 0, tokens), out)
    return out


def job(spec, level, payload, out):
    decode = partial(codec(level).decode, memoryview(payload), GroupContext(spec, 0, out.shape[3]))
    return levels.LevelJob(level, memoryview(payload), spec, out, decode)


@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_groups_have_the_processors_bits(name, level):
    spec, jobs = SPECS[name], []
    for dtype, some in zip(DTYPES, (45, 1, 32), strict=True):
        tokens = 24 if name == "state" else some
        payload = encoded(spec, tokens, level)
        out = torch.full(spec.shape(tokens), UNTOUCHED, dtype=dtype, device=DEVICE)
        jobs.append((job(spec, level, payload, out), wanted(spec, tokens, level, payload, dtype)))
    levels.expand_many([each for each, _ in jobs])
    for each, expected in jobs:
        assert same(each.out, expected), (each.out.dtype, each.out.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_have_any_strides_and_types(dtype):
    spec, tokens = SMALL, 20
    for order in ((0, 1, 2, 3, 4), (3, 0, 1, 4, 2), (4, 3, 2, 1, 0)):
        shape = spec.shape(tokens)
        whole = torch.full([shape[axis] for axis in order], UNTOUCHED, dtype=dtype, device=DEVICE)
        out = whole.permute([order.index(axis) for axis in range(5)])
        payload = encoded(spec, tokens, "Int4")
        levels.expand_many([job(spec, "Int4", payload, out)])
        assert same(out, wanted(spec, tokens, "Int4", payload, dtype))


@pytest.mark.parametrize(("layout", "level"), PLACES)
def test_blocks_get_their_tokens_and_nothing_else(layout, level):
    spec, tokens, dtype = SPECS["usual"], 45, torch.bfloat16
    own, views = layout(spec.layers, spec.kv_heads, 64, dtype)
    slots, payload = slots_of(3, tokens), encoded(spec, tokens, level)
    there = BlockSlots(views, slots)
    levels.expand_to_blocks([job(spec, level, payload, torch.empty(spec.shape(tokens), device="meta"))], [there])
    found = [cache.clone() for cache in own]
    for cache in own:
        cache.fill_(UNTOUCHED)
    there.write(wanted(spec, tokens, level, payload, dtype).to(DEVICE))
    assert all(same(one, other) for one, other in zip(found, own, strict=True))


def spoilt(level, payload):
    """Make a number of a payload infinite, or no number, where the level has such; the last token's, or a scale."""
    special = {"FP16": b"\x00\x7c", "BF16": b"\x80\x7f", "FP8": b"\xff"}
    if level in special:
        payload[-len(special[level]) :] = special[level]
    else:
        payload[2:4] = b"\x00\xfc"
    return payload


@pytest.mark.parametrize("level", [level for level in levels.LEVELS if level != "FP4"])
def test_what_is_not_finite_is_an_error(level):
    spec, out = SMALL, torch.zeros(SMALL.shape(20), device=DEVICE)
    good = encoded(spec, 20, level)
    bad = spoilt(level, bytearray(good))
    with pytest.raises(FormatError, match=rf"{level}.*not"):
        wanted(spec, 20, level, bad)
    with pytest.raises(FormatError, match=rf"{level}.*not finite"):
        levels.expand_many([job(spec, level, each, out) for each in (good, bad, good)])


@pytest.mark.parametrize("level", levels.LEVELS)
def test_payloads_of_another_length_are_refused(level):
    spec, out = SPECS["usual"], torch.zeros(SPECS["usual"].shape(40), device=DEVICE)
    payload = encoded(spec, 40, level)
    for wrong in (payload[:-1], bytes(payload) + b"\0", b""):
        with pytest.raises(FormatError, match=f"{level}: {len(wrong)} bytes of payload, expected {len(payload)}"):
            levels.expand_many([job(spec, level, wrong, out)])
