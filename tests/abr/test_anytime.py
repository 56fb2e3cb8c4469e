"""The default policy: its requests, their order, and how near it comes to the clairvoyant bound."""

import dataclasses
from collections import Counter

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.abr.policies import Anytime
from kvabr.abr.view import Settled, View
from kvabr.player.session import Session
from kvabr.player.session_types import Deliver, FetchGroup, PlayerConfig, PlayRecord, Recompute
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError
from tests.abr.plain import view
from tests.catalogs import catalog
from tests.player.sessions import decode_all, of
from tests.replay.worlds import world, worlds

LAYERS = ("base", "layer-1", "layer-2")


def session(offer: Catalog, deadline: float = 2.0, policy: str = "anytime", config=None, **options) -> Session:
    """A play in which only the deadline counts."""
    config = dataclasses.replace(config or PlayerConfig(), time_price=0.0)
    return Session(Ladder(offer), deadline, load_policy(policy)(), HarmonicMean(), config=config, **options)


def bring(play: Session, fetch: FetchGroup, now: float) -> list[FetchGroup]:
    """Complete one request (first byte, all bytes, decoded) and return the next requests."""
    play.first_byte(fetch.request, now - 0.01)
    play.done(fetch.request, now)
    return of(decode_all(play, play.actions(), now), FetchGroup)


def simulate(
    offer: Catalog, rate: float, deadline: float = 2.0, rtt: float = 0.05, policy: str = "anytime"
) -> PlayRecord:
    link = Capacity(world("flat", [rate]), 0.0, rtt, slow_start=False)
    return Simulator(session(offer, deadline, policy), offer, link, rtt_s=rtt).run()


def worth(offer: Catalog, group: int, track: str) -> float:
    """Return the loss that a layer saves per byte."""
    layer = offer.track(track)
    return (offer.track(layer.refines).loss[group] - layer.loss[group]) / layer.bytes[group]


def test_the_whole_base_is_asked_for_at_once_the_group_that_gains_most_first():
    offer = catalog(16, layered=True)
    play = session(offer)
    play.start(0.0)
    asked = of(play.actions(), FetchGroup)
    assert {fetch.track for fetch in asked} == {"base"}
    assert sorted(fetch.group for fetch in asked) == list(range(16))
    gains = [worth(offer, fetch.group, "layer-1") for fetch in asked]
    assert gains == sorted(gains, reverse=True)
    assert asked[0].group == 0  # three times as heavy as the others, see the catalog
    priorities = [fetch.priority for fetch in asked]
    assert priorities == sorted(priorities)
    assert max(priorities) < 128


def test_no_more_is_asked_for_than_the_player_allows():
    offer = catalog(16, layered=True)
    least = sum(sorted(offer.track("base").bytes)[-4:]) + 1
    play = session(offer, config=PlayerConfig(least_ahead_bytes=least))
    play.start(0.0)
    assert len(of(play.actions(), FetchGroup)) == 5


@pytest.mark.parametrize("price", [0.0, 1e-3])
def test_where_not_all_come_in_time_the_earliest_do(price):
    """They are the part of an incomplete cache that can be used."""
    offer = catalog(32, layered=True)
    config = PlayerConfig(give_up_after=1.0, time_price=price, least_ahead_bytes=1)
    play = Session(Ladder(offer), 2.0, load_policy("anytime")(), HarmonicMean(), config=config)
    link = Capacity(world("slow", [0.6 * sum(offer.track("base").bytes) / 2.0]), 0.0, 0.05, slow_start=False)
    record = Simulator(play, offer, link, rtt_s=0.05).run()
    assert record.gave_up
    came = offer.groups - len(record.missing)
    assert 12 < came < 24
    assert record.missing[0] >= came - 6


@pytest.mark.parametrize(("growing", "first"), [(True, 9), (False, 0)])
def test_slow_start_says_nothing_about_what_may_come_in_time(growing, first):
    policy, seen = Anytime(), view(deadline=2.0)
    policy.start(seen)
    seen.rate = seen.lower_bound = 1000.0  # a group per second
    seen.growing = growing
    assert policy.decide(seen).group == first  # else the order by what layers save: of equal groups the last


@pytest.mark.parametrize(("mode", "ascending"), [("suffix", True), ("hole", False)])
def test_the_earliest_groups_go_first_where_a_miss_costs_what_is_behind_it(mode, ascending):
    play = session(catalog(16, layered=True), cost=PrefillCost(0.0, 1.0), mode=mode)
    assert play.view.front_first == ascending
    play.start(0.0)
    groups = [fetch.group for fetch in of(play.actions(), FetchGroup)]
    assert (groups == sorted(groups)) == ascending


def test_layers_come_in_the_order_of_loss_saved_per_byte():
    offer = catalog(12, layered=True)
    record = simulate(offer, 2e5)
    assert record.met
    steps = [(group, track) for kind, group, track in record.steps if kind == "fetch"]
    assert sorted(group for group, track in steps if track == "base") == list(range(12))
    taken = [(group, str(track)) for group, track in steps if track != "base"]
    assert len(taken) > 4
    # Requests made together are in order; a layer above one in flight may come later than its value suggests.
    firsts = [worth(offer, group, track) for group, track in taken if track == "layer-1"]
    assert firsts == sorted(firsts, reverse=True)
    left = [worth(offer, group.group, "layer-1") for group in record.groups if group.track == "base"]
    assert min(firsts) >= max(left, default=0.0)
    assert record.bytes_wasted == 0


@pytest.mark.slow
@pytest.mark.parametrize("rtt", [0.01, 0.2])
@pytest.mark.parametrize("share", [0.08, 0.12, 0.3])
def test_it_stands_where_a_player_stands_that_knows_the_future(share, rtt):
    experiment = Experiment(catalog(24, layered=True), ReplayOptions(4.0, rtt, share))
    links = [link for link in worlds() if link.name not in {"test/dies", "test/bursts"}]
    compared = []
    for link in links:
        for start_s in (0.0, 1.3):
            run = experiment.play(link, start_s, "anytime").run
            if run["feasible"]:
                assert run["met"], (link.name, start_s)
                others = [experiment.play(link, start_s, name).run["regret"] for name in ("budget", "mpc", "cachegen")]
                compared.append((run["regret"], min(others)))
    assert len(compared) > 3
    mean = sum(mine for mine, _ in compared) / len(compared)
    assert mean <= 0.012
    assert mean <= 0.5 * sum(other for _, other in compared) / len(compared)


def test_little_is_wasted():
    experiment = Experiment(catalog(64, layered=True), ReplayOptions(4.0, 0.05, 0.12))
    runs = [experiment.play(link, 0.0, "anytime").run for link in worlds() if link.name != "test/dies"]
    assert sum(run["bytes_wasted"] for run in runs) < 0.01 * sum(run["bytes_fetched"] for run in runs)


def test_a_play_with_every_layer_in_place_ends_early():
    record = simulate(catalog(8, layered=True), 5e6, policy="anytime:waste=0.01")
    assert {group.track for group in record.groups} == {"layer-2"}
    assert record.delivered_s < 1.0


def test_without_layers_better_tracks_replace_the_base_while_they_could_save_much():
    offer = catalog(12)
    record = simulate(offer, 2e6, policy="anytime:waste=1e-5")
    base = Ladder(offer).cheapest
    assert record.met
    assert sum(group.source == "upgraded" for group in record.groups) > 6
    sparing = simulate(offer, 2e6, policy="anytime:waste=0.1")
    assert {group.track for group in sparing.groups} == {base}
    assert sparing.bytes_wasted == 0
    assert sparing.delivered_s < record.delivered_s


def test_where_the_link_is_rich_a_track_that_replaces_all_layers_is_taken_before_they_are_paid_for():
    offer = catalog(8, layered=True)
    rich, poor = (simulate(offer, rate) for rate in (5e6, 2e5))
    replaced = [group for group in rich.groups if not group.track.startswith(("base", "layer"))]
    assert replaced
    # At most the base and one layer were there before.
    base, layer = offer.track("base"), offer.track("layer-1")
    assert rich.bytes_wasted <= sum(base.bytes[one.group] + layer.bytes[one.group] for one in replaced)
    assert all(group.track.startswith(("base", "layer")) for group in poor.groups)
    assert poor.bytes_wasted == 0


def test_a_layer_that_only_pays_with_the_one_upon_it_is_the_way_to_that():
    offer = catalog(4, layered=True)
    useless = dataclasses.replace(offer.track("layer-1"), loss=tuple(1.01 * loss for loss in offer.track("base").loss))
    tracks = tuple(useless if track.name == "layer-1" else track for track in offer.tracks)
    record = simulate(dataclasses.replace(offer, tracks=tracks), 1e6, policy="anytime:waste=0.1")
    assert {group.track for group in record.groups} == {"layer-2"}


def test_where_decoding_is_slow_the_base_is_asked_for_little_by_little_and_on_a_faster_track():
    offer = catalog(12, decode=40.0)
    play = session(offer, 1.0)
    play.start(0.0)
    assert len(of(play.actions(), FetchGroup)) == 4
    link = world("steady", [1e6])
    slow = Experiment(offer, ReplayOptions(1.0, 0.02, 1.5)).play(link, 0.0, "fixed:AC-5x").run
    mine = Experiment(offer, ReplayOptions(1.0, 0.02, 1.5)).play(link, 0.0, "anytime").run
    assert mine["ttft_s"] < 0.8 * slow["ttft_s"]


def test_several_decoders_share_the_work_that_decides_on_the_soonest_track():
    seen = View(Ladder(catalog(8)), 1.0, decoders=16, decode_seconds=lambda track: 1.0 if track == "AC-5x" else 0.001)
    seen.rate = sum(seen.catalog.track("AC-5x").bytes) / 0.9
    assert seen.soonest_track() == "AC-5x"
    seen.decoders = 1
    assert seen.soonest_track() == "Int4"


def test_what_saves_much_is_tried_although_the_estimate_says_that_it_comes_too_late():
    def asked(policy: str) -> set[str]:
        play = session(catalog(2, layered=True), 1.0, policy)
        play.start(0.0)
        todo = of(play.actions(), FetchGroup)
        play.first_byte(todo[0].request, 0.02)
        more = bring(play, todo[0], 0.8)  # one base in so long a time: nothing more can come, by the estimate
        return {fetch.track for fetch in more}

    assert asked("anytime:stake=0.1") == set()
    assert asked("anytime:stake=0.001") == {"layer-1"}


def test_what_fails_is_asked_for_again_and_an_upgrade_that_fails_always_is_let_be():
    offer = catalog(2, layered=True)
    play = session(offer, 2.0, "anytime:waste=0.01", config=PlayerConfig(attempts=2))
    play.start(0.0)
    first, second = of(play.actions(), FetchGroup)
    play.failed(first.request, "reset", 0.05)
    (again,) = of(play.actions(), FetchGroup)
    assert (again.group, again.track, again.priority) == (first.group, "base", first.priority)
    todo = [*bring(play, second, 0.1), *bring(play, again, 0.2)]
    now, failed = 0.2, []
    while not play.over:
        now += 0.02
        if todo:
            fetch = todo.pop(0)
            failed.append((fetch.group, fetch.track))
            play.failed(fetch.request, "reset", now)
        else:
            now = max(now, play.next_timer())
            play.timer(now)
        actions = decode_all(play, play.actions(), now)
        todo += of(actions, FetchGroup)
        if of(actions, Deliver):
            break
    assert play.record.met
    # Two tracks of each group are tried twice.
    assert sorted(Counter(failed).values()) == [2] * 4
    assert {(0, "layer-1"), (1, "layer-1")} <= set(failed)
    assert Counter(group for group, _ in failed) == {0: 4, 1: 4}


WHOLE_S = 4.0
TWICE = PrefillCost(0.0, WHOLE_S / (16 * 128))
"""An engine that takes twice a deadline of two seconds for 16 groups."""


def beside_an_engine(load: float, price: float, mode: str = "hole", groups: int = 16) -> dict:
    options = ReplayOptions(2.0, 0.05, load, TWICE, mode, config=PlayerConfig(gpu_price=price))
    return Experiment(catalog(groups, layered=True), options).play(world("steady", [1e6]), 0.0, "anytime").run


def test_an_engine_computes_from_the_front_while_the_network_loads_from_the_back():
    alone, helped = beside_an_engine(0.09, float("inf")), beside_an_engine(0.09, 0.0)
    assert alone["met"]
    assert helped["met"]
    assert alone["recompute_s"] == 0
    assert helped["loss"] < 0.5 * alone["loss"]
    early = sorted(group["ready_s"] for group in helped["groups"] if group["source"] == "recomputed")
    assert early[0] == pytest.approx(WHOLE_S / 16, abs=0.01)  # it began at once
    sources = [group["source"] for group in helped["groups"]]
    assert sources[:4] == ["recomputed"] * 4


def test_the_dearer_the_engine_the_less_it_computes():
    prices = (0.0, 1e-3, 3e-2, 1.0, float("inf"))
    runs = [beside_an_engine(0.12, price) for price in prices]
    spent = [run["recompute_s"] for run in runs]
    assert all(run["met"] for run in runs)
    assert spent == sorted(spent, reverse=True)
    assert spent[0] > 0.5
    assert spent[-1] == 0
    cheap, dear = ([run["loss"] + price * run["recompute_s"] for run in runs] for price in (1e-3, 1.0))
    assert cheap[1] < cheap[-1]
    assert dear[3] <= dear[0]


def test_whatever_it_costs_an_engine_computes_what_the_network_will_not_bring_in_time():
    run = beside_an_engine(0.04, float("inf"))  # less than the base of all groups
    assert run["met"]
    assert run["recompute_s"] > 0


def test_the_faster_the_link_the_less_an_engine_computes():
    offer = catalog(64, layered=True)
    config, cost = PlayerConfig(), PrefillCost(0.0, 0.02 / 128)
    play = Session(Ladder(offer), 2.0, load_policy("anytime")(), HarmonicMean(), config=config, cost=cost)
    play.start(0.0)
    planner, view, size = play.guard.policy._planner, play.view, offer.track("base").bytes[0]
    reached = []
    for number, seconds in enumerate((0.0002, 0.02, 0.3)):  # to bring a group
        view.now, view.rate, view.outstanding_bytes, view.ttfb_s = 0.3 * (number + 1), size / seconds, 0, 0.001
        for _ in range(2):  # a rate that has just become known may still grow
            view.now += 0.1
            planner.plan(view)
        reached.append(planner.reserved.stop)
    assert reached[0] < 32 < min(reached[1:])


def test_groups_that_an_engine_fails_to_compute_are_fetched_after_all():
    offer, cost = catalog(8, layered=True), PrefillCost(0.0, 0.02 / 128)
    play = Session(Ladder(offer), 2.0, load_policy("anytime")(), HarmonicMean(), config=PlayerConfig(), cost=cost)
    play.start(0.0)
    actions = play.actions()
    asked = {fetch.group for fetch in of(actions, FetchGroup)}
    assert 7 in asked
    computed = [group for one in of(actions, Recompute) for group in range(one.first, one.last)]
    assert computed[0] == 0
    assert not asked & set(computed)
    play.compute_failed("out of memory", 0.3)
    assert asked | {fetch.group for fetch in of(play.actions(), FetchGroup)} == set(range(8))


@pytest.mark.parametrize("policy", ["anytime", "cheapfirst"])
def test_a_late_first_byte_and_a_slow_engine_do_not_make_a_play_late(policy):
    """To compute one group takes longer than the deadline is away, and the link carries everything once it begins."""
    offer = catalog(8, layered=True)
    cost = PrefillCost(0.0, 3.0 / 128)
    late = world("late", [0.0] * 3 + [sum(offer.track("Int4").bytes) / 1.0] * 20)
    run = Experiment(offer, ReplayOptions(2.0, 0.05, None, cost, "hole")).play(late, 0.0, policy).run
    assert run["met"]
    assert run["recompute_s"] == 0


def test_what_is_in_place_is_computed_if_that_gains_most():
    # One group of many has nearly all the loss, as the last one before the answer often has.
    offer = catalog(8, layered=True)
    heavy = tuple(
        dataclasses.replace(track, loss=tuple(sum(track.loss) * (0.93 if g == 7 else 0.01) for g in range(8)))
        for track in offer.tracks
        if track.name in {"base", "layer-1", "Int4"}
    )
    offer = dataclasses.replace(offer, tracks=heavy)
    cost = PrefillCost(0.0, 0.1 / 128)
    play = session(offer, 1.0, cost=cost, config=PlayerConfig(gpu_price=1e-3))
    link = Capacity(world("flat", [sum(offer.track("base").bytes) / 0.3]), 0.0, 0.01, slow_start=False)
    record = Simulator(play, offer, link, rtt_s=0.01, cost=cost).run()
    assert record.met
    assert record.groups[7].track == "recomputed"
    assert ("compute", 7, 8) in record.steps[1:]


def test_a_suffix_engine_computes_a_tail_once_and_only_if_it_is_worth_it():
    idle, busy = (beside_an_engine(0.12, price, "suffix") for price in (0.0, 1.0))
    assert idle["met"]
    assert busy["met"]
    tail = [group["source"] == "recomputed" for group in idle["groups"]]
    assert tail == sorted(tail)  # all fetched, then all computed
    assert any(tail)
    assert not any(group["source"] == "recomputed" for group in busy["groups"])
    assert idle["loss"] < busy["loss"]


def test_a_suffix_engine_does_not_begin_a_tail_that_comes_far_too_late_while_the_link_carries_something():
    offer = catalog(16, layered=True)
    options = ReplayOptions(2.0, 0.05, None, TWICE, "suffix")
    base = sum(offer.track("base").bytes)
    link = world("slow then quick", [base / 40] * 4 + [base / 0.5] * 4)
    run = Experiment(offer, options).play(link, 0.0, "anytime").run
    assert run["met"]


def test_a_suffix_engine_begins_with_everything_when_half_the_deadline_has_brought_nothing():
    options = ReplayOptions(2.0, 0.05, None, TWICE, "suffix")
    run = Experiment(catalog(16, layered=True), options).play(world("dead", [0.0] * 200 + [1.0]), 0.0, "anytime").run
    assert run["ttft_s"] == pytest.approx(1.0 + WHOLE_S, abs=0.1)
    assert {group["source"] for group in run["groups"]} == {"recomputed"}


def test_offers_are_worked_out_once_for_each_group_that_comes_into_place(monkeypatch):
    made = []
    best = Anytime._best
    monkeypatch.setattr(Anytime, "_best", lambda self, *what: made.append(what) or best(self, *what))
    record = simulate(catalog(64, layered=True), 1e6)
    assert len(set(made)) == len(made) <= len(record.steps)


def test_parameters_are_checked():
    with pytest.raises(PolicyError, match="no parameter"):
        load_policy("anytime:depth=3")
    with pytest.raises(PolicyError, match="must be from"):
        load_policy("anytime:ahead_ttfb=100")


def test_what_settles_is_remembered_in_order():
    settled = Settled([])
    for group in (3, 1, 3):
        settled.add(group)
    settled.discard(1)
    assert settled == {3}
    assert settled.history == [3, 1, 3]


@pytest.mark.parametrize("engine", [None, "hole", "suffix"])
def test_a_link_that_is_dead_from_the_start(engine):
    offer = catalog(8, layered=True)
    dead = world("dead", [0.0] * 400 + [1.0])
    cost = None if engine is None else PrefillCost(0.0, 0.5 / (8 * 128))
    config = PlayerConfig(silent_after=0.25)
    options = ReplayOptions(1.0, 0.05, None, cost, engine or "hole", config=config)
    outcome = Experiment(offer, options).play(dead, 0.0, "anytime", log=True)
    if engine is None:
        assert outcome.record.delivered_s is None
        assert "8 of 8 groups are still not in place, and nothing has come" in outcome.run["gave_up"]
        assert outcome.log[-1].t <= 1.5
    else:
        assert outcome.run["met"]
        assert {group["source"] for group in outcome.run["groups"]} == {"recomputed"}


def test_a_deadline_that_is_past_already_brings_the_base_as_soon_as_can_be():
    offer = catalog(6, layered=True)
    play = session(offer, 1e-6)
    link = Capacity(world("flat", [1e6]), 0.0, 0.05, slow_start=False)
    record = Simulator(play, offer, link, rtt_s=0.05).run()
    assert not record.met
    assert record.gave_up is None or "still not in place" in record.gave_up
    late = session(offer, 1.0)
    late.start(3.0)  # the caller was late
    todo, now = of(late.actions(), FetchGroup), 3.0
    assert {fetch.track for fetch in todo} == {"base"}
    while todo:
        now += 0.01
        todo += bring(late, todo.pop(0), now)
    assert late.over
    assert late.record.delivered_s == pytest.approx(now + 0.001)
    assert {group.track for group in late.record.groups} == {"base"}


def test_layers_that_the_origin_has_for_some_groups_only():
    offer = catalog(6, layered=True)
    play = session(offer, 2.0, "anytime:waste=0.01", config=PlayerConfig(attempts=2))
    play.start(0.0)
    todo, now, refused = of(play.actions(), FetchGroup), 0.0, 0
    while not play.over:
        now += 0.01
        if not todo:
            now = max(now, play.next_timer())
            play.timer(now)
            todo = of(decode_all(play, play.actions(), now), FetchGroup)
            continue
        fetch = todo.pop(0)
        if fetch.track != "base" and fetch.group % 2:
            refused += 1
            play.failed(fetch.request, "not found", now)
            todo += of(decode_all(play, play.actions(), now), FetchGroup)
        else:
            todo += bring(play, fetch, now)
    assert play.record.met
    assert [group.track for group in play.record.groups] == ["layer-2", "base"] * 3
    assert refused == 12
    assert play.record.bytes_wasted == 0


@pytest.mark.parametrize("mode", ["hole", "suffix"])
@pytest.mark.parametrize("names", [["AC-5x"], ["base"], ["base", "layer-1", "layer-2"]], ids="+".join)
def test_an_engine_beside_tracks_of_which_none_replaces_another(names, mode):
    full = catalog(16, layered=True)
    offer = dataclasses.replace(full, tracks=tuple(full.track(name) for name in names))
    options = ReplayOptions(2.0, 0.05, 0.3, TWICE, mode, config=PlayerConfig(gpu_price=1e-5))
    run = Experiment(offer, options).play(world("steady", [1e6]), 0.0, "anytime").run
    assert run["met"]
    assert {group["track"] for group in run["groups"]} <= {*names, "recomputed"}
