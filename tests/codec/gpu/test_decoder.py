"""The kernels against the reference: the same bits for every shape, and nothing out of bounds for any bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvabr.codec import ac
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.native.coder_model import DecodeJob, Shift
from kvabr.codec.referring import MARK
from kvabr.types.errors import FormatError
from tests.codec.gpu.cases import SHAPE, STEP, cut, expected, fitted, long, payloads, referring, same
from tests.codec.gpu.conftest import DEVICE
from tests.codec.native import models, oracle
from tests.codec.test_ac import FIRST, TRACKS, decode, encode
from tests.kvdata import related

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decode_many, decoder  # not without Triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
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


def test_groups_of_unequal_length_are_decoded_side_by_side_into_one_cache():
    case = long(3, 130)
    pieces = [cut(case, tokens) for tokens in (130, 65, 4)]
    coded = [payloads(piece) for piece in pieces]
    cache = torch.full(case.shape(199), -7.0, dtype=torch.bfloat16, device=DEVICE)
    outs = cache.split((130, 65, 4), dim=3)
    decoder.decode_many([case.job(some, STEP, 0, out) for some, out in zip(coded, outs, strict=True)])
    for piece, some, out in zip(pieces, coded, outs, strict=True):
        assert same(out, expected(piece, some, 0, torch.bfloat16))


@pytest.mark.parametrize(
    ("seed", "tokens", "depths"), [(11, 65, 1), (12, 199, 2), (13, 100, 3), (14, 128, 3), (17, 128, 1)]
)
def test_they_have_the_bits_of_the_reference(seed, tokens, depths):
    case = referring(seed, tokens, depths)
    coded = payloads(case)
    out = torch.full(case.shape(), -7.0, device=DEVICE)
    decoder.decode_many([case.job(coded, STEP, 5, out)])
    assert same(out, expected(case, coded, 5, torch.float32))


def test_groups_with_references_gains_and_means_share_a_launch_with_others():
    plain, dice = long(12, 80), np.random.default_rng(5)
    means = [dice.normal(size=plain.transform.mean.shape).astype(np.float32) for _ in range(2)]
    rows = np.sort(dice.permutation(plain.transform.structure.rows)[:3])
    kinds = [
        (plain, (), None),
        (referring(12, 80), (1.25, 0.75), means[0]),
        (plain, (1.0, 1.25), means[1]),
        *((plain, (), Shift(some, dice.integers(-254, 255, len(some)).astype(np.int16))) for some in (rows, rows[:1])),
    ]
    rooms = [[torch.full(plain.shape(), -7.0, device=device) for _ in kinds] for device in ("cpu", DEVICE)]
    here, there = (
        [
            DecodeJob(case.models, payloads(case), case.transform, STEP, 3, out, gains, case.references, mean)
            for (case, gains, mean), out in zip(kinds, room, strict=True)
        ]
        for room in rooms
    )
    for job in here:
        oracle.decode(job)
    decoder.decode_many(there)
    assert all(map(same, rooms[1], rooms[0]))
    assert len({out.numpy().tobytes() for out in rooms[0]}) == len(kinds)


def test_what_does_not_fit_the_scratch_is_done_in_turns(monkeypatch):
    monkeypatch.setattr(decoder, "scratch_bytes", lambda _: 1)
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


@pytest.mark.parametrize(("make", "turns"), [(lambda: long(5, 12), 9), (lambda: referring(12, 90), 4)])
def test_corrupt_payloads_are_refused_as_the_reference_does_and_nothing_is_touched_that_is_not_ours(
    make, turns, guarded
):
    case = make()
    coded = payloads(case)
    assert same(decoded(guarded, case, coded), expected(case, coded, 0, torch.float32))
    dice, refused = np.random.default_rng(6), 0
    for turn in range(turns):
        bad = [bytearray(each) for each in coded]
        victim = bad[turn % 2]
        start = 8 if turn < 6 else 8 + 256  # states and all, or words and escapes only
        for at in dice.integers(start, len(victim), 1 + 40 * (turn % 3)):
            victim[at] = int(dice.integers(256))
        try:
            wanted = expected(case, bad, 0, torch.float32)
        except FormatError:
            refused += 1
            with pytest.raises(FormatError):
                decoded(guarded, case, bad)
        else:
            assert same(decoded(guarded, case, bad), wanted)
    assert refused >= turns // 2


def test_an_escape_that_no_encoder_writes_is_refused():
    case = long(8, 70, depths=1)
    (coded,) = payloads(case)
    assert int.from_bytes(coded[4:8], "little") > 0
    bad = coded[:-2] + (-32768).to_bytes(2, "little", signed=True)
    out = torch.empty(1, 2, 1, 70, 3, device=DEVICE)
    for run in (oracle.decode, lambda job: decode_many([job])):
        with pytest.raises(FormatError):
            run(case.job([bad], STEP, 0, out))


@pytest.mark.parametrize(
    "track", ["AC-L0", "AC-L3", "AC-5x"] if DEVICE.type == "cpu" else TRACKS
)  # the interpreter is slow
def test_every_track_of_a_profile_has_the_bits_of_the_processor(track, monkeypatch):
    kv = related(SHAPE, 70, 5, FIRST)
    kv[:, 1, :, 64:] = kv[:, 1, :, :6]
    payloads = encode(kv, fitted(), track)
    assert payloads[0].startswith(MARK)
    wanted = decode(payloads, fitted(), 70, track)
    ran, kernels = [], decoder.decode_many
    where = ac.coder if DEVICE.type == "cpu" else decoder
    monkeypatch.setattr(where, "decode_many", lambda jobs: (ran.extend(jobs), kernels(jobs)))
    out, views = torch.empty(SHAPE.shape(70), device=DEVICE), list(map(memoryview, payloads))
    codec(track).decode(views[-1], GroupContext(SHAPE, FIRST, 70, fitted()), out, views[:-1])
    assert same(out, wanted)
    assert ran[0].references is not None
    assert track != "AC-L0" or ran[0].mean is not None
