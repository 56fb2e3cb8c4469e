"""The bench of speeds: that it times what it says, and sees memory that is taken."""

import pytest
import torch

from kvabr.codec.fit import FitConfig
from kvabr.codec.native import coder
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr_lab.bench import codec_speed, coder_speed, synthetic
from kvabr_lab.bench.codec_speed import Job, time_track
from tests import kvdata

pytestmark = pytest.mark.slow

SPEC = kvdata.spec()
STAGES = {"analysis", "entropy encode", "encode", "entropy decode", "synthesis", "decode"}


@pytest.fixture(scope="module")
def group():
    return kvdata.cache(SPEC, 64).half()


@pytest.mark.parametrize("track", ["AC-L1", "Int4"])
def test_a_job_decodes_what_it_encoded(group, track):
    job = Job.make(group, SPEC, kvdata.profile(SPEC), track)
    assert len(job.payloads) == (2 if track == "AC-L1" else 1)
    out = torch.empty(group.shape, dtype=torch.bfloat16)
    job.decode(out)
    assert (out.float() - group.float()).square().mean() < 0.2 * group.float().var()


def test_stages_of_a_chain_are_timed(group):
    timing = time_track(Job.make(group, SPEC, kvdata.profile(SPEC), "AC-L2"), seconds=0.01)
    assert set(timing.rates) == STAGES
    assert all(rate > 0 for rate in timing.rates.values())
    assert timing.rates["analysis"] > timing.rates["encode"]
    assert timing.path == coder.active_path()
    assert timing.all_cores > 0
    assert 0 < timing.bits < 16


def test_synthetic_groups_of_the_coder_have_the_bits_that_are_asked_for():
    made = coder_speed.synthetic(coder_speed.CacheShape("tiny", 2, 2, 16, 1, 2, 4), 2.0, tokens=128)
    assert made.symbols == 2 * 2 * 2 * 16 * 128
    assert 1.5 < made.ideal_bits[0] / made.symbols < 2.5


def test_a_synthetic_profile_codes_a_synthetic_cache():
    spec = KVSpec.uniform("synthetic", "", 6, 2, 32, "bfloat16", RopeSpec(1e4, 32))
    profile = synthetic.profile(spec, config=FitConfig(stack_layers=3, kept=(16, 16)))
    cache = synthetic.cache(profile, 128)
    assert cache.dtype == torch.bfloat16
    bits = {name: 8 * len(Job.make(cache, spec, profile, name).payloads[-1]) / cache.numel() for name in profile.depths}
    assert 0.1 < bits["AC-L0"] < bits["AC-5x"] < 6
    ideal = codec_speed.over_ideal(codec_speed.Subject("s", spec, cache, profile), ["AC-L0", "AC-L1", "FP16"])
    assert set(ideal) == {"AC-L0", "AC-L1"}
    assert all(0.99 < ratio < 1.2 for ratio in ideal.values())
    cache[0, 1, :, 32:] = cache[0, 1, :, :-32]  # repeated words: its base contains AC-L1
    assert codec_speed.over_ideal(codec_speed.Subject("s", spec, cache, profile), ["AC-L0", "AC-L1"]) == {}
