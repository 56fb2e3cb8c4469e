"""Admission bounds plays and refuses early; the scheduler orders them by deadline, seldom changes, starves nobody."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.client.runner import LEVELS, Admission, EdfScheduler, wire_priority
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.errors import BusyError
from tests.client.virtual import virtual


class Plays:
    def __init__(self, plays=1, waiting=10):
        self.metrics = ClientMetrics()
        self.admission = Admission(plays, waiting, self.metrics)
        self.begun = []

    async def one(self, name, deadline_s, takes_s):
        async with self.admission.enter(deadline_s) as waited_s:
            self.begun.append(name)
            await asyncio.sleep(takes_s)
        return waited_s

    def start(self, *args):
        return asyncio.get_running_loop().create_task(self.one(*args))


@virtual
async def test_who_would_wait_too_long_is_told_in_time():
    plays = Plays()
    busy = plays.start("a", 10, 5)
    await asyncio.sleep(0)
    start = asyncio.get_running_loop().time()
    with pytest.raises(BusyError, match="compute this prompt instead"):
        await plays.one("b", 2.0, 1)
    assert asyncio.get_running_loop().time() - start == pytest.approx(0.5)
    assert plays.metrics.value("kvabr_client_refused_total", reason="late") == 1
    await busy


@virtual
async def test_who_leaves_the_queue_takes_nobodys_turn():
    plays = Plays()
    first, gone, last = (plays.start(name, 100, 1) for name in "abc")
    await asyncio.sleep(0.5)
    gone.cancel()
    await asyncio.gather(first, last)
    assert plays.begun == ["a", "c"]
    assert plays.metrics.value("kvabr_client_plays_in_flight") == 0
    # Cancelled in the moment in which its turn came: the turn goes on to the next.
    first, gone, last = (plays.start(name, 100, 1) for name in "xyz")
    await asyncio.sleep(0)
    first.add_done_callback(lambda _: gone.cancel())
    await asyncio.gather(first, last)
    assert plays.begun[-1] == "z"
    assert plays.metrics.value("kvabr_client_plays_in_flight") == 0


@virtual
async def test_who_leaves_the_queue_does_not_change_the_order_of_the_others():
    plays = Plays()
    names = (10, 50, 20, 60, 70, 30, 40)
    first, *waiting = [plays.start("first", 100, 1), *(plays.start(due, due, 1) for due in names)]
    await asyncio.sleep(0.5)
    waiting[names.index(20)].cancel()
    await asyncio.sleep(0)
    last = plays.start(35, 34.5, 1)  # a newcomer clears away those who left
    await asyncio.gather(first, last, *waiting, return_exceptions=True)
    assert plays.begun == ["first", 10, 30, 35, 40, 50, 60, 70]


@given(st.integers(0, LEVELS - 1), st.integers(0, LEVELS - 1), st.integers(0, 255), st.integers(0, 255))
def test_levels_do_not_mix(one, other, p, q):
    a, b = wire_priority(one, p), wire_priority(other, q)
    assert 0 <= a < 256
    if p // 64 == q // 64 < 2 and one < other:
        assert a < b
    if one == other and p <= q:
        assert a <= b


@given(st.integers(0, LEVELS - 1), st.integers(0, LEVELS - 1), st.integers(64, 127))
def test_what_a_late_play_needs_counts_as_much_on_any_track(one, other, priority):
    assert wire_priority(one, priority, late=True) < 64
    if one < other:
        assert wire_priority(one, priority, late=True) < wire_priority(other, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=80))
def test_levels_follow_deadlines_as_plays_come_and_go(steps):
    order, due = EdfScheduler(), {}
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
