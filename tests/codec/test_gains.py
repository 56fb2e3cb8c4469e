"""Gains of decoded values: the same bits on every path, in the profile, refused by older readers, and bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.fit import FitConfig, fit
from kvabr.types.errors import FormatError
from tests import kvdata

SPEC = kvdata.spec(4, 2, 32)
PLAIN = fit(SPEC, lambda: [kvdata.related(SPEC, 600, seed) for seed in range(3)], FitConfig(outliers=0.0))
STACKS = PLAIN.transform.structure.stacks
GAINS = tuple(1.1 + 0.02 * number if stack.kind else 1.0 for number, stack in enumerate(STACKS))
FIRST = 1000
"""Behind the sinks."""


def with_gains(gains):
    base = replace(PLAIN.depths["AC-L0"], gains=gains)
    return replace(PLAIN, depths={**PLAIN.depths, "AC-L0": base})


@pytest.fixture(scope="module")
def group():
    return kvdata.related(SPEC, 128, 7, FIRST)


def coded(profile, group):
    """Return the payloads of the first two layers, and what the first, and both, decode to."""
    context = GroupContext(SPEC, FIRST, 128, profile)
    payloads = [codec("AC-L0").encode(group, context)]
    payloads.append(codec("AC-L1").encode(group, context, payloads))
    base, both = torch.empty(SPEC.shape(128)), torch.empty(SPEC.shape(128))
    codec("AC-L0").decode(memoryview(payloads[0]), context, base)
    codec("AC-L1").decode(memoryview(payloads[1]), context, both, [memoryview(payloads[0])])
    return payloads, base, both


def test_values_grow_about_their_mean_and_bytes_stay(group, monkeypatch):
    monkeypatch.setattr("kvabr.codec.ac.UNITS", {})  # biases depend on gains
    payloads, base, both = coded(PLAIN, group)
    same, more, other = coded(with_gains(GAINS), group)
    assert same == payloads
    assert torch.equal(both, other)  # the gains of a layer are for itself
    assert torch.equal(base[:, 0], more[:, 0])
    mean = torch.from_numpy(PLAIN.transform.mean.astype("float32"))[:, 1, :, None]
    aside = codec("AC-L0").outliers(memoryview(payloads[0]), GroupContext(SPEC, FIRST, 128, PLAIN))
    for number, stack in enumerate(STACKS):
        if stack.kind:
            layers = slice(stack.first, stack.last)
            wanted = (base[layers, 1] - mean[layers]) * GAINS[number]
            grown = torch.isclose(more[layers, 1] - mean[layers], wanted, rtol=1e-4, atol=1e-4).all(dim=(0, 1, 3))
            assert int((~grown).sum()) == aside < 10  # tokens that are stored separately stay as they are


@pytest.mark.parametrize("gains", [(1.0,), (0.1,) * len(STACKS), (3.0,) * len(STACKS), (float("nan"),) * len(STACKS)])
def test_gains_that_fit_no_profile_are_refused(gains):
    with pytest.raises(FormatError, match="gain"):
        with_gains(gains)
