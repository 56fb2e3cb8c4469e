"""AC tracks of several layer classes, and of latents: published with a profile of their own, and played."""

import numpy as np
import pytest
import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.group import cut, decode_group, encode_group
from kvabr.codec.profile import Profile
from kvabr.engines.transformers.cache import cache_kv
from kvabr.publish.calibrate import SEARCH, calibrate, stages
from kvabr.publish.collect import caches_of
from kvabr.publish.encoder import compute_cache, own_profile
from kvabr.publish.target import Target
from kvabr.types.errors import UsageError
from kvabr.types.naming import LAYERS
from tests.client.virtual import virtual
from tests.engines.transformers.text import IDS, PREFIX
from tests.engines.transformers.tiny import prefilled, published, ready_from, tiny

pytestmark = pytest.mark.model
CHUNK = "ab" * 32


@virtual
@pytest.mark.parametrize("name", ["Gemma3", "GPT-OSS", "Llama 4", "DeepSeek V3", "Kimi Linear", "LFM2", "MiniMax"])
async def test_what_is_played_is_what_the_codec_made(name, tmp_path):
    engine = tiny(name)
    spec, cache, tokens = engine.spec, None, 384  # states are those behind the last whole group
    if any(each.kind == "state" for each in spec.classes):
        exact = compute_cache(engine, PREFIX[:tokens])
    else:
        cache, tokens = prefilled(engine, PREFIX, whole=True), 400
        exact = cache_kv(cache, spec, tokens)
    profile = Profile.from_bytes(own_profile(spec, exact).to_bytes())
    library = published(engine, tmp_path, cache=cache, profile=profile, tracks=LAYERS)
    ready = await ready_from(library, engine, policy="fixed:AC-L0", recompute=False)
    played = ready.played
    assert (ready.tokens, ready.problem, set(played.coverage)) == (tokens, None, {"AC-L0"})
    for unit in played.catalog.units:
        context = GroupContext(spec.parts[unit.part], unit.first, unit.tokens, profile)
        kv, there = cut(exact, unit, spec), played.parts[unit.part]
        wanted = torch.empty(kv.shape, dtype=there.dtype)
        decode_group(encode_group(kv, "AC-L0", context, CHUNK, 0), "AC-L0", context, CHUNK, 0, wanted)
        at = 0 if spec.classes[unit.part].kind == "state" else unit.first - played.spans[unit.part].first
        assert torch.equal(there[:, :, :, at : at + unit.tokens], wanted)


class Loaded:
    """A model whose tokens are bytes."""

    opening = ()

    def __init__(self, name, **options):
        self.engine = tiny(name, **options)

    def encode(self, text):
        return list(text.encode())


TEXTS = {"a": "what it says about windows, and what it does not " * 30}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3", "DeepSeek V3", "Kimi Linear", "Bamba", "LFM2", "MiniMax"])
def test_a_model_of_several_classes_is_calibrated(name):
    loaded, seen = Loaded(name), []
    (profile,) = calibrate(loaded, TEXTS, contexts=3, tokens=240, progress=lambda *at: seen.append(at))
    spec = loaded.engine.spec
    profile.check(spec)
    assert Profile.from_bytes(profile.to_bytes()).digest == profile.digest
    # A class of one layer has no stacks, and the columns of states do not refer to each other.
    done = dict.fromkeys(stage for stage, _, _ in seen)
    assert [stage for stage in stages(spec) if stage in done or not stage.endswith(("stacks", "references"))] == list(
        done
    )
    assert seen == [(stage, number, 3) for stage in done for number in (1, 2, 3)]
    if name == "Gemma3":
        assert stages(spec)[1] == "window64: means"


def test_a_calibration_takes_several_snapshots_of_each_context():
    engine = tiny("Kimi Linear", dtype=torch.float32)
    every, kept = caches_of(engine, IDS[:240], 180)
    exact, last = (engine.prefill_classes(IDS[:end]) for end in (180, 240))
    for part, many, one, cut_there, at_end in zip(engine.spec.parts, every, kept, exact, last, strict=True):
        rows = part.rows if part.only.kind == "state" else 240
        assert many.shape[3] == (7 * rows if part.only.kind == "state" else rows)
        torch.testing.assert_close(one, cut_there)
        torch.testing.assert_close(many[:, :, :, -rows:], at_end)


def steps_of(profile, track):
    """The mean step of a track in units of the cache, over keys and values of all classes."""
    own = [profile.of(part) for part in profile.spec.parts]
    return np.exp(np.mean([np.log(each.depths[track].step * each.transform.norm.mean(axis=0)) for each in own]))


@pytest.mark.slow
def test_steps_are_chosen_by_what_they_lose():
    # In 16 bits this model's loss is made of roundings as much as of steps, and how these fall depends on the machine.
    loaded, told, seen = Loaded("Gemma3", dtype=torch.float32), [], []
    options = {"contexts": 3, "tokens": 240}
    (usual,) = calibrate(loaded, TEXTS, **options)
    steps = []
    for target in (1e-6, 1e-5):
        (made,) = calibrate(
            loaded, TEXTS, target=Target(target), notify=told.append, progress=lambda *at: seen.append(at), **options
        )
        steps.append(steps_of(made, "AC-5x"))
        for part in loaded.engine.spec.parts:  # all depths move together
            depths = made.of(part).depths
            assert depths["AC-L0"].step / depths["AC-5x"].step == pytest.approx(3.3 / 0.185)
    assert steps[0] < steps[1]
    assert usual.of(loaded.engine.spec.parts[0]).depths["AC-5x"].step == 0.185
    measured = [float(line.split(" loses ")[1].split()[0]) for line in told]
    assert [0.2 * target < kl <= target for kl, target in zip(measured, (1e-6, 1e-5), strict=True)] == [True, True]
    assert any(stage == SEARCH and done == total for stage, done, total in seen)


@pytest.mark.slow
def test_profiles_for_several_scales_differ_in_steps_alone():
    fine, usual = calibrate(Loaded("Gemma3"), TEXTS, scales=(0.5, 1.0), contexts=2, tokens=240)
    assert usual.digest == calibrate(Loaded("Gemma3"), TEXTS, contexts=2, tokens=240)[0].digest
    for part in usual.spec.parts:
        assert fine.of(part).depths["AC-L0"].step == usual.of(part).depths["AC-L0"].step / 2
        assert (fine.of(part).transform.norm == usual.of(part).transform.norm).all()


@pytest.mark.slow
def test_a_loss_that_no_step_reaches_is_said_with_its_reason():
    with pytest.raises(UsageError, match=r"cannot reach a KL of 1e-12: with the finest steps .* AC-5x loses .* nats"):
        calibrate(Loaded("Gemma3"), TEXTS, contexts=2, tokens=240, target=Target(1e-12))
    with pytest.raises(UsageError, match="give --contexts 2"):
        calibrate(Loaded("Gemma3"), {"a": "x" * 300}, contexts=1, tokens=240, target=Target(0.1))
