"""Groups arrive corrupt, late, refused and computed again, in any order: no policy of kvabr's raises, and plays end."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvabr.abr.plugins import policies
from kvabr.player.groups import TRANSITIONS, Groups, Stage
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


DOCS = Path(__file__).parents[2] / "docs/design/architecture.md"


def test_groups_go_only_where_the_table_says_and_everywhere_it_says(monkeypatch):
    seen, found = set(), Groups._found

    def watched(groups, group):
        stage = found(groups, group)
        seen.add((groups.stage(group), stage))
        return stage

    monkeypatch.setattr(Groups, "_found", watched)
    for seed in (*range(500), 832):  # with a group that comes while it is computed, and has been abandoned
        world(random.Random(seed), "anytime" if seed % 2 else "cachegen").run()
    changes = {(before, after) for before, after in seen if before != after}
    told = {(before, after) for before, afters in TRANSITIONS.items() for after in afters}
    assert changes <= told
    # These plays are of complete assets.
    assert all(Stage.UNPUBLISHED in change for change in told - changes)


def test_the_docs_have_the_table():
    rows = [
        f"| {stage.name.lower()} | {', '.join(after.name.lower() for after in TRANSITIONS[stage]) or 'stays'} |"
        for stage in Stage
    ]
    assert "\n".join(rows) in DOCS.read_text(encoding="utf-8")
