"""The bias of values: its numbers, their code, and what it does to a group."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvabr.codec import bias
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.bias import UNITS, join_biases, split_biases, value_rows
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Quantiser
from kvabr.types.errors import FormatError
from tests import kvdata
from tests.codec.native import oracle
from tests.codec.test_ac import FIRST, SHAPE, decode, encode, fitted
from tests.kvdata import related

numbers = arrays.arrays(
    np.int16, st.integers(1, 300), elements=st.one_of(st.just(0), st.integers(-2, 2), st.integers(-127, 127))
)


@given(numbers)
def test_numbers_survive_their_code(given):
    coded = join_biases(given)
    if given.any():
        assert np.array_equal(split_biases(memoryview(coded), len(given), "AC-L0"), given)
    else:
        with pytest.raises(FormatError):
            split_biases(memoryview(coded), len(given), "AC-L0")


@given(numbers, st.data())
def test_bytes_that_are_cut_or_too_many_are_refused(given, data):
    coded = join_biases(given)
    cut = data.draw(st.integers(0, len(coded) - 1))
    for bad in (coded[:cut], coded + b"\0", coded + b"\xff"):
        with pytest.raises(FormatError, match="AC-L1: the biases of"):
            split_biases(memoryview(bad), len(given), "AC-L1")


@pytest.mark.parametrize("path", oracle.PATHS)
@pytest.mark.parametrize("tokens", [1, 3, 127, 128, 300])
def test_errors_are_the_same_on_every_path(path, tokens):
    dice = np.random.default_rng(tokens)
    rows = (dice.standard_normal((50, tokens)) * dice.choice([0.01, 1, 1e6], (50, 1))).astype(np.float32)
    which, coded = np.flatnonzero(dice.random(50) < 0.5), dice.random(tokens) < 0.8
    gains = dice.choice([1, 1.07, 0.9], len(which)).astype(np.float32)
    for quantiser in (Quantiser(0.3, 0.0), Quantiser(0.37, 0.21)):
        with oracle.taking(path):
            sums = coder.error_sums(rows, which, gains, quantiser, coded)
        assert np.array_equal(sums, oracle.error_sums(rows, which, gains, quantiser, coded))


def coded(kv, track, monkeypatch, units):
    """Return the frames of a track and those below it, and the decoded group."""
    context = GroupContext(SHAPE, FIRST, kv.shape[3], fitted())
    with monkeypatch.context() as patch:
        patch.setattr("kvabr.codec.ac.UNITS", units)
        frames = kvdata.framed(kv, track, context)
    return frames, kvdata.unframed(frames, track, context)


def shifted(seed):
    """Return a group whose values have means of their own, by a fraction of how they vary."""
    kv = related(SHAPE, 200, seed, FIRST)
    drawn = torch.randn(kv.shape[0], *kv.shape[2:3], 1, kv.shape[4], generator=torch.Generator().manual_seed(seed))
    kv[:, 1] += 0.3 * kv[:, 1].std() * drawn
    return kv


@pytest.mark.slow
@pytest.mark.parametrize("track", ["AC-L0", "AC-L1"])
def test_the_means_of_values_come_back_and_keys_stay(track, monkeypatch):
    kv = shifted(77)
    frames, out = coded(kv, track, monkeypatch, UNITS)
    plain_frames, plain = coded(kv, track, monkeypatch, {})
    assert torch.equal(out[:, 0], plain[:, 0])
    errors = [float((each - kv)[:, 1].mean(dim=2).square().sum()) for each in (out, plain)]
    assert errors[0] < 0.4 * errors[1]
    assert sum(map(len, frames)) < 1.05 * sum(map(len, plain_frames))


def depth(gains=()):
    return dataclasses.replace(fitted().depth("AC-L0"), step=1.0, dead=0.0, gains=gains)


def found(rows, depth, keep):
    (sums,) = bias.error_sums(fitted().of(SHAPE).transform.structure, depth, [(rows, keep)])
    return bias.biases(sums, int(keep.sum()), 1)


def test_a_bias_is_what_all_tokens_have_in_common():
    structure = fitted().of(SHAPE).transform.structure
    rows = torch.zeros(structure.rows, 74)
    which = value_rows(structure)
    rows[which[7]] = 0.25  # a quarter of the step: all indices are 0
    rows[which[8]] = torch.tensor([0.3, -0.3]).repeat(37)
    rows[which[9], :10] = 100.0
    keep = np.ones(74, bool)
    keep[:10] = False
    one = found(rows, depth(), keep)
    assert one[7] == 4  # sixteenths
    assert np.count_nonzero(one) == 1
    keep[10] = False
    assert not found(rows, depth(), keep).any()  # too few tokens are left


def with_gains(gains):
    depths = fitted().depths
    return dataclasses.replace(fitted(), depths={**depths, "AC-L0": dataclasses.replace(depths["AC-L0"], gains=gains)})


def test_values_grow_about_their_mean_and_bytes_stay(monkeypatch):
    monkeypatch.setattr("kvabr.codec.ac.UNITS", {})  # biases depend on gains
    stacks = fitted().transform.structure.stacks
    gains = tuple(1.1 + 0.02 * number if stack.kind else 1.0 for number, stack in enumerate(stacks))
    louder, group = with_gains(gains), related(SHAPE, 128, 7, FIRST)
    payloads = encode(group, fitted(), "AC-L1")
    assert encode(group, louder, "AC-L1") == payloads
    base, more = (decode(payloads[:1], side, 128, "AC-L0") for side in (fitted(), louder))
    both, other = (decode(payloads, side, 128, "AC-L1") for side in (fitted(), louder))
    assert torch.equal(both, other)  # the gains of a layer are for itself
    assert torch.equal(base[:, 0], more[:, 0])
    mean = torch.from_numpy(fitted().transform.mean.astype("float32"))[:, 1, :, None]
    aside = codec("AC-L0").outliers(memoryview(payloads[0]), GroupContext(SHAPE, FIRST, 128, fitted()))
    for gain, stack in zip(gains, stacks, strict=True):
        if stack.kind:
            layers = slice(stack.first, stack.last)
            wanted = (base[layers, 1] - mean[layers]) * gain
            grown = torch.isclose(more[layers, 1] - mean[layers], wanted, rtol=1e-4, atol=1e-4).all(dim=(0, 1, 3))
            assert int((~grown).sum()) == aside < 10  # tokens that are stored separately stay as they are


@pytest.mark.parametrize(("gain", "fewer"), [(1.0, 1), (0.1, 0), (3.0, 0), (float("nan"), 0)])
def test_gains_that_fit_no_profile_are_refused(gain, fewer):
    with pytest.raises(FormatError, match="gain"):
        with_gains((gain,) * (len(fitted().transform.structure.stacks) - fewer))
