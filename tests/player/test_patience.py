"""The end of an incomplete play: at its deadline, unless it may take longer; and how much is requested before."""

from dataclasses import replace

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import Estimator, HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.player.session import Session
from kvabr.player.session_types import MAX_REQUESTS, Decode, FetchGroup, GiveUp, PlayerConfig, Recompute
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog
from tests.player.sessions import bring, of, session, wait_for

AT_ONCE = PlayerConfig(give_up_after=1.0)


def run_out(play, until=100.0):
    """Let time pass; return the play's end and its last actions."""
    now, actions = play.view.now, []
    while not play.over and now < until:
        now = play.next_timer()
        play.timer(now)
        actions = play.actions()
    return now, actions


def test_an_incomplete_play_ends_at_the_deadline_and_names_what_is_missing():
    play = session(4, config=AT_ONCE)
    play.start(0.0)
    first, second, third, _ = of(play.actions(), FetchGroup)
    for fetch, now in ((first, 0.1), (third, 0.2)):
        bring(play, fetch, now)
    play.done(second.request, 0.9)  # arrived, and still being decoded when the time is up
    assert len(of(play.actions(), Decode)) == 1
    now, actions = run_out(play)
    assert now == 1.0
    assert len(of(actions, GiveUp)) == 1
    assert play.record.missing == (1, 3)
    assert play.record.gave_up == "2 of 4 groups are still not in place (1 received and still to be decoded)"
    assert play.record.delivered_s is None
    assert not play.record.met
    play.decoded(second.request, 1.1)  # too late
    assert play.record.missing == (1, 3)


def test_a_deadline_between_two_ticks_holds():
    """Ticks of a long play are a second apart, and a driver's patience ends a little after what the session aims at."""
    play = session(2, deadline=60.3, config=AT_ONCE)
    play.start(0.0)
    assert run_out(play)[0] == 60.3
    aims_early = session(2, deadline=1.0, config=PlayerConfig(give_up_after=1.013))
    aims_early.start(0.0)
    assert run_out(aims_early)[0] == 1.013


def test_patience_lets_a_play_be_late():
    play = session(2, config=PlayerConfig(give_up_after=3.0))
    play.start(0.0)
    now = 2.0
    for fetch in of(play.actions(), FetchGroup):
        bring(play, fetch, now)
    assert play.record.delivered_s is not None
    assert not play.record.met
    assert play.record.missing == ()


def beside(seconds_per_group):
    """A play of two groups with an engine and a link that brings nothing, at the moment when the engine has begun."""
    play = session(2, config=AT_ONCE, cost=PrefillCost(0.0, seconds_per_group / 128), mode="suffix")
    play.start(0.0)
    now, (run,) = wait_for(play, Recompute)
    return play, now, run


def test_an_engine_that_has_begun_may_complete_the_play():
    play, now, run = beside(0.6)
    assert now < 1.0
    while now < 1.0:
        now = play.next_timer()
        play.timer(now)
    assert not play.over
    play.computed(run.first, run.last, 1.4)
    assert play.record.delivered_s == 1.4
    assert not play.record.met


class Steady(Estimator):
    """Thinks that the link is fast, whatever comes: other bytes do."""

    name = "steady"

    def sample(self, nbytes, seconds, now):
        pass

    def rate(self):
        return 1e6

    def lower_bound(self):
        return 8e5


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_an_engine_computes_what_keeps_being_about_to_arrive(mode):
    """The last packet of a group is lost: what is missing seems to take no time, and the link is fast."""
    cost = PrefillCost(0.0, 0.4 / (4 * 128))  # the whole prompt takes 0.4 s
    policy = load_policy("fixed:Int4")()
    play = Session(Ladder(catalog(4)), 1.0, policy, Steady(), cost=cost, mode=mode, config=AT_ONCE)
    play.start(0.0)
    first, *others = of(play.actions(), FetchGroup)
    for fetch in others:  # and those that are asked for then
        others += of(bring(play, fetch, 0.1 * fetch.group), FetchGroup)
    play.first_byte(first.request, 0.5)
    play.progress(first.request, first.bytes - 100, 0.5)
    now, begun = wait_for(play, Recompute)
    assert 1.0 < now < 1.0 + 2 * 0.4
    assert begun[0].first == 0
    play.computed(begun[0].first, begun[0].last, now + 0.1)
    assert play.record.delivered_s == now + 0.1


def test_an_engine_that_hangs_ends_the_play_after_twice_a_prefill():
    play, *_ = beside(0.6)
    assert run_out(play)[0] == pytest.approx(1.0 + 2 * 1.2)
    assert play.record.gave_up


def test_an_engine_that_fails_after_the_deadline_ends_the_play_at_once():
    play, _, _ = beside(0.6)
    while play.view.now < 1.2:
        play.timer(play.next_timer())
    play.compute_failed("out of memory", 1.25)
    assert play.over
    assert "the engine failed: out of memory" in play.record.gave_up


def test_a_play_asks_for_no_more_groups_than_a_connection_can_use_however_small_they_are():
    """Else what it asks for as it begins, and cancels as it ends, grows with the prompt."""
    offer = catalog(1200, layered=True)
    small = replace(offer.track("base"), bytes=(100,) * 1200), offer.track("layer-1")
    ladder = Ladder(replace(offer, tracks=small, mixes=()))
    play = Session(ladder, 4.0, load_policy("anytime")(), HarmonicMean(), config=PlayerConfig(time_price=0.0))
    play.start(0.0)
    while play.next_timer() == play.view.now:  # not all is asked for in one step
        play.timer(play.view.now)
    assert len(of(play.actions(), FetchGroup)) == MAX_REQUESTS
