"""Verification of plays of several layer classes: what cannot be seen counts for nothing, and no cut lacks a window."""

from __future__ import annotations

import pytest

from kvabr.replay.verify import ComputeStep, FetchStep, Verifier
from kvabr.types.errors import UsageError
from tests.client.classes import SLIDING, WINDOWS, Computer, published

TOKENS = list(range(150))


@pytest.fixture(scope="module", params=[SLIDING, WINDOWS], ids=lambda spec: spec.model)
def verifier(request, tmp_path_factory):
    asset = published(tmp_path_factory.mktemp("asset"), request.param, TOKENS).assets[0]
    return asset.catalog.to_play, Verifier(asset, Computer(request.param))


def fetch(play, track):
    return [FetchStep(group, track) for group in range(play.groups)]


def test_only_what_is_needed_is_needed(verifier):
    play, verify = verifier
    exact = verify.play(fetch(play, "FP16"))
    assert exact.kl == pytest.approx(0, abs=1e-12)
    assert exact.predicted == pytest.approx(1e-6 * play.groups)
    coarse = verify.play(fetch(play, "Int8"))
    assert coarse.kl > 0
    assert coarse.predicted == pytest.approx(0.001 * play.groups)


def test_an_engine_computes_from_a_cut_on(verifier):
    play, verify = verifier
    first = play.cut(play.groups - 1)
    assert play.tokens_before(first) == 144
    done = verify.play([*fetch(play, "FP16")[:first], ComputeStep(first, play.groups)])
    assert done.kl == pytest.approx(0, abs=1e-12)
    assert verify.play([ComputeStep(0, play.groups)]).kl == pytest.approx(0, abs=1e-12)
    inherited = verify.play([*fetch(play, "Int8")[:first], ComputeStep(first, play.groups)])
    assert 0.001 * first < inherited.predicted < 0.001 * play.groups
    with pytest.raises(UsageError, match="cannot compute from group"):
        verify.play([*fetch(play, "FP16")[: first - 1], ComputeStep(first - 1, play.groups)])
