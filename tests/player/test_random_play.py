"""Groups arrive corrupt, late, refused and computed again, in any order: no policy of kvabr's raises, and plays end."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvabr.abr.plugins import policies
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
