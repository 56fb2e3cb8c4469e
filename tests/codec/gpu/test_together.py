"""Groups that several threads ask for are decoded together, and checked against the processor's result."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvabr.codec import gpu
from kvabr.codec.payload import raw
from kvabr.types.errors import FormatError
from tests.codec.gpu.cases import STEP, expected, long, payloads, same
from tests.codec.gpu.conftest import DEVICE

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decoder  # not without Triton


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
        while len(gpu._TOGETHER._waiting) < 4:
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
    assert torch.equal(gpu._bytes(out), same_bytes)
    assert raw(out) == same_bytes.numpy().tobytes()
    assert same(out, torch.arange(18, dtype=dtype).reshape(out.shape))
    assert not same(out, torch.zeros(out.shape, dtype=dtype))


def test_a_corrupt_group_fails_for_its_own_thread_alone(monkeypatch):
    case = long(3, 20)
    coded, room = payloads(case), outs(case, 3)
    bad = [coded[0][:-2], *coded[1:]]
    asked = [gpu._Asked([case.job(some, STEP, 0, out)]) for some, out in zip((coded, bad, coded), room, strict=True)]
    gpu._TOGETHER._run(asked)
    assert [type(each.error) for each in asked] == [type(None), FormatError, type(None)]
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
    together, case = gpu._Together(), long(4, 9)
    together._working = True  # another thread is

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(together._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together.decode([case.job(payloads(case), STEP, 0, *outs(case, 1))])
    assert not together._waiting
    assert together._working


def test_one_group_of_a_kind_is_compared(monkeypatch):
    case, compared = long(5, 20), []
    coded = payloads(case)
    monkeypatch.setattr(gpu.coder, "decode_many", lambda jobs: compared.extend(jobs) or [*map(gpu.coder.decode, jobs)])
    for tokens in (96, 128, 160):  # of prompts
        cache = torch.zeros(case.shape(tokens), device=DEVICE)
        gpu.decode_many([case.job(coded, STEP, 0, cache[:, :, :, :20])])
    assert len(compared) == 1
    gpu.decode_many([case.job(coded, STEP, 0, torch.zeros(case.shape(), dtype=torch.float16, device=DEVICE))])
    assert len(compared) == 2
