"""Plays of a cache that is still being prefilled: what exists may be requested, and none ends before it is whole."""

import math

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.player.goals.live import EdgeChanges, LiveEdge
from kvabr.player.session import Session
from kvabr.player.session_types import (
    Deliver,
    FetchGroup,
    GiveUp,
    LiveRecord,
    PlayerConfig,
    PrefixGoal,
    Recompute,
    UpgradeGoal,
)
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from tests.catalogs import catalog
from tests.player.sessions import bring, decode_all, of

EXPECTED = (1.0, 2.0, 3.0, 4.0)


def session(policy="anytime", deadline=6.0, **options):
    ladder = Ladder(catalog(4, layered=True))
    return Session(ladder, deadline, load_policy(policy)(), HarmonicMean(), expected_s=EXPECTED, **options)


def pushed_at_once(play, groups, *changes):
    """Begin a play when so many groups are published; return what it asks for."""
    play.start()
    play.published(groups, 1.0, *changes)
    return of(play.actions(), FetchGroup)


def bring_all(play, pending, now, each_s):
    """Bring what is asked for, and what is asked for then; return all of it, and when the last of it came."""
    asked = []
    while pending:
        asked += pending
        more = []
        for one in pending:
            now += each_s
            more += of(bring(play, one, now), FetchGroup)
        pending = more
    return asked, now


def test_nothing_is_requested_that_is_not_published():
    play = session()
    play.start()
    assert of(play.actions(), FetchGroup) == []
    assert not play.view.missing
    assert play.view.coming
    play.published(2, 1.5)
    pushed = of(play.actions(), FetchGroup)
    assert [(one.group, one.track, one.pushed) for one in pushed] == [(0, "base", True), (1, "base", True)]
    assert play.view.edge == 2


def test_what_is_idle_goes_to_upgrades_of_what_exists_and_the_play_ends_after_the_last_group():
    play = session()
    play.start()
    play.actions()
    asked, now = [], 0.0
    for group in range(4):
        play.published(group + 1, EXPECTED[group])
        came, now = bring_all(play, of(play.actions(), FetchGroup), EXPECTED[group], 0.05)
        asked += [(one.group, one.track) for one in came]
        assert not play.over or group == 3
    for group in range(3):  # it is upgraded before the next one exists
        (begun,) = [index for index, one in enumerate(asked) if one == (group, "base")]
        assert asked[begun + 1][0] == group
        assert (group + 1, "base") not in asked[: begun + 2]
    while not play.over:
        play.timer(play.next_timer())
        for one in of(play.actions(), FetchGroup):
            bring(play, one, now := max(now, play.view.now) + 0.05)
    assert play.record.met
    assert not play.record.missing


def test_a_producer_that_stops_leaves_an_incomplete_play_that_ends():
    play = session()
    for one in pushed_at_once(play, 3):
        bring(play, one, 1.2)
    ended = []
    while not ended:
        play.timer(now := play.next_timer())
        ended = of(decode_all(play, play.actions(), now), GiveUp | Deliver)
    assert isinstance(ended[0], GiveUp)
    assert play.record.missing == (3,)


def test_what_the_publisher_pushed_in_vain_is_fetched():
    play = session()
    (pushed,) = pushed_at_once(play, 1)
    play.failed(pushed.request, "reset", 1.1)
    again = of(play.actions(), FetchGroup)
    assert [(one.group, one.pushed) for one in again] == [(0, False)]


def test_a_base_that_the_producer_left_out_is_fetched_on_another_track():
    asked = pushed_at_once(session(), 2, EdgeChanges(left_out=[(1, "base"), (1, "layer-1"), (0, "Int8")]))
    assert [(one.group, one.track, one.pushed) for one in asked] == [(0, "base", True), (1, "AC-5x", False)]


def test_what_comes_unasked_says_nothing_about_round_trips():
    play = session()
    (pushed,) = pushed_at_once(play, 1)
    play.first_byte(pushed.request, 1.0)
    play.done(pushed.request, 1.2)
    assert play.view.ttfb_s == 0.0
    assert play.view.rate > 0


LAYERS = [(3, name) for name in ("layer-1", "layer-2", "FP16", "BF16", "FP8", "Int8", "FP4", "Int4", "AC-5x")]


def at_the_last_base(price=1e-3, rest_s=0.1):
    """A play of four groups that has the base of the last one, whose other tracks are to follow."""
    play = session(config=PlayerConfig(time_price=price))
    play.start()
    now = 0.0
    for group in range(4):
        last, now = group == 3, max(now, EXPECTED[group])
        play.published(group + 1, now, EdgeChanges(LAYERS if last else (), coming={3: rest_s} if last else {}))
        _, now = bring_all(play, of(play.actions(), FetchGroup), now, 0.01)
    assert play.record.groups[3].track == "base"
    return play, now


def test_layers_that_are_about_to_exist_are_waited_for_and_requested():
    play, now = at_the_last_base()
    assert not play.over
    assert play.view.arrived
    play.published(4, now + 0.1, EdgeChanges(added=LAYERS, coming={3: None}))
    asked = of(play.actions(), FetchGroup)
    assert {one.group for one in asked} == {3}
    assert asked[0].track == "layer-1"


def test_layers_are_not_waited_for_where_time_is_dear():
    play, _ = at_the_last_base(price=10.0)
    assert play.over


def test_layers_that_are_much_too_late_are_not_waited_for():
    play, now = at_the_last_base(price=0.0)
    while not play.over:
        play.timer(now := play.next_timer())
    assert 0.6 < now - EXPECTED[3] < 1.4  # four times as late as was announced, and a quarter of a second
    assert play.record.met


def test_a_producer_that_stops_ends_the_wait_for_layers():
    play, now = at_the_last_base()
    play.producer_stopped("killed", now)
    assert play.over
    assert play.record.met
    assert play.record.live.stopped is None


def test_what_failed_too_often_is_not_there_again_because_it_was_added():
    play, now = at_the_last_base()
    for _ in range(10):
        play.retries.failed(3, "layer-1", "reset", upgrade=True)
    play.published(4, now + 0.1, EdgeChanges(added=LAYERS, coming={3: None}))
    assert (3, "layer-1") in play.view.unavailable
    assert "layer-1" not in [one.track for one in of(play.actions(), FetchGroup)]


@pytest.mark.parametrize(
    ("reached", "now", "ends"),
    [
        ([], 0.0, 4.0),
        ([], 1.5, 4.5),  # late from the start
        ([(1, 1.0)], 1.0, 4.0),
        ([(1, 1.0)], 2.5, 4.5),  # the second is late by half a second
        ([(1, 1.0), (2, 3.0)], 3.0, 7.0),  # half as fast
        ([(1, 1.0), (2, 1.5)], 1.5, 2.5),  # twice as fast
        ([(3, 0.5)], 0.5, 1.5),  # they were there before
        ([(1, 1.0), (2, 21.0)], 21.0, 29.0),  # not believed
        ([(4, 3.0)], 9.0, 3.0),
    ],
)
def test_the_end_is_expected_from_the_pace_so_far(reached, now, ends):
    edge = LiveEdge(EXPECTED)
    for groups, at_s in reached:
        edge.reach(groups, at_s)
    assert edge.ends_s(now) == pytest.approx(ends)


@pytest.mark.parametrize("expected", [(), (2.0, 1.0), (1.0, math.inf), (math.nan,)])
def test_times_that_are_none_are_refused(expected):
    with pytest.raises(UsageError, match="all finite and ascending"):
        LiveEdge(expected)


def test_a_producer_that_stops_ends_a_play_once_all_it_published_is_in_place():
    play = session()
    pushed = pushed_at_once(play, 2)
    play.producer_stopped("killed", 1.1)
    play.producer_stopped("killed again", 1.15)
    assert not play.over
    ended = []
    while not ended:
        pushed = of(actions := [one for fetch in pushed for one in bring(play, fetch, 1.2)], FetchGroup)
        ended = of(actions, GiveUp)
    assert "2 of 4 groups are still not in place; the producer has published 2 and then stopped: killed" in (
        ended[0].reason
    )
    assert play.record.live == LiveRecord(2, None, "killed", None)


def test_an_engine_computes_at_once_what_a_producer_that_stopped_did_not_publish():
    cost = PrefillCost.from_rate(1000.0)
    play = Session(Ladder(catalog(4)), 60.0, "fixed:Int4", HarmonicMean(), cost=cost, expected_s=EXPECTED)
    pushed = pushed_at_once(play, 2)
    play.producer_stopped("killed", 1.1)
    started = [one for fetch in pushed for one in of(bring(play, fetch, 7.0), Recompute)]
    while not play.over:
        for one in started:
            play.computed(one.first, one.last, 8.0)
        started = of(play.actions(), Recompute)
        if not started and not play.over:
            play.timer(play.next_timer())
            started = of(play.actions(), Recompute)
    assert play.record.met
    assert [group.source for group in play.record.groups] == ["fetched"] * 2 + ["recomputed"] * 2


def test_a_prefix_ends_where_its_producer_stopped():
    cost = PrefillCost.from_rate(1.0)
    options = {"cost": cost, "goal": PrefixGoal(), "expected_s": EXPECTED}
    play = Session(Ladder(catalog(4)), 60.0, "anytime", HarmonicMean(), **options)
    pushed = pushed_at_once(play, 2)
    play.producer_stopped("killed", 1.1)
    ended = [one for fetch in pushed for one in of(bring(play, fetch, 7.0), Deliver)]
    while not ended:  # what has arrived waits a moment for the layers that were asked for since
        play.timer(play.next_timer())
        ended = of(decode_all(play, play.actions(), play.next_timer()), Deliver)
    assert "and then stopped: killed" in ended[0].cut
    assert play.record.missing == (2, 3)


def test_upgrades_are_for_what_is_complete():
    ladder = Ladder(catalog(4))
    with pytest.raises(UsageError, match="complete"):
        Session(ladder, 1.0, "anytime", HarmonicMean(), goal=UpgradeGoal(("Int4",) * 4), expected_s=EXPECTED)
    with pytest.raises(UsageError, match="each of 4 groups, got 2"):
        Session(ladder, 1.0, "anytime", HarmonicMean(), expected_s=(1.0, 2.0))
