"""Producers of growing caches are killed at any moment."""

import pytest

from kvabr.store.admin import find_damage, names_in
from kvabr.store.store_tree import StoreTree
from tests.chaos.killed_producers import kill_many
from tests.chaos.laboratory import Laboratory, Options

pytestmark = [pytest.mark.process, pytest.mark.slow]


async def test_producers_that_are_killed_at_any_moment_leave_no_hole_and_nobody_waits_for_ever(tmp_path):
    wrong = []
    outcomes = await kill_many(tmp_path, 8, told=wrong.append)
    assert wrong == []
    assert outcomes.total() == 8
    assert outcomes["ended"] >= 2
    tree = StoreTree(tmp_path / "published")
    assert find_damage(tree, deep=True) == []
    assert len(names_in(tree)) == outcomes["ended"]


HANG_S = 300.0


def test_no_hole_no_wrong_byte_no_crash_and_no_hang(tmp_path):
    """Late plays do not count here: the machine may be busy."""
    options = Options(seed=8, plays=12, plays_per_round=12, prompts=2, hang_s=HANG_S)
    tally = Laboratory(tmp_path, options).run()
    assert tally.plays >= 12
    found = [each for each in tally.seen if each[1] != "late"]
    assert not found, found
    assert tally.partial == 0
    assert tally.outcomes["complete"] + tally.outcomes["incomplete"] > 0
