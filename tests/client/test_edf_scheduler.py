"""Earliest deadline first in few priorities: always in order, seldom changed, nobody behind for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvabr.client.edf_scheduler import LEVELS, Order, wire_priority


def test_what_a_play_needs_goes_before_what_others_would_like():
    assert wire_priority(LEVELS - 1, 127) < 128 <= wire_priority(0, 128)
    assert wire_priority(0, 0) == 0
    assert wire_priority(LEVELS - 1, 255) == 255


@given(st.integers(0, LEVELS - 1), st.integers(0, LEVELS - 1), st.integers(0, 255), st.integers(0, 255))
def test_levels_do_not_mix(one, other, p, q):
    a, b = wire_priority(one, p), wire_priority(other, q)
    assert 0 <= a < 256
    if (p < 128) == (q < 128) and one < other:
        assert a < b
    if one == other and p <= q:
        assert a <= b


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=80))
def test_levels_follow_deadlines_whoever_comes_and_goes(steps):
    order, due = Order(), {}
    for number, (leaves, when) in enumerate(steps):
        before = {play: order.level(play) for play in due}
        if leaves and due:
            gone = sorted(due)[when % len(due)]
            del due[gone]
            changed = order.remove(gone)
        else:
            due[number] = float(when)
            changed = order.add(number, float(when))
        assert len(order) == len(due)
        ranked = sorted(due, key=lambda play: (due[play], play))
        levels = [order.level(play) for play in ranked]
        assert levels == sorted(levels)
        assert all(0 <= level < LEVELS for level in levels)
        # Only the last level is shared, and only if there are more plays than levels.
        assert len(set(levels)) >= min(len(levels), LEVELS)
        assert set(changed) == {play for play in before if play in due and order.level(play) != before[play]}


def test_plays_in_order_of_their_deadlines_disturb_nobody():
    order = Order()
    assert all(order.add(play, play) == [] for play in range(LEVELS))
    assert order.remove(0) == []
    assert len(order.add(LEVELS, LEVELS)) == LEVELS - 1  # no room left behind: all move up, once
