"""What the laboratory says of memory: flat at the end, or growing."""

from __future__ import annotations

import pytest

from tests.chaos.nodes import Sample
from tests.chaos.tally import Tally

MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (lambda index: 300 + min(index, 40), []),  # it settles
        (lambda index: 300 + index, ["origin: memory"]),
        (lambda index: 300 + index / 20, []),  # less than allocators need
        (lambda index: 300 + 100 * (index == 95), []),  # a moment is no trend
        (lambda index: 20 + index / 20, []),
    ],
)
def test_memory_is_flat_if_the_later_half_of_a_life_is(memory, found):
    tally = Tally()
    tally.lives["origin"] = [[], [Sample(int(memory(index) * MIB), 10, 5) for index in range(100)]]
    assert tally.growing() == found
    assert f"growing: {', '.join(found) or 'nothing'}" in tally.table()


def test_files_and_threads_count_too_and_short_lives_say_nothing():
    tally = Tally()
    tally.lives["relay"] = [[Sample(MIB, 10 + index, 5 + index) for index in range(100)]]
    assert tally.growing() == ["relay: files", "relay: threads"]
    tally.lives["relay"] = [[Sample(MIB * index, 10, 5) for index in range(15)]]
    assert tally.growing() == []
