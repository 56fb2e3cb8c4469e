"""Groups that several threads ask for are decoded together, and checked against the processor's result."""

from functools import partial

import numpy as np
import pytest
import torch

from kvabr.codec import gpu
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.gpu import together
from kvabr.codec.gpu.batches import Batches
from kvabr.codec.gpu.level_job import LevelJob
from kvabr.codec.group import decode_by
from kvabr.codec.payload import raw
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from tests.codec.gpu.cases import STEP, expected, long, payloads, same
from tests.codec.gpu.conftest import DEVICE

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decoder, levels  # not without Triton


def outs(case, count):
    return [torch.full(case.shape(), -7.0, device=DEVICE) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_compared_whatever_the_strides_of_a_dimension_of_1(dtype):
    # What a copy of every other element of [dim, layer, K/V, head, token] to another device looks like.
    out = torch.empty_strided((1, 2, 1, 9, 1), (18, 9, 9, 1, 18), dtype=dtype)
    out.copy_(torch.arange(18).reshape(out.shape))
    assert out.is_contiguous()
    same_bytes = torch.arange(18, dtype=dtype).view(torch.uint8)
    assert torch.equal(together._bytes(out), same_bytes)
    assert raw(out) == same_bytes.numpy().tobytes()
    assert same(out, torch.arange(18, dtype=dtype).reshape(out.shape))
    assert not same(out, torch.zeros(out.shape, dtype=dtype))


def test_groups_of_one_thread_are_decoded_one_by_one_where_they_fail_together(monkeypatch, recwarn):
    case = long(4, 9)
    coded, room = payloads(case), outs(case, 2)
    decode, calls = decoder.decode_many, []

    def not_many(jobs):
        calls.append(len(jobs))
        if len(jobs) > 1 or len(calls) == 2:
            raise RuntimeError("no memory")
        decode(jobs)

    monkeypatch.setattr(decoder, "decode_many", not_many)
    gpu.decode_many([case.job(coded, STEP, 0, out) for out in room])
    assert all(same(out, expected(case, coded, 0, torch.float32)) for out in room)
    assert calls == [2, 1, 1]
    assert ["no memory" in str(each.message) for each in recwarn if "on the processor" in str(each.message)] == [True]
    recwarn.clear()


def test_a_thread_that_is_interrupted_while_it_waits_asks_for_nothing_any_more(monkeypatch):
    batches, case = Batches(DEVICE, together._decoded), long(4, 9)
    batches._working = True  # another thread is

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(batches._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batches.run([together.PlacedJob(case.job(payloads(case), STEP, 0, *outs(case, 1)), None)])
    assert not batches._waiting
    assert batches._working


def blocks_of(case, tokens):
    """A paged cache of one layer, and where a group of it belongs."""
    cache = torch.full((4, 1, 16, 6), -7.0, device=DEVICE)
    return cache, BlockSlots([[cache[..., :3], cache[..., 3:]]], np.arange(16, 16 + tokens))


def in_blocks(cache, tokens):
    return cache[:, 0].reshape(64, 2, 3)[16 : 16 + tokens].permute(1, 0, 2)[None, :, None]


@pytest.mark.parametrize("fault", ["raises", "other numbers"])
def test_the_processor_decodes_to_blocks_what_kernels_cannot(monkeypatch, recwarn, fault):
    case = long(4, 9)
    coded, calls, decode = payloads(case), [], decoder.decode_to_blocks
    (cache, slots), (second, others) = blocks_of(case, 9), blocks_of(case, 9)

    def wrongly(jobs, blocks):
        calls.append(len(jobs))
        if fault == "raises":
            raise RuntimeError("no kernel image")
        decode(jobs, blocks)
        for each in blocks:
            each.layers[0][0][1, 0, 0, 0] += 1

    monkeypatch.setattr(decoder, "decode_to_blocks", wrongly)
    job = case.job(coded, STEP, 0, torch.empty(case.shape(), device="meta"))
    for into in (slots, others):
        assert gpu.decode_to_blocks([job], [into]) == [None]
    wanted = expected(case, coded, 0, torch.float32)
    assert same(in_blocks(cache, 9), wanted)
    assert same(in_blocks(second, 9), wanted)
    assert bool((cache[0] == -7).all())
    said = [str(each.message) for each in recwarn if "on the processor" in str(each.message)]
    recwarn.clear()
    assert len(said) == 1
    assert ("no kernel image" if fault == "raises" else "other numbers") in said[0]
    assert len(calls) == (2 if fault == "raises" else 1)


def test_of_groups_for_blocks_each_has_its_own_error():
    case = long(3, 9)
    coded = payloads(case)
    bad = [coded[0][:-2], *coded[1:]]
    cache, slots = blocks_of(case, 9)
    shape = torch.empty(case.shape(), device="meta")
    jobs = [case.job(some, STEP, 0, shape) for some in (bad, coded)]
    errors = gpu.decode_to_blocks(jobs, [BlockSlots(slots.layers, np.arange(48, 57)), slots])
    assert [type(each) for each in errors] == [FormatError, type(None)]
    assert same(in_blocks(cache, 9), expected(case, coded, 0, torch.float32))


@pytest.mark.parametrize("fault", [None, "raises", "other numbers"])
def test_levels_are_expanded_together_and_compared_too(monkeypatch, recwarn, fault):
    spec, room = KVSpec.uniform("m", "t", 1, 2, 8, "bfloat16"), torch.full((3, 1, 2, 2, 9, 8), -7.0, device=DEVICE)
    kv = torch.randn(spec.shape(9), generator=torch.Generator().manual_seed(1))
    context = GroupContext(spec, 0, 9)
    coded = [memoryview(codec(level).encode(kv, context)) for level in ("Int8", "FP8", "Int8")]
    wanted = torch.empty(3, *spec.shape(9))
    for level, payload, out in zip(("Int8", "FP8", "Int8"), coded, wanted, strict=True):
        codec(level).decode(payload, context, out)
    expand, calls = levels.expand_many, []

    def wrongly(jobs):
        calls.append(len(jobs))
        if fault == "raises":
            raise RuntimeError("no kernel image")
        expand(jobs)
        if fault is not None:
            jobs[0].out[0, 0, 0, 0, 0] += 1

    monkeypatch.setattr(levels, "expand_many", wrongly)
    monkeypatch.setattr(together, "_expanded", {})
    monkeypatch.setattr(gpu, "runs_on", lambda device: device == DEVICE)
    jobs = [
        LevelJob(level, payload, spec, out, partial(codec(level).decode, payload, context))
        for level, payload, out in zip(("Int8", "FP8"), coded, room, strict=False)
    ]
    assert together.decode([together.PlacedJob(job, None) for job in jobs]) == [None, None]
    decode_by(codec("Int8"), coded[2], context, 0, room[2])
    assert same(room, wanted)
    assert calls[0] == 2
    assert bool([each for each in recwarn if "on the processor" in str(each.message)]) == bool(fault)
    recwarn.clear()
    with pytest.raises(FormatError, match="Int8: 3 bytes of payload"):
        decode_by(codec("Int8"), coded[2][:3], context, 0, room[2])
