"""Producers of growing caches are killed at any moment."""

from __future__ import annotations

import pytest

from tests.chaos.killed_producers import kill_many

pytestmark = [pytest.mark.process, pytest.mark.slow]


async def test_producers_that_are_killed_at_any_moment_leave_no_hole_and_nobody_waits_for_ever(tmp_path):
    wrong = []
    outcomes = await kill_many(tmp_path, 12, told=wrong.append)
    assert wrong == []
    assert outcomes.total() == 12
    left = [path.name for path in (tmp_path / "published").iterdir() if path.name[0] == "."]
    assert len(left) <= outcomes["nothing"]
