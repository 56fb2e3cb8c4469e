"""Every native path gives the oracle's bits: payloads, indices, caches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Quantiser, dequantise
from kvabr.codec.quantiser import quantise
from kvabr.types.errors import FormatError
from kvabr_lab.bench.code_length import ideal_bits
from tests.codec.native import oracle
from tests.codec.native.conftest import NATIVE
from tests.codec.native.models import base_indices, case, coder_model, some_references, spread_out
from tests.examples import examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STEP, FIRST = 0.37, 4093


@examples(25)
@given(
    seed=st.integers(0, 1 << 32),
    kind=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    first=st.sampled_from((FIRST, 1_000_000, None)),
)
def test_native_paths_match_the_oracle(seed: int, kind: int, dtype: torch.dtype, first: int | None) -> None:
    it, dice = case(seed), np.random.default_rng(seed)
    tokens = it.indices[0].shape[1]
    shape = it.shape()
    mean = dice.normal(size=it.transform.mean.shape).astype(np.float32) if seed % 2 else None
    gains = tuple(dice.uniform(0.75, 1.25, len(it.transform.stack)).tolist()) if seed % 3 else ()
    below = (None, *it.indices[:-1])
    with oracle.taking(oracle.ORACLE):
        payloads = it.encode()
        wanted = spread_out(shape, dtype, 0)
        oracle.synthesise(it.transform, dequantise(it.models[-1], it.indices[-1]), STEP, first, wanted, gains, mean)
    for path in NATIVE:
        with oracle.taking(path):
            for model, index, under, payload in zip(it.models, it.indices, below, payloads, strict=True):
                assert coder.encode_indices(model, index, under, it.references) == payload
                assert np.array_equal(coder.decode_indices(model, payload, tokens, under, it.references), index)
            alone, chain = spread_out(shape, dtype, kind), spread_out(shape, dtype, kind)
            if mean is None:
                coder.synthesise(it.transform, dequantise(it.models[-1], it.indices[-1]), STEP, first, alone, gains)
                assert torch.equal(alone, wanted)
            for threads in (1, 2, 5, 1000):
                chain.fill_(7)
                coder.decode(replace(it.job(payloads, STEP, first, chain), gains=gains, mean=mean), threads)
                assert torch.equal(chain, wanted)


@examples(25)
@given(
    seed=st.integers(0, 1 << 32),
    tokens=st.sampled_from((1, 15, 64, 100, 129, 300)),
    finer=st.sampled_from((0.37, 1 / 3, 0.25)),
    dead=st.sampled_from((0.0, 0.1)),
)
def test_coefficients_become_the_indices_that_the_quantiser_says(
    seed: int, tokens: int, finer: float, dead: float
) -> None:
    dice = np.random.default_rng(seed)
    own, lower = Quantiser(finer, dead), Quantiser(3 * finer, 0.0)
    rows = (dice.laplace(0, 1, (60, 1)) * dice.laplace(0, 3, (60, tokens))).astype(np.float32)
    # Also ties, which round to even, and values that saturate 16 bits.
    rows[dice.random(rows.shape) < 0.2] = np.float32(finer) * np.float32(dice.integers(-40, 40) + 0.5)
    keep = dice.random(tokens) < 0.9
    rows[:, ~keep] *= 1e6
    indices = [
        quantise(torch.from_numpy(rows * keep), each.step, each.dead).numpy().astype(np.int16) for each in (lower, own)
    ]
    base, enhancement = coder_model(dice, 60, refines=False), coder_model(dice, 60, refines=True)
    for path in oracle.PATHS:
        with oracle.taking(path):
            for at, quantiser in enumerate((lower, own)):
                coded = coder.encode_rows(base, rows, quantiser, None, keep)
                assert coded == coder.encode_indices(base, indices[at])
            coded = coder.encode_rows(enhancement, rows, own, lower, keep)
            assert coded == coder.encode_indices(enhancement, indices[1], indices[0])
            beyond = rows.copy()
            beyond[0, 0] = 1e9
            cut = indices[1].copy()
            cut[0, 0] = 32767 * keep[0]
            assert coder.encode_rows(base, beyond, own, None, keep) == coder.encode_indices(base, cut)


@examples(25)
@given(
    seed=st.integers(0, 1 << 32),
    tokens=st.sampled_from((32, 96, 100, 128, 256)),
    finer=st.sampled_from((0.37, 1 / 3, 0.14055555555555554, 1e-31, 1e31)),
    apart=st.sampled_from((0.0, 2.0**-22, 2.0**-18)),
)
def test_no_path_is_wrong_about_coefficients_near_the_middle_of_two_indices(
    seed: int, tokens: int, finer: float, apart: float
) -> None:
    dice = np.random.default_rng(seed)
    own, lower = Quantiser(finer, 0.0), Quantiser(3 * finer * (1 + apart), 0.0)
    most = dice.choice([1, 5, 126, 127, 129, 1000], (60, 1))
    place = np.rint(dice.uniform(-most, most, (60, tokens))) + dice.uniform(-0.45, 0.45, (60, tokens))
    near = dice.random(place.shape) < dice.choice([0, 0.01, 0.5], (60, 1))
    place[near] = np.floor(place[near]) + 0.5
    rows = (place * finer).astype(np.float32)
    rows.view(np.int32)[near] += dice.integers(-3, 4, int(near.sum())).astype(np.int32)
    keep = dice.random(tokens) < 0.9
    base, enhancement = coder_model(dice, 60, refines=False), coder_model(dice, 60, refines=True)
    references = some_references(dice, tokens) if dice.random() < 0.7 else None
    jobs = (base, rows, own, None, keep, references), (enhancement, rows, own, lower, keep, references)
    for job in jobs:
        wanted = oracle.encode_rows(*job)
        for path in NATIVE:
            with oracle.taking(path):
                assert coder.encode_rows(*job) == wanted


def test_no_path_takes_a_row_for_zeros_that_has_a_one() -> None:
    """Divided by the step the number is just above the middle of 0 and 1, multiplied with 1 / step in the middle."""
    dice, step, number = np.random.default_rng(1), 0.1039000004529953, 0.05195000395178795
    rows, keep = np.zeros((60, 128), np.float32), np.ones(128, bool)
    rows[::2, 5] = number
    own, lower = Quantiser(step, 0.0), Quantiser(3 * step, 0.0)
    for refines in (False, True):
        job = coder_model(dice, 60, refines=refines), rows, own, lower if refines else None, keep
        wanted = oracle.encode_rows(*job)
        for path in NATIVE:
            with oracle.taking(path):
                assert coder.encode_rows(*job) == wanted


@examples(25)
@given(
    seed=st.integers(0, 1 << 32),
    tokens=st.sampled_from((1, 16, 127, 128, 300)),
    taken=st.sampled_from((1, 5, 100, 128)),
    step=st.sampled_from((1.0, 0.37, 1e-9)),
    most=st.sampled_from((0, 3, 8)),
)
def test_tokens_are_as_alike_on_every_path(seed: int, tokens: int, taken: int, step: float, most: int) -> None:
    dice = np.random.default_rng(seed)
    rows = (dice.standard_normal((300, tokens)) * dice.choice([0.1, 1, 1e4, 3e37], (300, 1))).astype(np.float32)
    rows[dice.random(rows.shape) < 0.2] = np.float32(step) * np.float32(dice.integers(-4, 4) + 0.5)  # ties
    which = np.flatnonzero(dice.random(300) < 0.7)
    of = np.sort(dice.choice(tokens, min(tokens, taken), replace=False))
    with np.errstate(over="ignore"):
        exact = (rows[which][:, of] / np.float32(step)).clip(-(2**23), 2**23)  # from there on, all are integers
    number = np.rint(exact).clip(-most, most) if most else np.rint(16 * (exact - np.rint(exact)))
    wanted = number.astype(np.int64).T @ number.astype(np.int64)
    for path in oracle.PATHS:
        with oracle.taking(path):
            assert np.array_equal(coder.similarity(rows, which, of, step, most), wanted)
            assert not coder.similarity(rows, np.zeros(0, int), of, step, most).any()


@pytest.mark.parametrize("tokens", [1, 40, 128, 300])
def test_payloads_are_hardly_longer_than_the_ideal(path: str, tokens: int) -> None:
    dice = np.random.default_rng(tokens)
    rows = 40 if path == oracle.ORACLE else 1500
    for refines in (False, True):
        model = coder_model(dice, rows, refines=refines)
        below = base_indices(dice, rows, tokens).clip(-100, 100) if refines else None
        index = base_indices(dice, rows, tokens) if below is None else 3 * below + 1
        bits = len(coder.encode_indices(model, index, below)) * 8
        # The states cost 64 x 32 bits and the counts 64, whatever the payload.
        assert bits <= 1.002 * ideal_bits(model, index, below) + 64 * 32 + 64


def far(dice, shape):
    return dice.choice([-32752, 32752, 32000], shape)


@pytest.mark.parametrize(
    ("numbers", "step"),
    [
        (far, 1000.0),  # int32 sums that overflow, int16 outputs that saturate, FP16 that is clamped
        *((lambda dice, shape: dice.integers(-300, 300, shape), step) for step in (1e-6, 1e-9, 1e-30, 1e-36)),
        *(  # around the limit of a byte, and rows of both kinds
            (
                lambda dice, shape, most=most: (
                    (most + 1) * dice.uniform(-1, 1, shape) * dice.integers(0, 2, (shape[0], 1))
                ),
                0.5,
            )
            for most in (7, 8, 127, 128, 2000)
        ),
    ],
)
def test_sums_wrap_and_saturate_and_round_alike(use, numbers, step) -> None:
    for seed in (5, 11, *range(1000, 1006)):
        it, dice = case(seed, depths=1), np.random.default_rng(seed)
        if step < 1e-5:  # so small that FP16 has only its subnormal numbers left
            it.transform.mean.flags.writeable = True
            it.transform.mean[:] = 0
        z = numbers(dice, (it.rows, 21)).astype(np.int16)
        for dtype in DTYPES:
            outs = []
            for path in oracle.PATHS:
                use(path)
                outs.append(torch.empty(it.shape(21), dtype=dtype))
                coder.synthesise(it.transform, z, step, 0, outs[-1])
            assert all(torch.equal(out, outs[0]) for out in outs)
            assert bool(torch.isfinite(outs[0]).all())


def test_other_dtypes_and_many_threads(path: str) -> None:
    cases = [case(seed, small=True, depths=2) for seed in range(4 if path == oracle.ORACLE else 24)]
    jobs, wanted = [], []
    for it in cases:
        payloads = it.encode()
        jobs.append(it.job(payloads, STEP, FIRST, torch.empty(it.shape(), dtype=torch.float64)))
        wanted.append(torch.empty(it.shape()))
        coder.decode(it.job(payloads, STEP, FIRST, wanted[-1]))
    coder.decode_many(jobs, threads=4)
    for job, each in zip(jobs, wanted, strict=True):
        assert torch.equal(job.out.float(), each)


def test_one_bad_group_among_many_is_told(path: str) -> None:
    it = case(3, small=True, depths=1)
    payload = coder.encode_indices(it.models[0], it.indices[0])
    jobs = [it.job([each], STEP, 0, torch.empty(it.shape())) for each in (payload, payload[:-1], payload)]
    with pytest.raises(FormatError):
        coder.decode_many(jobs, threads=2)
