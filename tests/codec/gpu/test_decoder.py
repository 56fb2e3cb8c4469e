"""The kernels against the reference: the same bits for every shape, and nothing out of bounds for any bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvabr.codec.native import reference
from kvabr.codec.native.coder_model import DecodeJob
from kvabr.codec.transform import Matrices, Stack, Structure, Transform
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from tests.codec.gpu.conftest import DEVICE
from tests.codec.native import models

pytest.importorskip("triton", reason="Triton is not installed (kvabr[gpu])")

from kvabr.codec.gpu import decode_many, decoder, kernels  # not without Triton

STEP = 0.07
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def payloads(case):
    out, below = [], None
    for model, index in zip(case.models, case.indices, strict=True):
        out.append(reference.encode_indices(model, index, below))
        below = index
    return out


def expected(case, coded, first, dtype):
    out = torch.empty(case.shape(), dtype=dtype)
    reference.decode(case.job(coded, STEP, first, out))
    return out


def same(out, wanted):
    return torch.equal(out.cpu().contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def cut(case, tokens):
    """The case with fewer tokens."""
    return models.Case(case.transform, case.models, tuple(np.array(index[:, :tokens]) for index in case.indices))


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
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


def test_gains_are_those_of_the_reference():
    case = cut(models.case(4, small=True, depths=1), 9)
    coded, stacks = payloads(case), len(case.transform.structure.stacks)
    outs, jobs = [], []
    for gain in (1.0, 1.25):
        out = torch.empty(case.shape())
        reference.decode(replace(case.job(coded, STEP, 5, out), gains=(gain,) * stacks))
        there = torch.full(case.shape(), -7.0, device=DEVICE)
        outs.append((there, out))
        jobs.append(replace(case.job(coded, STEP, 5, there), gains=(gain,) * stacks))
    decode_many(jobs)
    assert not torch.equal(outs[0][1], outs[1][1])
    assert all(same(there, out) for there, out in outs)


def narrow(seed):
    """Return a case with one layer of few channels, so that many tokens are fast enough."""
    dice = np.random.default_rng(seed)
    mantissa, gain = dice.integers(-128, 128, (2, 2)).astype(np.int8), dice.integers(0, 256, 2).astype(np.uint8)
    structure = Structure(KVSpec.uniform("m", "t", 1, 1, 3, "float32"), 1, (Stack(0, 0, 1, 2), Stack(1, 0, 1, 2)))
    mean, norm = dice.normal(size=(1, 2, 1, 3)).astype(np.float16), np.ones((1, 2), np.float32)
    return Transform(structure, mean, norm, None, (Matrices(mantissa, gain),) * 2, np.ones(1, np.float32), np.inf)


def long(seed, tokens, depths=2):
    dice = np.random.default_rng(seed)
    transform = narrow(seed)
    indices = [models.base_indices(dice, transform.structure.rows, tokens)]
    for _ in range(depths - 1):
        indices.append(models.finer_indices(dice, indices[-1]))
    tables = tuple(models.coder_model(dice, transform.structure.rows, refines=depth > 0) for depth in range(depths))
    return models.Case(transform, tables, tuple(indices))


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
        reference.decode(job)
    decoder.decode_many(jobs[1])
    assert all(map(same, outs, wanted))
    assert not torch.equal(wanted[0], wanted[1])


def test_what_does_not_fit_the_scratch_is_done_in_turns(monkeypatch):
    monkeypatch.setattr(decoder, "SCRATCH_BYTES", 1)
    case = long(4, 3, depths=1)
    coded = payloads(case)
    outs = [torch.empty(1, 2, 1, 3, 3, device=DEVICE) for _ in range(2)]
    decoder.decode_many([case.job(coded, STEP, 0, out) for out in outs])
    for out in outs:
        assert same(out, expected(case, coded, 0, torch.float32))


@pytest.fixture
def guarded(monkeypatch):
    """Check every address that a kernel uses against its buffers."""
    if DEVICE.type != "cpu":
        pytest.skip("addresses can be watched in the interpreter only")
    from triton.runtime.interpreter import InterpreterBuilder

    given, touched = [], [0]

    def watch(kernel):
        run = kernel.run

        def watched(*args, **kwargs):
            del given[:]
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    given.append((arg.data_ptr(), arg.data_ptr() + arg.numel() * arg.element_size()))
                    if arg.dtype == torch.int64 and arg.dim() == 1:  # addresses
                        given.extend((int(at), int(at) + watched.out) for at in arg)
            return run(*args, **kwargs)

        watched.out = 0
        monkeypatch.setattr(kernel, "run", watched)
        return watched

    watches = [watch(getattr(kernels, name)) for name in ("read_rows", "triple", "unstack", "finish")]

    def check(pointers, mask):
        at = np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        good = np.zeros(at.shape, dtype=bool)
        for first, last in given:
            good |= (at >= first) & (at + size <= last)
        touched[0] += at.size
        assert good.all(), "a kernel would have left its memory"

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)

    def run(case, coded):
        out = torch.empty(case.shape())
        for each in watches:
            each.out = out.numel() * 4
        before = touched[0]
        decoder.decode_many([case.job(coded, STEP, 0, out)])
        assert touched[0] > before
        return out

    return run


def test_corrupt_payloads_are_refused_as_the_reference_does_and_nothing_is_touched_that_is_not_ours(guarded):
    case = long(5, 12)
    coded = payloads(case)
    assert same(guarded(case, coded), expected(case, coded, 0, torch.float32))
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
                guarded(case, bad)
        else:
            assert same(guarded(case, bad), wanted)
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
    for run in (reference.decode, lambda job: decode_many([job])):
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
