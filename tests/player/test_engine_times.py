"""Engines that are slower than their cost says."""

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.abr.view import View
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.session import Session
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog
from tests.replay.worlds import world

COST = PrefillCost(0.01, 1e-4)


def queue_of(groups=8):
    view = View(Ladder(catalog(groups)), 2.0, cost=COST)
    return ComputeQueue(COST, "hole", view, 0.01), view


def run(queue, first, last, now, factor):
    """Compute groups in ``factor`` times the told seconds; return when they are done."""
    queue.start(first, last, now)
    now += factor * COST.seconds(128 * first, 128 * (last - first))
    queue.finish(now)
    return now


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_calls_take_as_much_longer_as_the_last_ones_took(factor):
    queue, view = queue_of()
    queue.choose(range(3, 6))
    waiting_s = queue.backlog_s(0.0)
    now = run(queue, 0, 2, 0.0, factor)
    assert view.cost.seconds(0, 512) == pytest.approx(factor * COST.seconds(0, 512))
    assert queue.backlog_s(now) == pytest.approx(factor * waiting_s)
    run(queue, 3, 6, now, factor)
    assert view.cost.seconds(0, 512) == pytest.approx(factor * COST.seconds(0, 512))
    assert queue.backlog_s(now) == 0.0


@pytest.mark.parametrize(("first", "last", "factor"), [(0, 8, 1.05), (0, 1, 1.4), (0, 8, 0.0), (0, 8, 0.3)])
def test_calls_that_are_less_than_a_tick_late_or_fast_change_nothing(first, last, factor):
    queue, view = queue_of()
    run(queue, first, last, 0.0, factor)
    assert view.cost == COST


def test_a_clock_that_jumps_does_not_spoil_a_play():
    queue, view = queue_of()
    run(queue, 0, 2, 0.0, 1e6)
    assert view.cost.seconds(0, 512) / COST.seconds(0, 512) == pytest.approx(10.0)


def test_calls_that_failed_say_nothing():
    queue, view = queue_of()
    queue.start(0, 2, 0.0)
    queue.finish(9.0, failed=True)
    assert view.cost == COST


def test_a_call_that_is_late_may_be_later_still():
    queue, _ = queue_of()
    queue.start(0, 2, 0.0)
    ends_s = COST.seconds(0, 256)
    assert queue.backlog_s(0.5 * ends_s) == pytest.approx(0.5 * ends_s)
    assert queue.backlog_s(3.0 * ends_s) == pytest.approx(2.0 * ends_s)


def test_overdue_follows_the_corrected_times():
    """A play is overdue once it is later than the engine would take."""
    queue, view = queue_of()
    assert queue.overdue(view.deadline_s + 1.1 * _alone_s(queue), queue.left)
    run(queue, 0, 1, 0.0, 3.0)
    assert not queue.overdue(view.deadline_s + 1.1 * _alone_s(queue), queue.left)
    assert queue.overdue(view.deadline_s + 3.3 * _alone_s(queue), queue.left)


def _alone_s(queue):
    return sum(COST.seconds(128 * group, 128) for group in queue.left)


@pytest.mark.parametrize("load", [3.0, 10.0])
def test_an_engine_that_is_slower_than_it_said_does_not_cost_the_deadline(load):
    """After its first call it no longer seems able to compute everything in time, so the rest is left to the link."""
    offer, told = catalog(32, layered=True), PrefillCost.from_rate(32 * 128 / 1.0)
    base_rate = sum(offer.track("base").bytes) / 2.0
    play = Session(Ladder(offer), 2.0, load_policy("anytime")(), HarmonicMean(), cost=told)
    link = Capacity(
        world("slow at first", [0.02 * base_rate] * 6 + [load * base_rate] * 40), 0.0, 0.05, slow_start=False
    )
    record = Simulator(play, offer, link, rtt_s=0.05, cost=told.scaled(3.0)).run()
    assert record.met
    assert record.tokens_recomputed > 0
