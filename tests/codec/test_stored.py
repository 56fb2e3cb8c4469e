"""Tokens that AC's tracks store separately: their numbers come in parts, layer by layer; and which they are."""

import contextlib
import functools
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load, save

from kvabr.codec.ac import PARTED
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.fit import fit
from kvabr.codec.profile import Profile
from kvabr.codec.stored import (
    LARGEST,
    coarse_of,
    coarse_size,
    fine_size,
    join_coarse,
    join_fine,
    meant,
    split_coarse,
    split_fine,
)
from kvabr.types.errors import FormatError
from kvabr.types.naming import LAYERS
from tests import kvdata
from tests.codec.test_ac import decode, encode
from tests.kvdata import cache, framed, spec, unframed

SHAPE = kvdata.spec(2, 1, 64, group_tokens=128)
SINKS = 40
SIDE = replace(kvdata.profile(SHAPE), sinks=SINKS)
CODES = arrays.arrays(
    np.int16,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=16),
    elements=st.integers(-LARGEST, LARGEST),
)


@functools.cache
def whole():
    return tuple(encode(kvdata.cache(SHAPE, 128, 5), SIDE, "AC-L2", 0))


@given(CODES)
def test_numbers_survive_and_every_layer_halves_their_error_twice(codes):
    coarse = coarse_of(codes)
    data = join_coarse(coarse)
    size = coarse_size(memoryview(data[:4]))
    assert size == len(data) - 4
    assert np.array_equal(split_coarse(memoryview(data[4:]), *codes.shape, "AC-L0"), coarse)
    fine = []
    for layer in range(3):
        most = (2 ** (4 - 2 * layer) - 1) / 2
        assert np.abs(16 * meant(coarse, fine) - codes).max() <= most
        if layer < 2:
            packed = join_fine(codes, coarse, layer + 1)
            assert len(packed) == fine_size(codes.size)
            fine.append(split_fine(memoryview(packed), codes.shape, "AC-L1"))


def test_usual_numbers_take_little_more_than_five_bits():
    values = np.random.default_rng(0).laplace(size=(60, 192))
    codes = np.rint(values / np.abs(values).max(axis=1, keepdims=True) * LARGEST).astype(np.int16)
    assert 8 * len(join_coarse(coarse_of(codes))) < 5.2 * codes.size


@given(st.binary(max_size=60), st.integers(1, 5), st.integers(1, 9))
def test_any_bytes_are_read_or_refused(data, rows, width):
    with contextlib.suppress(FormatError):
        assert abs(split_coarse(memoryview(data), rows, width, "AC-L0")).max() <= 32
    with contextlib.suppress(FormatError):
        assert split_fine(memoryview(data), (rows, width), "AC-L1").max() <= 3


@given(CODES, st.data())
def test_bytes_that_are_cut_or_too_many_are_refused(codes, data):
    coarse = coarse_of(codes)
    whole = join_coarse(coarse)[4:]
    cut = data.draw(st.integers(0, len(whole) - 1))
    for bad in (whole[:cut], whole + b"\0"):
        with pytest.raises(FormatError, match=r"coarse numbers|entropy coded part"):
            split_coarse(memoryview(bad), *codes.shape, "AC-L0")
    fine = join_fine(codes, coarse, 1)
    for bad in (fine[:-1], fine + b"\0"):
        with pytest.raises(FormatError, match="fine numbers"):
            split_fine(memoryview(bad), codes.shape, "AC-L1")


def test_each_layer_knows_a_sink_better_and_the_last_adds_nothing():
    kv = kvdata.cache(SHAPE, 128, 1)
    payloads = encode(kv, SIDE, first=0)
    assert [payload[:4] == PARTED for payload in payloads] == [True, True, True, False]
    errors = [
        float((decode(payloads[: at + 1], SIDE, 128, track, 0) - kv)[:, :, :, :SINKS].square().mean()) ** 0.5
        for at, track in enumerate(LAYERS)
    ]
    assert errors[1] < errors[0] / 3
    assert errors[2] < errors[1] / 3
    assert errors[3] == errors[2]
    alone = codec("AC-5x").encode(kv, GroupContext(SHAPE, 0, 128, SIDE))
    assert torch.equal(
        decode([alone], SIDE, 128, "AC-5x", 0)[..., :SINKS, :],
        decode(payloads, SIDE, 128, "AC-L3", 0)[..., :SINKS, :],
    )


def test_parts_that_do_not_fit_together_are_refused():
    payloads = encode(kvdata.cache(SHAPE, 128, 4), SIDE, "AC-L2", 0)
    first, second, third = payloads
    for bad, why in (
        ([first, third, second], "AC-L2: |entropy coded part"),
        ([first, second[4:], third], "AC-L1: |AC-L2: "),
        ([first, PARTED + struct.pack("<I", 2) + second[8:], third], "AC-L1: "),
        ([PARTED + first], "AC-L0: "),
    ):
        with pytest.raises(FormatError, match=why):
            decode(bad, SIDE, 128, LAYERS[len(bad) - 1], 0)


@given(st.data())
def test_mutilated_payloads_decode_to_finite_numbers_or_are_refused(data):
    payloads = list(whole())
    which = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, min(3000, len(payloads[which]) - 1)))
    changed = bytearray(payloads[which])
    changed[at] ^= data.draw(st.integers(1, 255))
    payloads[which] = bytes(changed)
    with contextlib.suppress(FormatError):
        assert bool(torch.isfinite(decode(payloads, SIDE, 128, "AC-L2", 0)).all())


QUIET = spec(3, 2, 32)
EVERY = 150
"""One of this many tokens is quiet."""


def quiet_cache(seed, tokens=400):
    """Return a cache of which a few tokens have values near the mean of all, and those tokens."""
    kv = cache(QUIET, tokens, seed)
    found = torch.arange(seed % 50 + 10, tokens, EVERY)
    mean = kv[:, 1].mean(dim=2, keepdim=True)
    kv[:, 1][:, :, found] = mean + 0.3 * (kv[:, 1][:, :, found] - mean)
    return kv, found


def fitted(gradient_of_quiet):
    """Return a profile of such caches, given the gradients of quiet tokens; those of all others are about 1."""
    made = [quiet_cache(seed) for seed in (101, 102, 103)]

    def gradients():
        for seed, (kv, found) in enumerate(made):
            slope = torch.randn(kv[:, :, :, :300].shape, generator=torch.Generator().manual_seed(seed))
            slope[:, :, :, found[found < 300]] *= gradient_of_quiet
            yield slope

    return fit(QUIET, lambda: (kv for kv, _ in made), gradients=gradients)


@pytest.fixture(scope="module")
def minded():
    return fitted(30.0)


def listed(profile, kv):
    """Return the tokens that AC-L0 stores separately, without the sink."""
    coefficients = profile.analysis.analyse(kv, 0)
    return coefficients.outlying[1:].nonzero().flatten() + 1


def test_those_that_a_model_minds_are_stored_separately(minded):
    kv, found = quiet_cache(7, 120)
    assert set(found.tolist()) <= set(listed(minded, kv).tolist())
    context = GroupContext(QUIET, 0, 120, minded)
    out = unframed(framed(kv, "AC-L0", context), "AC-L0", context)
    error = (out - kv).square().mean(dim=(0, 1, 2, 4))
    assert float(error[found].max()) < 0.01 * float(error.median())


def test_those_that_it_does_not_mind_are_coded_like_others():
    profile = fitted(1.0)
    assert profile.transform.quiet is None
    assert "quiet" not in json.dumps(profile._packed()[0])
    bare = fit(QUIET, lambda: (quiet_cache(seed)[0] for seed in (101, 102, 103)))
    assert bare.transform.quiet is None


def test_a_profile_file_keeps_them(minded):
    again = Profile.from_bytes(minded.to_bytes()).of(QUIET)
    assert again.transform.quiet.threshold == minded.transform.quiet.threshold
    assert again.transform.quiet.usual.tolist() == minded.transform.quiet.usual.tolist()
    assert Profile.from_bytes(minded.to_bytes()).digest == minded.digest


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 0.0}, {"threshold": 1.0}, {"threshold": float("nan")}, {"threshold": "low"},
        {"usual": [1.0, 1.0]}, {"usual": [1.0, 1.0, -1.0]}, {"usual": [1.0, 1.0, float("inf")]}, {"usual": None},
        {"usual": [[1.0], [1.0], [1.0]]},
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(minded, change):
    data = minded.to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts = json.loads(header["__metadata__"]["kvabr"])
    facts["quiet"] |= change
    with pytest.raises(FormatError):
        Profile.from_bytes(save(load(data), metadata={"kvabr": json.dumps(facts)}))
