"""Groups arrive corrupt, late, refused and computed again, in any order: no policy of kvabr's raises, and plays end."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import policies
from kvabr.player.throughput_sampler import ChunkedThroughputSampler
from tests.player.random_play import complete, world

OTHERS = sorted(
    "fixed:Int4" if name == "fixed" else name for name in set(policies()) - {"anytime"} if "oracle" not in name
)
QUICKLY = settings(deadline=None)


def ends_well(dice, policy, **more):
    play = world(dice, policy, **more).run()
    assert complete(play) == (play.record.gave_up is None)


@settings(QUICKLY, max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_the_default_policy_never_raises(seed):
    ends_well(random.Random(seed), "anytime")


@pytest.mark.parametrize("policy", OTHERS)
@settings(QUICKLY, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_nor_does_any_other(policy, seed):
    ends_well(random.Random(seed), policy)


@pytest.mark.parametrize("seed", [*range(60), 4457, 12124])
def test_what_once_went_wrong_and_some_more(seed):
    ends_well(random.Random(seed), "anytime")


@pytest.mark.parametrize("seed", range(3))
def test_prompts_so_long_that_plans_are_kept(seed):
    ends_well(random.Random(seed), "anytime", groups=130)


def test_a_play_that_waited_for_others_since_its_last_bytes_has_no_sample():
    meter = ChunkedThroughputSampler(HarmonicMean(), 2.0)
    meter.first_byte(0.25, 0.5)
    meter.received(5000, 0.5)
    meter.waited(0.75)
    meter.settle(0.75, idle=True)
    assert meter.estimates()[0] == 0.0
