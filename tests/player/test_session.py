"""The state machine by hand: what goes in and what must come out."""

import pytest

from kvabr.abr import Decision, Policy
from kvabr.player.session_types import Cancel, Decode, Deliver, FetchGroup, PlayerConfig, Recompute
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError
from tests.player.sessions import bring, decode_all, of, session, wait_for


def test_events_of_unknown_requests_are_ignored():
    play = session()
    play.start(0.0)
    before = len(play.view.in_flight)
    for event in (play.first_byte, play.done, play.decoded):
        event(999, 0.1)
    play.progress(999, 5, 0.1)
    play.failed(999, "x", 0.1)
    play.refused(999, "x", 0.1)
    play.computed(0, 1, 0.1)
    assert len(play.view.in_flight) == before


def test_upgrades_replace_only_what_is_worse_and_stop_at_the_deadline():
    play = session(2, "cheapfirst", config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    for _ in range(3):
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    upgrade = todo[0]
    assert upgrade.priority >= 128
    play.timer(0.96)
    decode_all(play, play.actions(), 0.96)
    assert play.record.groups[0].track not in {None, "AC-5x"}
    play.timer(1.0)
    actions = play.actions()
    assert [cancel.request for cancel in of(actions, Cancel)] == [upgrade.request]
    assert of(actions, Deliver)[0].met
    assert play.record.groups[1].track == "AC-5x"


def test_nothing_changes_once_the_play_is_over():
    play = session(2, "cheapfirst", config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    for _ in range(2):
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    play.timer(0.8)
    decode_all(play, play.actions(), 0.8)
    play.done(todo[0].request, 0.99)
    (decode,) = of(play.actions(), Decode)
    play.timer(1.0)
    assert play.over
    wasted, tracks = play.record.bytes_wasted, [group.track for group in play.record.groups]
    assert wasted == todo[0].bytes
    play.decoded(decode.request, 1.1)
    play.refused(decode.request, "late", 1.2)
    assert [group.track for group in play.record.groups] == tracks
    assert play.record.bytes_wasted == wasted


def test_suffix_engine_computes_the_tail_at_the_last_moment():
    cost = PrefillCost(0.0, 0.5 / (4 * 128))  # the whole prompt takes half a deadline
    play = session(4, cost=cost, mode="suffix")
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    bring(play, fetches[0], 0.05)
    now, started = wait_for(play, Recompute)  # silence: nothing arrives any more
    assert (started[0].first, started[0].last) == (1, 4)
    assert 0.4 < now <= 0.65
    play.computed(1, 4, now + 0.375)
    assert of(play.actions(), Deliver)[0].met
    assert [g.source for g in play.record.groups] == ["fetched"] + ["recomputed"] * 3


def test_a_policy_that_leaves_the_same_group_to_the_engine_again_and_again_is_refused():
    class Again(Policy):
        def decide(self, view):
            group = view.first_missing()
            if group:
                return Decision.fetch(group, "Int4", "the network brings the rest")
            return Decision.recompute(0, "again")

    play = session(3, Again(), cost=PrefillCost(0.0, 0.1 / 128))
    with pytest.raises(PolicyError):
        play.start(0.0)


def test_a_group_in_place_can_be_left_to_the_engine_once():
    class Better(Policy):
        def decide(self, view):
            group = view.first_missing()
            if group is not None:
                return Decision.fetch(group, "Int4", "first")
            if 1 in view.settled and view.cost is not None:
                return Decision.recompute(1, "better it")
            return Decision.wait("the engine has it")

    for fails in (False, True):
        play = session(2, Better(), cost=PrefillCost(0.0, 0.1 / 128))
        play.start(0.0)
        now = 0.0
        for fetch in of(play.actions(), FetchGroup):
            now += 0.05
            actions = bring(play, fetch, now)
        assert [(one.first, one.last) for one in of(actions, Recompute)] == [(1, 2)]
        assert 1 not in play.view.settled
        if fails:
            play.compute_failed("gone", 0.3)
        else:
            play.computed(1, 2, 0.3)
        assert of(decode_all(play, play.actions(), 0.3), Deliver)
        assert play.record.groups[1].track == ("Int4" if fails else "recomputed")
        assert play.record.groups[0].track == "Int4"


def test_an_engine_that_fails_is_not_asked_again_and_its_groups_are_missing_again():
    play = session(4, cost=PrefillCost(0.0, 0.1 / 128))
    play.start(0.0)
    assert not of(play.actions(), Recompute)
    now, started = wait_for(play, Recompute, 1.0)
    play.compute_failed("out of memory", now + 0.05)
    again = of(play.actions(), FetchGroup)
    assert started[0].first in {fetch.group for fetch in again}
    assert play.view.cost is None
    play.computed(started[0].first, started[0].last, now + 0.06)  # too late: it was said to have failed
    assert play.record.groups[started[0].first].track is None
    while not play.over:
        now = max(now + 0.05, play.next_timer())
        play.timer(now)
        assert not of(play.actions(), Recompute)
    assert "the engine failed: out of memory" in play.record.gave_up


def test_an_engine_that_fails_leaves_what_was_decoded_meanwhile_in_place():
    log = []
    play = session(2, cost=PrefillCost(0.0, 0.1 / 128), mode="suffix", log=log.append)
    play.start(0.0)
    first, second = of(play.actions(), FetchGroup)[:2]
    bring(play, first, 0.02)
    play.done(second.request, 0.03)
    play.engine.chosen.add(1)
    now, _ = wait_for(play, Recompute, 1.0)
    play.decoded(second.request, now)
    play.compute_failed("broken", now + 0.01)
    assert any(line.name == "recompute_failed" and line.reason == "broken" for line in log)
    assert play.record.groups[1].track == "Int4"
    assert play.over
    assert play.record.delivered_s is not None


def test_an_idle_engine_gets_work_although_there_is_no_room_for_requests_and_nothing_else_is_sent():
    class Divider(Policy):
        divides, paces, computes_more = True, True, True

        def decide(self, view):
            if (
                self.computes_more
                and view.engine_backlog_s <= 0
                and (front := view.first_missing()) is not None
                and view.rate > 0
            ):
                return Decision.recompute(front, "the engine is idle")
            group = max(view.missing_groups, default=None)
            return (
                Decision.wait("all is under way") if group is None else Decision.fetch(group, "FP16", "from the back")
            )

    # The link brings one group, and then the other requests fill all the room that there is.
    config = PlayerConfig(ahead=0.0, min_ahead_bytes=1)
    policy = Divider()
    play = session(6, policy, cost=PrefillCost(0.0, 0.05 / 128), config=config, deadline=10.0)
    play.start(0.0)
    (first,) = of(play.actions(), FetchGroup)
    started = of(bring(play, first, 0.1), Recompute)
    assert [(one.first, one.last) for one in started] == [(0, 1)]
    assert not play.may_request()
    flying = len(play.view.in_flight)
    play.computed(0, 1, 0.15)
    actions = play.actions()
    assert [(one.first, one.last) for one in of(actions, Recompute)] == [(1, 2)]
    policy.computes_more = False
    play.computed(1, 2, 0.2)
    assert play.view.missing_groups
    assert not of(play.actions(), FetchGroup)
    assert len(play.view.in_flight) == flying


def test_a_play_that_lasts_much_longer_than_computing_everything_is_looked_at_ever_less_often():
    play = session(
        4, cost=PrefillCost(0.0, 1e-6), deadline=20.0, config=PlayerConfig(gpu_price=100.0, time_price=0.001)
    )
    play.start(0.0)
    ticks, now = 0, 0.0
    while now < 15.0 and not play.over:
        now = play.next_timer()
        play.timer(now)
        ticks += 1
    assert now >= 15.0
    assert ticks < 1000  # each two per cent later than the one before; a fiftieth of computing would be 370,000
