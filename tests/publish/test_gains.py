"""Gains of decoded values: the least of a parabola, chosen by loss, kept only if they save any."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvabr.codec.fit import FitConfig, fit_transform
from kvabr.codec.profile import Profile
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish.calibrate import GAINS, calibrate
from kvabr.publish.target import HeldOutText, choose_gains, measurements
from kvabr.types.catalog import Quality
from tests import kvdata, tinymodels

SPEC = kvdata.spec(4, 2, 32)
CONFIG = FitConfig(outliers=0.0, stack_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "kept"), [({1: 1.06, 3: 1.2}, True), ({1: 1.0, 3: 1.0}, False)])
def test_gains_are_found_for_every_stack_of_values(wanted, kept):
    caches = [kvdata.related(SPEC, 200, seed) for seed in range(2)]
    transform = fit_transform(SPEC, lambda: caches, CONFIG)
    stacks = transform.structure.stacks
    assert [stack.kind for stack in stacks] == [0, 1, 0, 1]
    plain = {}

    def measure(kv):
        """Lose by how far the decoded values are from those with the wanted gains."""
        mean = torch.from_numpy(transform.mean.astype("float32"))[:, 1, :, None]
        values = kv[0][:, 1] - mean
        own = plain.setdefault("values", values.clone())
        loss = 0.1
        for number, stack in enumerate(stacks):
            if stack.kind:
                layers = slice(stack.first, stack.last)
                loss += float((values[layers] - own[layers] * wanted[number]).square().mean())
        return Quality(loss, 0.0, 1.0)

    seen = []
    sample = HeldOutText((caches[0],), SimpleNamespace(measure=measure))
    (gains,), saved = choose_gains([transform], [CONFIG], [sample], lambda *at: seen.append(at))
    assert seen == [(step, 6) for step in range(1, 7)]
    assert measurements([transform]) == 6
    if kept:
        assert gains == pytest.approx([wanted.get(number, 1.0) for number in range(4)], abs=0.01)
        assert saved > 0.01
    else:
        assert (gains, saved) == ((), 0.0)


@pytest.mark.slow
def test_a_calibration_says_what_it_found(tmp_path):
    loaded = load_model(str(tinymodels.save(tmp_path, initializer_range=0.3)))
    told, seen = [], []
    (profile,) = calibrate(
        loaded, {"a": "what it says and means " * 60}, contexts=3, tokens=200, gain=True,
        tell=told.append, progress=lambda *at: seen.append(at),
    )  # fmt: skip
    gains = profile.depths["AC-L0"].gains
    assert [at for at in seen if at[0] == GAINS] == [(GAINS, step, 4) for step in range(1, 5)]
    assert len(told) == 1
    wanted = "decoded values of AC-L0 times 1." if gains else "gains of decoded values save less than 1 %"
    assert told[0].startswith(wanted)
    assert profile.depths["AC-L1"].gains == ()
    read = Profile.from_bytes(profile.to_bytes())
    assert replace(read.depths["AC-L0"], coder=profile.depths["AC-L0"].coder) == profile.depths["AC-L0"]
