"""Sessions on networks that fail, damage, stall or fall silent."""

from collections import Counter

import pytest

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.player.session import Session
from kvabr.player.session_types import Cancel, Decode, Deliver, FetchGroup, GiveUp, PlayerConfig, Recompute
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog
from tests.player.sessions import of, session, wait_for


def test_a_failed_request_is_asked_for_again_and_then_on_another_track():
    play = session(1)
    play.start(0.0)
    tracks = []
    for attempt in range(4):
        (fetch,) = of(play.actions(), FetchGroup)
        tracks.append(fetch.track)
        play.failed(fetch.request, "reset", 0.01 * (attempt + 1))
    assert tracks == ["Int4", "Int4", "Int4", "AC-5x"]


@pytest.mark.parametrize("engine", [False, True])
def test_without_any_source_a_group_is_computed_or_the_play_given_up_not_holed(engine):
    play = session(1, config=PlayerConfig(attempts=1), cost=PrefillCost(0.0, 1e-4) if engine else None)
    play.start(0.0)
    now, ended = 0.0, []
    while not ended:
        actions = play.actions()
        ended = of(actions, Recompute | GiveUp)
        for fetch in of(actions, FetchGroup):
            now += 0.001
            play.failed(fetch.request, "gone", now)
    if engine:
        play.computed(0, 1, now + 0.1)
        assert of(play.actions(), Deliver)
        assert play.record.groups[0].source == "recomputed"
    else:
        assert play.over
        assert "group 0" in ended[0].reason
        assert play.record.delivered_s is None


def test_a_transfer_that_will_not_make_it_is_abandoned_for_a_cheaper_one():
    class Greedy(Policy):
        def decide(self, view):
            group = view.first_missing()
            if group is None:
                return Decision.finish("done")
            return Decision.fetch(group, "FP16" if view.rate == 0 else view.ladder.cheapest, "test")

    play = session(2, Greedy(), config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    (fetch,) = of(play.actions(), FetchGroup)
    assert fetch.track == "FP16"
    rate = fetch.bytes * 0.6  # FP16 alone takes 1.7 deadlines at this rate
    play.first_byte(fetch.request, 0.02)
    now, cancelled = 0.02, []
    while not cancelled and now < 0.9:
        now += 0.02
        play.progress(fetch.request, int(rate * now), now)
        play.timer(now)
        actions = play.actions()
        cancelled = of(actions, Cancel)
    assert cancelled
    assert now < 0.4
    assert [f.track for f in of(actions, FetchGroup)] == ["AC-5x"]
    assert play.record.abandoned == 1
    assert play.record.bytes_wasted == play.record.bytes_fetched > 0


def fetches_until_quiet(play, fails, share):
    """Play over a link that carries ``share`` of FP16, damage the upgrades that ``fails`` picks; return requests."""
    rate = share * play.view.catalog.track("FP16").total_bytes / play.view.deadline_s
    play.start(0.0)
    asked, now, damaged, cancelled = of(play.actions(), FetchGroup), 0.0, set(), set()
    for fetch in asked:  # grows during the loop
        now += fetch.bytes / rate
        if fetch.request in cancelled:
            continue
        if fetch.priority >= 128 and fails(fetch):
            damaged.add(fetch.request)
        play.first_byte(fetch.request, now - 0.001)
        play.done(fetch.request, now)
        actions = play.actions()
        while actions:
            asked += of(actions, FetchGroup)
            cancelled.update(cancel.request for cancel in of(actions, Cancel))
            for decode in of(actions, Decode):
                bad = next((request for request in (*decode.below, decode.request) if request in damaged), None)
                if bad is None:
                    play.decoded(decode.request, now)
                else:
                    play.refused(bad, "checksum", now)
            actions = play.actions()
    return asked


@pytest.mark.parametrize("policy", ["cheapfirst"])
def test_upgrades_of_a_group_that_always_fail_are_bounded_and_do_not_end_the_others(policy):
    play = Session(
        Ladder(catalog(3, layered=True)),
        5.0,
        load_policy(policy)(),
        HarmonicMean(),
        config=PlayerConfig(attempts=2, time_price=0.0),
    )
    asked = fetches_until_quiet(play, lambda fetch: fetch.group == 0, share=100)
    tried = Counter(fetch.track for fetch in asked if fetch.group == 0 and fetch.priority >= 128)
    # Two attempts on two tracks each, and on layers above, which are requested before those below have failed.
    assert max(tried.values()) <= 4
    assert len(tried) <= 4
    assert [group.track == "base" for group in play.record.groups] == [True, False, False]


@pytest.mark.parametrize("policy", ["cheapfirst"])
def test_damage_on_one_track_leaves_a_group_the_other_tracks(policy):
    offer = catalog(3, layered=True)
    play = Session(Ladder(offer), 5.0, load_policy(policy)(), HarmonicMean(), config=PlayerConfig(time_price=0.0))
    above = {track.name for track in offer.tracks if track.refines is not None}
    asked = fetches_until_quiet(play, lambda fetch: fetch.track in above, share=100)
    tried = Counter((fetch.group, fetch.track) for fetch in asked if fetch.track in above)
    assert max(tried.values()) <= 3
    assert any(tried[group.group, "layer-1"] > 1 and group.track != "base" for group in play.record.groups)


def test_a_play_that_is_late_and_hears_nothing_is_given_up_with_the_last_fault():
    play = session(2, config=PlayerConfig(silent_after=0.25))
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    play.first_byte(fetches[1].request, 0.02)
    play.failed(fetches[0].request, "reset, says the test", 0.1)
    play.progress(fetches[1].request, 100, 0.5)
    now = 0.5
    while not play.over:
        now = play.next_timer()
        play.timer(now)
    assert 1.0 <= now <= 1.05
    assert play.record.gave_up.endswith("no data has arrived for 0.50 s; last fault: reset, says the test")
    patient = session(2)
    patient.start(0.0)
    while patient.view.now < 5:
        patient.timer(patient.next_timer())
    assert not patient.over


def test_a_late_play_goes_on_while_something_comes():
    play = session(2, config=PlayerConfig(silent_after=0.25))
    play.start(0.0)
    fetch = of(play.actions(), FetchGroup)[0]
    now, received = 0.0, 0
    while now < 3.0:
        now = play.next_timer()
        received += 5
        play.progress(fetch.request, received, now)
        play.timer(now)
    assert not play.over


def test_a_transfer_that_is_overtaken_and_stands_still_has_failed():
    play = session(4, config=PlayerConfig(stalled_after=0.4))
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    for fetch in fetches:
        play.first_byte(fetch.request, 0.01)
    now, received = 0.01, 0
    while now < 0.5:
        now = play.next_timer()
        received += fetches[0].bytes // 10
        for fetch in (fetches[0], fetches[2]):
            if received < fetch.bytes:
                play.progress(fetch.request, received, now)
            elif fetch.request in play.view.in_flight:
                play.done(fetch.request, now)
        play.timer(now)
    actions = play.actions()
    assert [action.request for action in of(actions, Cancel)] == [fetches[1].request]
    assert [fetch.group for fetch in of(actions, FetchGroup)] == [fetches[1].group]
    # Group 3 was silent as well, but nobody who came after it got anything.
    assert fetches[3].request in play.view.in_flight
    assert play.retries._failures == {(1, "Int4"): 1}


def test_on_a_slow_link_a_transfer_waits_for_its_turn():
    """All requests together take long: what is overtaken now and then has not been forgotten."""
    play = session(4, deadline=4.0, config=PlayerConfig(stalled_after=0.2))
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    for fetch in fetches:
        play.first_byte(fetch.request, 0.01)
    now, received = 0.01, 0
    while now < 2.5:
        now = play.next_timer()
        received += 2
        for fetch in (fetches[0], fetches[2]):
            play.progress(fetch.request, received, now)
        play.timer(now)
        assert fetches[1].request not in [action.request for action in of(play.actions(), Cancel)]
    assert play.view.outstanding_bytes / play.view.rate > 2.5


def test_silence_of_all_proves_nothing_but_is_worth_asking_again():
    play = session(2, config=PlayerConfig(stalled_after=0.4))
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    play.progress(fetches[0].request, 100, 0.05)
    now, cancelled = wait_for(play, Cancel, 1.0)
    assert 0.45 <= now <= 0.5
    assert {cancel.request for cancel in cancelled} == {fetch.request for fetch in fetches}
    assert not play.retries._failures


def test_before_the_first_byte_of_all_nothing_counts_as_stalled():
    play = session(2, config=PlayerConfig(stalled_after=0.1))
    play.start(0.0)
    play.actions()
    while play.view.now < 1.5:
        play.timer(play.next_timer())
        assert not of(play.actions(), Cancel)


def test_only_what_the_network_held_up_lowers_the_estimate():
    def rates(limit):
        log = []
        play = session(8, "fixed:FP16", log=log.append)
        play.start(0.0)
        fetches, now = of(play.actions(), FetchGroup), 0.01
        for fetch in fetches:
            play.first_byte(fetch.request, now)
        seen, received = [], 0
        for step in range(30):
            now += 0.02
            received += 2000 if step < 10 else 200
            play.progress(fetches[0].request, received, now, "network" if step < 10 else limit)
            play.timer(now)
            seen.append(play.view.rate)
        return seen, play, log

    for limit in ("cpu", "publisher"):
        seen, play, log = rates(limit)
        assert seen[-1] == pytest.approx(seen[9])
        assert play.record.bytes_held_up == {limit: 20 * 200}
        lines = [line for line in log if line.name == "limited"]
        assert {(line.by, line.fed) for line in lines} == {(limit, False)}
        assert len(lines) >= 15
    seen, play, log = rates("network")
    assert seen[-1] < seen[9] / 5
    assert not play.record.bytes_held_up
    assert not any(line.name == "limited" for line in log)
