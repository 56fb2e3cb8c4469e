"""Producers of growing caches are killed at any moment."""

from __future__ import annotations

import pytest

from kvabr.store.admin import find_damage, names_in
from kvabr.store.store_tree import StoreTree
from tests.chaos.killed_producers import kill_many

pytestmark = [pytest.mark.process, pytest.mark.slow]


async def test_producers_that_are_killed_at_any_moment_leave_no_hole_and_nobody_waits_for_ever(tmp_path):
    wrong = []
    outcomes = await kill_many(tmp_path, 12, told=wrong.append)
    assert wrong == []
    assert outcomes.total() == 12
    assert outcomes["ended"] >= 3
    tree = StoreTree(tmp_path / "published")
    assert find_damage(tree, deep=True) == []
    assert len(names_in(tree)) == 12 - outcomes["nothing"]
