"""The kernels against the reference: the same bits for every shape, and nothing out of bounds for any bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob, Shift
from kvabr.types.errors import FormatError
from tests.codec.gpu.cases import STEP, cut, expected, long, payloads, same
from tests.codec.gpu.conftest import DEVICE
from tests.codec.native import models, oracle

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decode_many, decoder  # not without Triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32), st.sampled_from(DTYPES), st.permutations(range(5)), st.sampled_from([0, 5, 100_000, None])
)
@example(4, torch.float32, [0, 1, 2, 3, 4], None)
def test_every_shape_has_the_bits_of_the_reference(seed, dtype, order, first):
    case = cut(models.case(seed, small=True, depths=1 + seed % 2), 9)
    coded = payloads(case)
    wanted = expected(case, coded, first, dtype)
    # Memory in any order, and gaps between elements.
    room = torch.full([2 * wanted.shape[axis] for axis in order], -7.0, dtype=dtype, device=DEVICE)
    out = room[tuple(slice(0, None, 2) for _ in order)].permute([order.index(axis) for axis in range(5)])
    decode_many([case.job(coded, STEP, first, out)])
    assert same(out, wanted)
    out.fill_(-7.0)
    assert bool((room == -7.0).all())


def test_sums_of_products_cannot_overflow_where_they_would_saturate(monkeypatch):
    if DEVICE.type != "cpu":
        pytest.skip("sums can be watched in Triton's interpreter only: CUDA_VISIBLE_DEVICES= tools/test")
    from triton.runtime.interpreter import InterpreterBuilder

    multiply, sums = InterpreterBuilder.create_dot, []

    def watched(self, *args):
        out = multiply(self, *args)
        sums.append(int(np.abs(out.data.astype(np.int64)).max()))
        return out

    monkeypatch.setattr(InterpreterBuilder, "create_dot", watched)
    case = cut(models.case(1, small=True, depths=1), 9)
    loud = np.full_like(case.indices[0], 2047)
    block = case.transform.block._replace(gain=np.full_like(case.transform.block.gain, 255))
    case = replace(case, transform=replace(case.transform, block=block), indices=(loud,))
    out, coded = torch.empty(case.shape(), device=DEVICE), payloads(case)
    decode_many([case.job(coded, STEP, 0, out)])
    assert same(out, expected(case, coded, 0, torch.float32))
    width = max(case.transform.structure.width, *(each.gain.size for each in case.transform.stack))
    assert 0 < max(sums) <= width << 14  # of one limb each


def test_gains_are_those_of_the_reference():
    case = cut(models.case(4, small=True, depths=1), 9)
    coded, stacks = payloads(case), len(case.transform.structure.stacks)
    outs, jobs = [], []
    for gain in (1.0, 1.25):
        out = torch.empty(case.shape())
        oracle.decode(replace(case.job(coded, STEP, 5, out), gains=(gain,) * stacks))
        there = torch.full(case.shape(), -7.0, device=DEVICE)
        outs.append((there, out))
        jobs.append(replace(case.job(coded, STEP, 5, there), gains=(gain,) * stacks))
    decode_many(jobs)
    assert not torch.equal(outs[0][1], outs[1][1])
    assert all(same(there, out) for there, out in outs)


def test_groups_of_unequal_length_are_decoded_side_by_side_into_one_cache():
    case = long(3, 130)
    pieces = [cut(case, tokens) for tokens in (130, 65, 4)]
    coded = [payloads(piece) for piece in pieces]
    cache = torch.full(case.shape(199), -7.0, dtype=torch.bfloat16, device=DEVICE)
    outs = cache.split((130, 65, 4), dim=3)
    decoder.decode_many([case.job(some, STEP, 0, out) for some, out in zip(coded, outs, strict=True)])
    for piece, some, out in zip(pieces, coded, outs, strict=True):
        assert same(out, expected(piece, some, 0, torch.bfloat16))


def test_groups_with_means_of_their_own_are_decoded_beside_others():
    case = long(5, 20)
    coded, dice = payloads(case), np.random.default_rng(5)
    means = [None, *(dice.normal(size=case.transform.mean.shape).astype(np.float32) for _ in range(2))]
    for size in (3, 1):
        rows = np.sort(dice.permutation(case.transform.structure.rows)[:size])
        means.append(Shift(rows, dice.integers(-254, 255, size).astype(np.int16)))
    wanted = [torch.empty(case.shape()) for _ in means]
    outs = [torch.empty(case.shape(), device=DEVICE) for _ in means]
    jobs = [
        [
            DecodeJob(case.models, coded, case.transform, STEP, 0, out, mean=mean)
            for out, mean in zip(room, means, strict=True)
        ]
        for room in (wanted, outs)
    ]
    for job in jobs[0]:
        with oracle.taking(oracle.ORACLE):
            coder.decode(job)
    decoder.decode_many(jobs[1])
    assert all(map(same, outs, wanted))
    assert not torch.equal(wanted[3], wanted[0])
    assert not torch.equal(wanted[0], wanted[1])


def test_what_does_not_fit_the_scratch_is_done_in_turns(monkeypatch):
    monkeypatch.setattr(decoder, "scratch_room", lambda _: 1)
    case = long(4, 3, depths=1)
    coded = payloads(case)
    outs = [torch.empty(1, 2, 1, 3, 3, device=DEVICE) for _ in range(2)]
    decoder.decode_many([case.job(coded, STEP, 0, out) for out in outs])
    for out in outs:
        assert same(out, expected(case, coded, 0, torch.float32))


def decoded(guarded, case, coded):
    out = torch.empty(case.shape())
    guarded(out, lambda: decoder.decode_many([case.job(coded, STEP, 0, out)]))
    return out


def test_corrupt_payloads_are_refused_as_the_reference_does_and_nothing_is_touched_that_is_not_ours(guarded):
    case = long(5, 12)
    coded = payloads(case)
    assert same(decoded(guarded, case, coded), expected(case, coded, 0, torch.float32))
    dice, refused = np.random.default_rng(6), 0
    for turn in range(9):
        bad = [bytearray(each) for each in coded]
        victim = bad[turn % 2]
        start = 8 if turn < 6 else 8 + 256  # states and all, or words and escapes only
        for at in dice.integers(start, len(victim), 1 + 40 * (turn % 3)):
            victim[at] = int(dice.integers(256))
        try:
            wanted = expected(case, bad, 0, torch.float32)
        except FormatError:
            refused += 1
            with pytest.raises(FormatError, match="does not end where it should"):
                decoded(guarded, case, bad)
        else:
            assert same(decoded(guarded, case, bad), wanted)
    assert refused > 4


@pytest.mark.parametrize("change", [lambda p: p[:-2], lambda p: p + b"\0\0", lambda p: p[:100], lambda p: p[:0]])
def test_a_payload_of_another_length_is_refused_before_it_is_sent(change):
    case = long(7, 5, depths=1)
    (coded,) = payloads(case)
    out = torch.empty(1, 2, 1, 5, 3, device=DEVICE)
    with pytest.raises(FormatError, match="truncated"):
        decode_many([case.job([change(coded)], STEP, 0, out)])


def test_an_escape_that_no_encoder_writes_is_refused():
    case = long(8, 70, depths=1)
    (coded,) = payloads(case)
    assert int.from_bytes(coded[4:8], "little") > 0
    bad = coded[:-2] + (-32768).to_bytes(2, "little", signed=True)
    out = torch.empty(1, 2, 1, 70, 3, device=DEVICE)
    for run in (oracle.decode, lambda job: decode_many([job])):
        with pytest.raises(FormatError):
            run(case.job([bad], STEP, 0, out))


def test_a_chain_with_a_missing_layer_or_another_cache_is_refused():
    case = long(9, 5)
    coded = payloads(case)
    out = torch.empty(1, 2, 1, 5, 3, device=DEVICE)
    with pytest.raises(FormatError, match="refine"):
        DecodeJob(case.models[1:], coded[1:], case.transform, STEP, 0, out)
    with pytest.raises(FormatError, match="cannot hold"):
        case.job(coded, STEP, 0, out[..., :2])
