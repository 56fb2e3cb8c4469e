"""Quantising and entropy coding in kernels: the bytes of the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvabr.codec.native.coder_model import Quantiser
from kvabr.types.errors import FormatError
from tests.codec.gpu.cases import long
from tests.codec.gpu.conftest import DEVICE
from tests.codec.native import models, oracle

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import writer  # not without Triton

OWN, LOWER = Quantiser(0.2, 0.1), Quantiser(0.6, 0.05)


def some_job(seed, tokens, *, refines, refers=True, model=None):
    dice = np.random.default_rng(seed)
    model = model or long(seed, tokens, 2).models[int(refines)]
    rows = dice.laplace(0, 0.6, (model.rows, tokens)).astype(np.float32)
    rows[dice.random(model.rows) < 0.3] *= 0.01
    rows[dice.random(rows.shape) < 0.02] *= 90
    rows[:, 0] = 0.1 * np.arange(model.rows)  # between two indices
    references = models.some_references(dice, tokens) if refers else None
    keep = dice.random(tokens) < 0.9
    return writer.EncodeJob(model, torch.from_numpy(rows).to(DEVICE), OWN, LOWER if refines else None, keep, references)


def wanted(job):
    return oracle.encode_rows(job.model, job.rows.cpu().numpy(), job.own, job.lower, job.keep, job.references)


@pytest.mark.parametrize("refines", [False, True])
@pytest.mark.parametrize(
    ("seed", "tokens", "refers"), [(1, 5, False), (2, 64, True), (12, 100, True), (13, 199, True), (14, 130, False)]
)
def test_payloads_are_those_of_the_reference(seed, tokens, refers, refines):
    job = some_job(seed, tokens, refines=refines, refers=refers)
    assert writer.encode_many([job]) == [wanted(job)]


def test_groups_with_and_without_references_share_a_launch():
    first = some_job(12, 70, refines=True)
    assert first.model.near is not None
    jobs = [first, *(some_job(seed, 70 + seed, refines=True, refers=seed != 3, model=first.model) for seed in (3, 4))]
    assert writer.encode_many(jobs) == list(map(wanted, jobs))


def test_what_does_not_fit_the_scratch_is_done_in_turns(monkeypatch):
    monkeypatch.setattr(writer, "scratch_bytes", lambda _: 1)
    jobs = [some_job(5, 3, refines=False)] * 2
    assert writer.encode_many(jobs) == list(map(wanted, jobs))


def test_nothing_is_touched_that_is_not_theirs(guarded):
    job, made = some_job(12, 90, refines=True), []
    guarded(job.rows, lambda: made.extend(writer.encode_many([job])))
    assert made == [wanted(job)]


def test_indices_out_of_reach_are_refused_as_by_the_reference():
    job = some_job(12, 70, refines=True)
    job.rows[0, np.flatnonzero(job.keep)[0]] = 0.6 * 20_000
    for encode in (wanted, lambda job: writer.encode_many([job])):
        with pytest.raises(FormatError, match="exceeds 16 bits"):
            encode(job)


def test_jobs_that_do_not_fit_are_refused():
    job = some_job(12, 70, refines=True)
    for change in ({"lower": None}, {"keep": job.keep[:5]}, {"rows": job.rows[:2]}, {"rows": job.rows.double()}):
        with pytest.raises(FormatError):
            replace(job, **change)
    with pytest.raises(FormatError, match="references"):
        replace(job, rows=job.rows[:, :69], keep=job.keep[:69])
