"""Tokens that refer to others, decoded by the kernels: the bits of the reference."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvabr.codec import ac, gpu
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.gpu import together
from kvabr.codec.native.coder_model import DecodeJob
from kvabr.codec.referring import MARK
from kvabr.types.errors import FormatError
from tests.codec.gpu.cases import STEP, expected, long, payloads, same
from tests.codec.gpu.conftest import DEVICE
from tests.codec.native import models, oracle
from tests.codec.test_ac import FIRST, TRACKS, decode, encode
from tests.kvdata import related, spec

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decoder  # not without Triton

SHAPE = spec(2, 1, 8)


def referring(seed, tokens, depths=2):
    """A case with references, and tables for them at some depths."""
    case = long(seed, tokens, depths)
    return replace(case, references=models.some_references(np.random.default_rng(seed), tokens))


@pytest.mark.parametrize(
    ("seed", "tokens", "depths"), [(11, 65, 1), (12, 199, 2), (13, 100, 3), (14, 128, 3), (17, 128, 1)]
)
def test_they_have_the_bits_of_the_reference(seed, tokens, depths):
    case = referring(seed, tokens, depths)
    coded = payloads(case)
    out = torch.full(case.shape(), -7.0, device=DEVICE)
    decoder.decode_many([case.job(coded, STEP, 5, out)])
    assert same(out, expected(case, coded, 5, torch.float32))


def test_groups_with_and_without_share_a_launch():
    plain = long(12, 80)
    cases = [plain, replace(plain, references=models.some_references(np.random.default_rng(1), 80)), plain]
    coded = list(map(payloads, cases))
    assert len(coded[0][0]) != len(coded[1][0])
    mean = np.random.default_rng(2).normal(size=plain.transform.mean.shape).astype(np.float32)
    rooms = [[torch.full(case.shape(), -7.0, device=device) for case in cases] for device in ("cpu", DEVICE)]
    jobs = [
        [
            DecodeJob(case.models, some, case.transform, STEP, 3, out, (1.25, 0.75), case.references, mean)
            for case, some, out in zip(cases, coded, room, strict=True)
        ]
        for room in rooms
    ]
    for job in jobs[0]:
        oracle.decode(job)
    decoder.decode_many(jobs[1])
    assert all(map(same, rooms[1], rooms[0]))


def test_corrupt_payloads_are_refused_and_nothing_is_touched_that_is_not_ours(guarded):
    case = referring(12, 90)
    coded = payloads(case)
    dice, refused = np.random.default_rng(7), 0
    for turn in range(4):
        bad = [bytearray(each) for each in coded]
        for at in dice.integers(8, len(bad[turn % 2]), 1 + 40 * turn):
            bad[turn % 2][at] = int(dice.integers(256))
        out = torch.empty(case.shape())
        work = lambda bad=bad, out=out: decoder.decode_many([case.job(bad, STEP, 0, out)])  # noqa: E731
        try:
            wanted = expected(case, bad, 0, torch.float32)
        except FormatError:
            refused += 1
            with pytest.raises(FormatError, match="does not end where it should"):
                guarded(out, work)
        else:
            guarded(out, work)
            assert same(out, wanted)
    assert refused > 1


@functools.cache
def fitted():
    config = FitConfig(stack_layers=2, kept=(4, 4), classes=6, outliers=0.0)
    return fit(SHAPE, lambda: [related(SHAPE, 300, seed) for seed in range(3)], config)


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


def test_the_entry_leaves_nothing_to_the_processor(monkeypatch):
    monkeypatch.setattr(gpu.coder, "decode_many", None)
    monkeypatch.setattr(together, "_compare", lambda *_: None)
    case = referring(15, 66, 1)
    coded = payloads(case)
    out = torch.empty(case.shape(), device=DEVICE)
    gpu.decode_many([case.job(coded, STEP, 0, out)])
    assert same(out, expected(case, coded, 0, torch.float32))
