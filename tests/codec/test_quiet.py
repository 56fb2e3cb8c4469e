"""Tokens whose values say little: found by a calibration, known by its profile, stored separately by encoders."""

import json

import pytest
import torch
from safetensors.torch import load, save

from kvabr.codec.base import GroupContext
from kvabr.codec.fit import fit
from kvabr.codec.profile import Profile
from kvabr.types.errors import FormatError
from tests.kvdata import cache, framed, spec, unframed

SHAPE = spec(3, 2, 32)
EVERY = 150
"""One of this many tokens is quiet."""


def quiet_cache(seed, tokens=400):
    """Return a cache of which a few tokens have values near the mean of all, and those tokens."""
    kv = cache(SHAPE, tokens, seed)
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

    return fit(SHAPE, lambda: (kv for kv, _ in made), gradients=gradients)


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
    context = GroupContext(SHAPE, 0, 120, minded)
    out = unframed(framed(kv, "AC-L0", context), "AC-L0", context)
    error = (out - kv).square().mean(dim=(0, 1, 2, 4))
    assert float(error[found].max()) < 0.01 * float(error.median())


def test_those_that_it_does_not_mind_are_coded_like_others():
    profile = fitted(1.0)
    assert profile.transform.quiet is None
    assert "quiet" not in json.dumps(profile._packed()[0])
    bare = fit(SHAPE, lambda: (quiet_cache(seed)[0] for seed in (101, 102, 103)))
    assert bare.transform.quiet is None


def test_a_profile_file_keeps_them(minded):
    again = Profile.from_bytes(minded.to_bytes()).of(SHAPE)
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
