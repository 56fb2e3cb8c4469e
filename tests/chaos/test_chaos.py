"""A short run of the chaos laboratory: real processes, real faults, and nothing that depends on the machine's speed."""

from __future__ import annotations

import pytest

from tests.chaos.laboratory import Laboratory, Options

pytestmark = [pytest.mark.process, pytest.mark.slow]

HANG_S = 300.0


def test_no_hole_no_wrong_byte_no_crash_and_no_hang(tmp_path):
    """Late plays do not count here: the machine may be busy."""
    options = Options(seed=8, plays=24, plays_per_round=12, prompts=2, hang_s=HANG_S)
    tally = Laboratory(tmp_path, options).run()
    assert tally.plays >= 24
    found = [each for each in tally.seen if each[1] != "late"]
    assert not found, found
    assert tally.partial == 0
    assert tally.outcomes["complete"] + tally.outcomes["incomplete"] > 0
