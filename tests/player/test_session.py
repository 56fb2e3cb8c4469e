"""The state machine by hand: what goes in and what must come out."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.estimators import DualEwma
from kvabr.abr.plugins import load_policy
from kvabr.player.builder import new_session
from kvabr.player.session import Session
from kvabr.player.session_types import Cancel, Decode, Deliver, FetchGroup, GiveUp, PlayerConfig, PrefixGoal, Recompute
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError, UsageError
from tests.catalogs import catalog
from tests.examples import examples


def session(groups=4, policy="fixed:Int4", deadline=1.0, **options):
    made = load_policy(policy)() if isinstance(policy, str) else policy
    return Session(Ladder(catalog(groups)), deadline, made, DualEwma(), **options)


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def bring(play, fetch, now):
    """One request: first byte, all bytes, decoded."""
    play.first_byte(fetch.request, now - 0.001)
    play.done(fetch.request, now)
    actions = play.actions()
    for decode in of(actions, Decode):
        play.decoded(decode.request, now + 0.001)
    return [*actions, *play.actions()]


def test_plays_every_group_and_delivers_once():
    play = session()
    play.start(0.0)
    todo = of(play.actions(), FetchGroup)
    assert [fetch.group for fetch in todo] == [0, 1, 2, 3]
    delivered = []
    now = 0.0
    while todo:
        now += 0.05
        actions = bring(play, todo.pop(0), now)
        todo += of(actions, FetchGroup)
        delivered += of(actions, Deliver)
    assert len(delivered) == 1
    assert delivered[0].met
    assert play.over
    assert play.next_timer() is None
    assert [group.track for group in play.record.groups] == ["Int4"] * 4
    assert play.record.bytes_wasted == 0


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_makes_no_sense_is_refused(deadline):
    with pytest.raises(UsageError, match="deadline"):
        session(deadline=deadline)


def test_a_failed_request_is_asked_for_again_and_then_on_another_track():
    play = session(1)
    play.start(0.0)
    tracks = []
    for attempt in range(4):
        (fetch,) = of(play.actions(), FetchGroup)
        tracks.append(fetch.track)
        play.failed(fetch.request, "reset", 0.01 * (attempt + 1))
    assert tracks == ["Int4", "Int4", "Int4", "AC-5x"]


def test_without_any_source_the_play_is_given_up_not_holed():
    play = session(1, config=PlayerConfig(attempts=1))
    play.start(0.0)
    now = 0.0
    gave_up = []
    while not play.over:
        actions = play.actions()
        gave_up += of(actions, GiveUp)
        for fetch in of(actions, FetchGroup):
            now += 0.001
            play.failed(fetch.request, "gone", now)
    gave_up += of(play.actions(), GiveUp)
    assert len(gave_up) == 1
    assert "group 0" in gave_up[0].reason
    assert play.record.delivered_s is None


def test_without_any_source_an_engine_computes_the_group():
    play = session(1, config=PlayerConfig(attempts=1), cost=PrefillCost(0.0, 1e-4))
    play.start(0.0)
    now, computing = 0.0, []
    while not computing:
        actions = play.actions()
        computing = of(actions, Recompute)
        for fetch in of(actions, FetchGroup):
            now += 0.001
            play.failed(fetch.request, "gone", now)
    play.computed(0, 1, now + 0.1)
    assert of(play.actions(), Deliver)
    assert play.record.groups[0].source == "recomputed"


def test_refused_frames_count_as_failures():
    play = session(1)
    play.start(0.0)
    (fetch,) = of(play.actions(), FetchGroup)
    play.done(fetch.request, 0.01)
    (decode,) = of(play.actions(), Decode)
    play.refused(decode.request, "checksum", 0.02)
    (again,) = of(play.actions(), FetchGroup)
    assert again.group == 0
    assert play.record.bytes_wasted == fetch.bytes


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


def test_upgrades_replace_only_what_is_worse_and_stop_at_the_deadline():
    play = session(2, "cheapfirst", config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    for _ in range(3):
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    upgrade = todo[0]
    assert upgrade.priority >= 128
    assert play.record.groups[0].source == "upgraded"
    play.timer(1.0)
    actions = play.actions()
    assert [cancel.request for cancel in of(actions, Cancel)] == [upgrade.request]
    assert of(actions, Deliver)[0].met
    assert play.record.groups[1].track == "AC-5x"


def test_layers_are_asked_for_on_top_of_what_they_refine():
    class Layers(Policy):
        def decide(self, view):
            group = view.first_missing()
            if group is not None:
                return Decision.fetch(group, "base", "base first")
            for group in view.settled:
                if view.track_of[group] == "base":
                    return Decision.upgrade(group, "layer-1", "enhance")
            return Decision.wait("all enhanced, or soon")

    play = Session(Ladder(catalog(2, layered=True)), 1.0, Layers(), DualEwma())
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    while todo:
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    assert [group.track for group in play.record.groups] == ["layer-1", "layer-1"]
    assert play.record.bytes_wasted == 0
    sizes = play.view.catalog.by_name
    assert play.record.groups[0].bytes == sizes["base"].bytes[0] + sizes["layer-1"].bytes[0]


class Nonsense(Policy):
    def __init__(self, answer):
        self.answer = answer

    def decide(self, view):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "not a Decision"),
        ("Int4", "not a Decision"),
        (Decision.fetch(0, "MP3", "x"), "unknown track 'MP3'"),
        (Decision.fetch(99, "Int4", "x"), "group 99"),
        (Decision.fetch(-1, "Int4", "x"), "group -1"),
        (Decision.fetch("0", "Int4", "x"), "group '0'"),
        (Decision.upgrade(0, "FP8", "x"), "upgrade group 0"),
        (Decision.finish("x"), "finish while"),
        (Decision.wait("x"), "waits while"),
        (Decision.recompute(0, "x"), "not possible"),
        (Decision("dance", "x"), "unknown kind"),
        (Decision([], "x"), "unknown kind"),
        (Decision.fetch(0, [], "x"), "unknown track"),
        (Decision.fetch(0, "Int4", 7), "its reason"),
        (Decision.fetch(0, "Int4", "x", 5), "alternatives"),
        (Decision.fetch(0, "Int4", "x", {"Int4": float("nan")}), "alternatives"),
        (SystemExit(0), "SystemExit"),
        (ValueError("boom"), "boom"),
        (ZeroDivisionError("by zero"), "by zero"),
    ],
)
def test_nonsense_names_the_policy_the_file_and_the_line(answer, words):
    play = session(2, Nonsense(answer))
    with pytest.raises(PolicyError, match=words) as caught:
        play.start(0.0)
    assert "Nonsense" in str(caught.value)
    assert "test_session.py, line " in str(caught.value)


def test_suffix_engine_computes_the_tail_at_the_last_moment():
    cost = PrefillCost(0.0, 0.5 / (4 * 128))  # the whole prompt takes half a deadline
    play = session(4, cost=cost, mode="suffix")
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    bring(play, fetches[0], 0.05)
    now, started = 0.05, []
    while not started and now < 3:
        now = play.next_timer()
        play.timer(now)  # silence: nothing arrives any more
        started = of(play.actions(), Recompute)
    assert (started[0].first, started[0].last) == (1, 4)
    assert 0.4 < now <= 0.65
    play.computed(1, 4, now + 0.375)
    assert of(play.actions(), Deliver)[0].met
    assert [g.source for g in play.record.groups] == ["fetched"] + ["recomputed"] * 3


def test_hole_engine_fills_groups_one_by_one_while_the_network_goes_on():
    cost = PrefillCost(0.0, 0.1 / 128)
    play = session(6, cost=cost)
    play.start(0.0)
    play.actions()
    now, computed = 0.0, []
    while not play.over and now < 3:  # the network is dead from the start
        now = play.next_timer()
        play.timer(now)
        for action in of(play.actions(), Recompute):
            assert action.last > action.first
            computed += range(action.first, action.last)
            now += 0.1
            play.computed(action.first, action.last, now)
            for more in of(play.actions(), Recompute):
                computed += range(more.first, more.last)
                now += 0.1
                play.computed(more.first, more.last, now)
    assert play.over
    assert play.record.delivered_s is not None
    assert [g.track for g in play.record.groups] == ["recomputed"] * 6
    assert play.record.tokens_recomputed == 6 * 128


@examples(150)
@given(
    st.sampled_from(
        [
            "fixed:Int4",
            "rate",
            "bola",
            "bola-e",
            "dynamic",
            "l2a",
            "mpc",
            "robustmpc",
            "fugu",
            "cachegen",
            "cake",
            "budget",
            "cheapfirst",
            "anytime",
        ]
    ),
    st.sampled_from(["hole", "suffix", None]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_whatever_happens_a_play_ends_without_a_hole_and_its_books_balance(policy, mode, layered, seed):
    """Requests come, stall, fail and are refused at random; the play must end, complete or given up."""
    dice = random.Random(seed)
    cost = None if mode is None else PrefillCost(0.001, 0.05 / 128)
    play = Session(
        Ladder(catalog(5, short=30, layered=layered)),
        1.0,
        load_policy(policy)(),
        DualEwma(),
        cost=cost,
        mode=mode or "hole",
        config=PlayerConfig(give_up_after=4.0, gpu_price=dice.choice([0.0, 1e-3, 1.0])),
    )
    flying, decoding, computing, ended = {}, [], None, []
    received = 0
    now = 0.0
    play.start(now)
    for _ in range(5000):
        for action in play.actions():
            if isinstance(action, FetchGroup):
                flying[action.request] = [action, 0]
            elif isinstance(action, Cancel):
                del flying[action.request]
            elif isinstance(action, Decode):
                decoding.append(action)
            elif isinstance(action, Recompute):
                assert computing is None
                assert all(g.ready_s is not None for g in play.record.groups[: action.first])
                computing = action
            else:
                ended.append(action)
        if play.over:
            break
        assert play.view.outstanding_bytes == sum(f.bytes - got for f, got in flying.values())
        assert set(play.view.in_flight) == set(flying)
        now += dice.uniform(0.0005, 0.01)
        what = dice.random()
        if what < 0.6 and flying:
            request = dice.choice(sorted(flying))
            fetch, got = flying[request]
            got = min(fetch.bytes, got + dice.randrange(1, 6000))
            received += got - flying[request][1]
            if got == fetch.bytes:
                del flying[request]
                play.done(request, now)
            else:
                flying[request][1] = got
                play.progress(request, got, now)
        elif what < 0.63 and flying:
            request = dice.choice(sorted(flying))
            del flying[request]
            play.failed(request, "reset by the test", now)
        elif what < 0.75 and decoding:
            action = decoding.pop(0)
            if dice.random() < 0.1:
                play.refused(action.request, "corrupt, says the test", now)
            else:
                play.decoded(action.request, now)
        elif what < 0.85 and computing is not None:
            action, computing = computing, None
            if dice.random() < 0.05:
                play.compute_failed("out of memory, says the test", now)
            else:
                play.computed(action.first, action.last, now)
        while not play.over and (timer := play.next_timer()) is not None and timer <= now:
            play.timer(now)
    assert play.over
    assert len(ended) == 1
    assert play.record.bytes_fetched == received
    assert 0 <= play.record.bytes_wasted <= received
    if isinstance(ended[0], Deliver):
        assert all(g.track is not None and g.ready_s is not None for g in play.record.groups)
        useful = sum(g.bytes for g in play.record.groups)
        assert useful + play.record.bytes_wasted == received
    else:
        assert play.record.gave_up


class Restless(Policy):
    """Replaces one track by another for ever."""

    def decide(self, view):
        group = view.first_missing()
        if group is not None:
            return Decision.fetch(group, "AC-5x", "first")
        for group in view.settled:
            other = "FP8" if view.track_of[group] == "Int8" else "Int8"
            return Decision.upgrade(group, other, "never content")
        return Decision.wait("all under way")


def test_a_policy_that_never_stops_is_stopped_by_the_deadline():
    play = session(2, Restless())
    play.start(0.0)
    todo, now, brought = of(play.actions(), FetchGroup), 0.0, 0
    while todo and not play.over:
        now += 0.016
        if now >= 1.0:
            play.timer(1.0)
            break
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
        brought += 1
    assert play.over
    assert play.record.met
    assert brought > 50
    assert all(group.track in {"AC-5x", "FP8", "Int8"} for group in play.record.groups)
    assert play.record.bytes_wasted + sum(group.bytes for group in play.record.groups) == play.record.bytes_fetched


def test_a_policy_that_leaves_the_same_group_to_the_engine_again_and_again_is_refused():
    class Again(Policy):
        def decide(self, view):
            group = view.first_missing()
            if group:
                return Decision.fetch(group, "Int4", "the network brings the rest")
            return Decision.recompute(0, "again")

    play = session(3, Again(), cost=PrefillCost(0.0, 0.1 / 128))
    with pytest.raises(PolicyError, match="wants group 0 recomputed, which is not possible here"):
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
        assert of(play.actions(), Deliver)
        assert play.record.groups[1].track == ("Int4" if fails else "recomputed")
        assert play.record.groups[0].track == "Int4"


def test_the_engine_never_starts_a_run_that_misses_anyway_while_slow_start_still_hides_the_link():
    offer = catalog(64, decode=0.0)
    whole_s = 9.0
    cost = PrefillCost(0.02, whole_s / offer.tokens)
    play = Session(Ladder(offer), 2.0, load_policy("cheapfirst")(), DualEwma(), cost=cost)
    play.start(0.0)
    now, longest = 0.0, 0
    while now < 2.0 and not play.over:
        now = play.next_timer()
        play.timer(now)
        for action in of(play.actions(), Recompute):
            longest = max(longest, action.last - action.first)
            play.computed(action.first, action.last, now)
    assert longest == 1


def test_nothing_changes_once_the_play_is_over():
    play = session(2, "cheapfirst", config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    for _ in range(2):
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    play.done(todo[0].request, 0.9)
    (decode,) = of(play.actions(), Decode)
    play.timer(1.0)
    assert play.over
    wasted, tracks = play.record.bytes_wasted, [group.track for group in play.record.groups]
    assert wasted == todo[0].bytes
    play.decoded(decode.request, 1.1)
    play.refused(decode.request, "late", 1.2)
    assert [group.track for group in play.record.groups] == tracks
    assert play.record.bytes_wasted == wasted


def test_a_policy_that_always_asks_for_the_dearest_track_is_held_to_what_can_still_arrive():
    class Stubborn(Policy):
        def decide(self, view):
            group = view.first_missing()
            return Decision.finish("done") if group is None else Decision.fetch(group, "FP16", "always the best")

    play = session(1, Stubborn(), config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    tracks, now = [], 0.0
    while not play.over and now < 2.0:
        for fetch in of(play.actions(), FetchGroup):
            tracks.append(fetch.track)
            asked, flying = now, fetch
        now = play.next_timer()
        play.progress(flying.request, int((now - asked) * 0.5 * play.view.catalog.track("FP16").bytes[0]), now)
        play.timer(now)
        if len(tracks) == 2:
            break
    assert tracks == ["FP16", "AC-5x"]


@pytest.mark.parametrize("fault", ["raises", "text", "nan", "negative"])
def test_a_broken_estimator_is_named_with_its_place(fault):
    class Broken(DualEwma):
        def rate(self):
            if fault == "raises":
                raise ZeroDivisionError
            return {"text": "fast", "nan": float("nan"), "negative": -1.0}[fault]

    play = Session(Ladder(catalog(2)), 1.0, load_policy("cheapfirst")(), Broken())
    with pytest.raises(PolicyError, match=r"estimator ewma .*test_session\.py"):
        play.start(0.0)


def fetches_until_quiet(play, fails, share):
    """Play over a link that carries ``share`` of FP16; damage the upgrades that ``fails`` picks; return all asked for."""
    rate = share * play.view.catalog.track("FP16").total_bytes / play.view.deadline_s
    play.start(0.0)
    asked, now = of(play.actions(), FetchGroup), 0.0
    for fetch in asked:  # grows during the loop
        now += fetch.bytes / rate
        if fetch.priority >= 128 and fails(fetch):
            play.done(fetch.request, now)
            actions = play.actions()
            for decode in of(actions, Decode):
                play.refused(decode.request, "checksum", now)
            asked += of([*actions, *play.actions()], FetchGroup)
        else:
            asked += of(bring(play, fetch, now), FetchGroup)
    return asked


@pytest.mark.parametrize("policy", ["cheapfirst", "anytime", "robustmpc"])
def test_upgrades_of_a_group_that_always_fail_are_bounded_and_do_not_end_the_others(policy):
    play = Session(
        Ladder(catalog(3, layered=True)), 5.0, load_policy(policy)(), DualEwma(), config=PlayerConfig(attempts=2)
    )
    asked = fetches_until_quiet(play, lambda fetch: fetch.group == 0, share=100)
    tried = Counter(fetch.track for fetch in asked if fetch.group == 0 and fetch.priority >= 128)
    assert list(tried.values()) == [2] * (1 if policy == "robustmpc" else 2)  # which knows only layers
    assert [group.source for group in play.record.groups] == ["fetched", "upgraded", "upgraded"]


@pytest.mark.parametrize("policy", ["cheapfirst", "anytime:waste=0.01"])
def test_damage_on_one_track_leaves_a_group_the_other_tracks(policy):
    offer = catalog(3, layered=True)
    play = Session(Ladder(offer), 5.0, load_policy(policy)(), DualEwma())
    above = {track.name for track in offer.tracks if track.refines is not None}
    asked = fetches_until_quiet(play, lambda fetch: fetch.track in above, share=100)
    tried = Counter((fetch.group, fetch.track) for fetch in asked if fetch.track in above)
    assert max(tried.values()) == 3
    assert any(tried[group.group, "layer-1"] == 3 and group.source == "upgraded" for group in play.record.groups)


# ------------------------------------------------------- what real networks add


def test_an_engine_that_fails_is_not_asked_again_and_its_groups_are_missing_again():
    play = session(4, cost=PrefillCost(0.0, 0.1 / 128))
    play.start(0.0)
    now, started = 0.0, of(play.actions(), Recompute)
    while not started and now < 1:
        now = play.next_timer()
        play.timer(now)
        started = of(play.actions(), Recompute)
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
    now, started = 0.03, []
    play._compute.chosen.add(1)
    while not started and now < 1:
        now = play.next_timer()
        play.timer(now)
        started = of(play.actions(), Recompute)
    play.decoded(second.request, now)
    play.compute_failed("broken", now + 0.01)
    assert any(line.name == "recompute_failed" and line.reason == "broken" for line in log)
    assert play.record.groups[1].track == "Int4"
    assert play.over
    assert play.record.delivered_s is not None


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
    assert play.record.gave_up.endswith("nothing has come for 0.50 s; last fault: reset, says the test")
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
    while now < 0.35:
        now = play.next_timer()
        received += 50
        for fetch in (fetches[0], fetches[2]):
            play.progress(fetch.request, received, now)
        play.timer(now)
    actions = play.actions()
    assert [action.request for action in of(actions, Cancel)] == [fetches[1].request]
    assert fetches[1].group in play.view.missing
    # Group 3 was silent as well, but nobody who came after it got anything.
    assert fetches[3].request in play.view.in_flight
    assert play._retries._failures == {(1, "Int4"): 1}


def test_silence_of_all_proves_nothing_but_is_worth_asking_again():
    play = session(2, config=PlayerConfig(stalled_after=0.4))
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    play.progress(fetches[0].request, 100, 0.05)
    cancelled, now = [], 0.05
    while not cancelled and now < 1:
        now = play.next_timer()
        play.timer(now)
        cancelled = of(play.actions(), Cancel)
    assert 0.45 <= now <= 0.5
    assert {cancel.request for cancel in cancelled} == {fetch.request for fetch in fetches}
    assert not play._retries._failures


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


def test_what_others_held_up_may_raise_the_estimate():
    log = []
    play = session(8, "fixed:FP16", log=log.append)
    play.start(0.0)
    fetches, now = of(play.actions(), FetchGroup), 0.01
    for fetch in fetches:
        play.first_byte(fetch.request, now)
    received = 0
    for step in range(30):
        now += 0.02
        received += 200 if step < 10 else 600
        play.progress(fetches[0].request, received, now, "network" if step < 10 else "cpu")
        play.timer(now)
    assert play.view.rate > 20_000
    assert any(line.name == "limited" and line.fed for line in log)


def test_a_transfer_is_not_abandoned_for_a_track_that_cannot_be_had():
    play = session(1, "fixed:FP16", config=PlayerConfig(min_requests=1, first_requests=1, attempts=1))
    play.start(0.0)
    # Every cheaper track has failed once, and that is as often as one may.
    for name in play.view.ladder.names[:-1]:
        play._retries.failed(0, name, "gone", upgrade=False)
    (fetch,) = of(play.actions(), FetchGroup)
    now = 0.0
    while now < 1.5:
        now = play.next_timer()
        play.progress(fetch.request, int(2000 * now), now)
        play.timer(now)
        assert not of(play.actions(), Cancel)


SLOW = PrefillCost.from_rate(1.0)
"""An engine that is of no help."""


def prefix(cost=SLOW, policy="fixed:Int4"):
    play = session(policy=policy, goal=PrefixGoal(), cost=cost, mode="suffix")
    play.start(0.0)
    return play, of(play.actions(), FetchGroup)


def until_over(play):
    actions = []
    while (now := play.next_timer()) is not None:
        play.timer(now)
        actions += play.actions()
    return actions


def test_a_prefix_that_comes_whole_is_not_cut():
    play, todo = prefix()
    actions = []
    for number, fetch in enumerate(todo):
        actions += bring(play, fetch, 0.1 * (number + 1))
    assert of(actions, Deliver) == [Deliver(pytest.approx(0.401), met=True, cut=None)]
    assert play.record.cut is None


def test_a_prefix_is_cut_at_the_deadline_and_starts_no_engine():
    play, todo = prefix()
    bring(play, todo[0], 0.1)
    actions = until_over(play)
    (end,) = of(actions, Deliver)
    assert (end.now, end.met, end.cut) == (1.0, True, "the deadline has come")
    assert not of(actions, Recompute)
    assert sorted(cancel.request for cancel in of(actions, Cancel)) == [1, 2, 3]
    assert play.record.cut == end.cut
    assert play.record.tokens_recomputed == 0


def test_a_prefix_is_cut_when_computing_is_sooner_than_fetching():
    play, todo = prefix(PrefillCost.from_rate(16 * 40))
    bring(play, todo[0], 0.1)
    actions = until_over(play)
    (end,) = of(actions, Deliver)
    assert end.now < 1.0
    assert "sooner computed than fetched" in end.cut
    assert not of(actions, Recompute)


def test_a_prefix_is_cut_when_no_track_of_a_group_can_be_had():
    play, todo = prefix()
    bring(play, todo[0], 0.01)
    now, end = 0.02, []
    waiting = [fetch for fetch in todo[1:] if fetch.group == 1]
    others = [fetch for fetch in todo[1:] if fetch.group > 1]
    for fetch in others:
        bring(play, fetch, now)
    while waiting:
        now += 0.01
        play.failed(waiting.pop().request, "corrupt", now)
        actions = play.actions()
        waiting, end = of(actions, FetchGroup), of(actions, Deliver)
    assert end
    assert end[0].now < 0.5
    assert end[0].cut is not None
    assert [record.ready_s is not None for record in play.record.groups] == [True, False, True, True]


def test_a_prefix_needs_the_cost_of_what_it_protects():
    with pytest.raises(UsageError, match="prefill costs"):
        session(goal=PrefixGoal())


def test_a_play_that_is_stopped_ends_as_its_goal_says():
    cut, _ = prefix()
    cut.stop(0.2, "the request is gone")
    assert of(cut.actions(), Deliver) == [Deliver(0.2, met=True, cut="the request is gone")]
    whole = session()
    whole.start(0.0)
    whole.stop(0.2, "the request is gone")
    assert of(whole.actions(), GiveUp) == [GiveUp(0.2, "the request is gone")]
    whole.stop(0.3, "again")
    assert whole.actions() == []


def test_a_suffix_of_a_catalog_counts_the_engine_time_from_the_first_token():
    whole, cost = catalog(4), PrefillCost(0.0, 1e-3, 1e-6)
    play = new_session(Ladder(whole.suffix(3)), 1.0, "fixed:Int4", DualEwma(), goal=PrefixGoal(), cost=cost)
    first = 3 * whole.spec.group_tokens
    assert play.view.recompute_s(0) == pytest.approx(cost.seconds(first, whole.group_tokens(3)))


def test_what_is_at_hand_is_counted_from_the_first_group_of_a_suffix():
    whole = catalog(4)
    kept = {"FP16": [1, 3]}
    rest = Ladder(whole.suffix(2))
    play = new_session(rest, 1.0, "cheapfirst", DualEwma(), cached_groups=lambda _, track: kept.get(track, []))
    play.start(0.0)
    first = of(play.actions(), FetchGroup)[0]
    assert (first.group, first.track) == (1, "FP16")


def test_a_policy_that_computes_from_the_front_plays_no_prefix():
    with pytest.raises(UsageError, match="from the front"):
        new_session(Ladder(catalog(4)), 1.0, "cake", DualEwma(), goal=PrefixGoal(), cost=SLOW)
