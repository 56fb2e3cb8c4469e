"""Groups that several threads ask for are decoded together, and checked against the processor's result."""

import threading
from concurrent.futures import ThreadPoolExecutor
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


def test_groups_of_threads_that_wait_share_a_batch(monkeypatch):
    case = long(3, 20)
    coded, room, batches, go = payloads(case), outs(case, 5), [], threading.Event()
    decode = decoder.decode_many

    def slowly(jobs):
        batches.append(len(jobs))
        go.wait(10)
        decode(jobs)

    monkeypatch.setattr(decoder, "decode_many", slowly)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(gpu.decode_many, [case.job(coded, STEP, 0, room[0])])
        while not batches:
            pass
        others = [pool.submit(gpu.decode_many, [case.job(coded, STEP, 0, out)]) for out in room[1:]]
        while len(together._batches(room[0].device)._waiting) < 4:
            pass
        go.set()
        for each in (first, *others):
            each.result()
    assert batches == [1, 4]
    wanted = expected(case, coded, 0, torch.float32)
    assert all(same(out, wanted) for out in room)


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


def test_a_corrupt_group_fails_for_its_own_thread_alone(monkeypatch):
    case = long(3, 20)
    coded, room = payloads(case), outs(case, 3)
    bad = [coded[0][:-2], *coded[1:]]
    jobs = [case.job(some, STEP, 0, out) for some, out in zip((coded, bad, coded), room, strict=True)]
    errors = together._decoded([together.PlacedJob(job, None) for job in jobs])
    assert [type(each) for each in errors] == [type(None), FormatError, type(None)]
    wanted = expected(case, coded, 0, torch.float32)
    assert same(room[0], wanted)
    assert same(room[2], wanted)


@pytest.mark.parametrize("fault", ["raises", "other numbers"])
def test_the_processor_decodes_what_kernels_cannot(monkeypatch, recwarn, fault):
    case = long(4, 9)
    coded, room = payloads(case), outs(case, 2)
    decode, calls = decoder.decode_many, []

    def wrongly(jobs):
        calls.append(len(jobs))
        if fault == "raises":
            raise RuntimeError("no kernel image")
        decode(jobs)
        jobs[0].out[0, 0, 0, 0, 0] += 1

    monkeypatch.setattr(decoder, "decode_many", wrongly)
    for out in room:
        gpu.decode_many([case.job(coded, STEP, 0, out)])
    wanted = expected(case, coded, 0, torch.float32)
    assert all(same(out, wanted) for out in room)
    said = [str(each.message) for each in recwarn if "on the processor" in str(each.message)]
    recwarn.clear()
    assert len(said) == 1
    assert ("no kernel image" if fault == "raises" else "other numbers") in said[0]
    assert len(calls) == (2 if fault == "raises" else 1)  # what was wrong once is not tried again


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


def test_one_group_of_a_kind_is_compared(monkeypatch):
    case, compared = long(5, 20), []
    coded = payloads(case)
    decode = together.coder.decode
    monkeypatch.setattr(together.coder, "decode_many", lambda jobs: compared.extend(jobs) or [*map(decode, jobs)])
    for tokens in (96, 128, 160):  # of prompts
        cache = torch.zeros(case.shape(tokens), device=DEVICE)
        gpu.decode_many([case.job(coded, STEP, 0, cache[:, :, :, :20])])
    assert len(compared) == 1
    gpu.decode_many([case.job(coded, STEP, 0, torch.zeros(case.shape(), dtype=torch.float16, device=DEVICE))])
    assert len(compared) == 2


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


def test_what_kernels_do_with_many_streams_is_compared_when_there_are_many(monkeypatch):
    case, compared = long(5, 20, depths=1), []
    coded, own = payloads(case), together._own
    monkeypatch.setattr(together, "CROWDED", 3)
    monkeypatch.setattr(together, "_own", lambda task: compared.append(task) or own(task))
    for groups, times in ((1, 1), (2, 1), (3, 2), (4, 2)):
        gpu.decode_many([case.job(coded, STEP, 0, out) for out in outs(case, groups)])
        assert len(compared) == times


def test_devices_do_not_wait_for_each_other():
    one, other = (together._batches(torch.device("meta", number)) for number in (0, 1))
    assert one is not other
    assert together._batches(torch.device("meta", 0)) is one


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
