"""The default policy: what it asks for, in which order, and how near it comes to the clairvoyant."""

import dataclasses

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import DualEwma
from kvabr.abr.plugins import load_policy
from kvabr.abr.policies import Anytime
from kvabr.abr.view import Settled
from kvabr.catalog import Catalog
from kvabr.errors import PolicyError
from kvabr.player import Decode, Deliver, Fetch, PlayerConfig, Recompute, Session
from kvabr.player.record import PlayRecord
from kvabr.recompute.cost import PrefillCost
from kvabr.replay.link import Capacity
from kvabr.replay.play import PlayOptions, Stage
from kvabr.replay.simulator import Simulator
from tests.catalogs import catalog
from tests.replay.worlds import world, worlds

LAYERS = ("base", "layer-1", "layer-2")


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def session(offer: Catalog, deadline: float = 2.0, policy: str = "anytime", **options) -> Session:
    return Session(Ladder(offer), deadline, load_policy(policy)(), DualEwma(), **options)


def bring(play: Session, fetch: Fetch, now: float) -> list[Fetch]:
    """One request: first byte, all bytes, decoded; what is asked for then."""
    play.first_byte(fetch.request, now - 0.01)
    play.done(fetch.request, now)
    actions = play.actions()
    for decode in of(actions, Decode):
        play.decoded(decode.request, now + 0.001)
    return of([*actions, *play.actions()], Fetch)


def simulate(
    offer: Catalog, rate: float, deadline: float = 2.0, rtt: float = 0.05, policy: str = "anytime"
) -> PlayRecord:
    link = Capacity(world("flat", [rate]), 0.0, rtt, slow_start=False)
    return Simulator(session(offer, deadline, policy), offer, link, rtt_s=rtt).run()


def worth(offer: Catalog, group: int, track: str) -> float:
    """Loss saved per byte by a layer."""
    layer = offer.track(track)
    return (offer.track(layer.refines).loss[group] - layer.loss[group]) / layer.bytes[group]


def test_the_whole_base_is_asked_for_at_once_the_group_that_gains_most_first():
    offer = catalog(16, layered=True)
    play = session(offer)
    play.start(0.0)
    asked = of(play.actions(), Fetch)
    assert {fetch.track for fetch in asked} == {"base"}
    assert sorted(fetch.group for fetch in asked) == list(range(16))
    gains = [worth(offer, fetch.group, "layer-1") for fetch in asked]
    assert gains == sorted(gains, reverse=True)
    assert asked[0].group == 0  # three times as heavy as the others, see the catalog
    priorities = [fetch.priority for fetch in asked]
    assert priorities == sorted(priorities)
    assert max(priorities) < 128


def test_no_more_is_asked_for_than_the_player_allows():
    play = session(catalog(16, layered=True), config=PlayerConfig(max_requests=5))
    play.start(0.0)
    assert len(of(play.actions(), Fetch)) == 5


@pytest.mark.parametrize(("mode", "ascending"), [("suffix", True), ("hole", False)])
def test_the_earliest_groups_go_first_where_a_miss_costs_what_is_behind_it(mode, ascending):
    play = session(catalog(16, layered=True), cost=PrefillCost(0.0, 1.0), mode=mode)
    assert play.view.front_first == ascending
    play.start(0.0)
    groups = [fetch.group for fetch in of(play.actions(), Fetch)]
    assert (groups == sorted(groups)) == ascending


def test_layers_come_in_the_order_of_loss_saved_per_byte():
    offer = catalog(12, layered=True)
    record = simulate(offer, 2e5)
    assert record.met
    steps = [(group, track) for kind, group, track in record.steps if kind == "fetch"]
    assert [track for _, track in steps[:12]] == ["base"] * 12
    taken = [(group, str(track)) for group, track in steps[12:]]
    assert len(taken) > 4
    # What was asked for together was in order; a layer that depends on one in flight may come later than its worth.
    firsts = [worth(offer, group, track) for group, track in taken if track == "layer-1"]
    assert firsts == sorted(firsts, reverse=True)
    left = [worth(offer, group.group, "layer-1") for group in record.groups if group.track == "base"]
    assert min(firsts) >= max(left, default=0.0)
    assert record.bytes_wasted == 0


@pytest.mark.parametrize("rtt", [0.01, 0.2])
@pytest.mark.parametrize("share", [0.08, 0.12, 0.3])
def test_it_stands_where_a_player_stands_that_knows_the_future(share, rtt):
    stage = Stage(catalog(24, layered=True), PlayOptions(4.0, rtt, share))
    links = [link for link in worlds() if link.name not in {"test/dies", "test/bursts"}]
    compared = []
    for link in links:
        for start_s in (0.0, 1.3):
            run = stage.play(link, start_s, "anytime").run
            if run["feasible"]:
                assert run["met"], (link.name, start_s)
                others = [stage.play(link, start_s, name).run["regret"] for name in ("budget", "mpc", "cachegen")]
                compared.append((run["regret"], min(others)))
    assert len(compared) > 3
    mean = sum(mine for mine, _ in compared) / len(compared)
    assert mean <= 0.012
    assert mean <= 0.5 * sum(other for _, other in compared) / len(compared)


def test_little_is_wasted():
    stage = Stage(catalog(64, layered=True), PlayOptions(4.0, 0.05, 0.12))
    runs = [stage.play(link, 0.0, "anytime").run for link in worlds() if link.name != "test/dies"]
    assert sum(run["bytes_wasted"] for run in runs) < 0.01 * sum(run["bytes_fetched"] for run in runs)


def test_a_play_with_every_layer_in_place_ends_early():
    record = simulate(catalog(8, layered=True), 5e6)
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
    assert len(of(play.actions(), Fetch)) == 4
    link = world("steady", [1e6])
    slow = Stage(offer, PlayOptions(1.0, 0.02, 1.5)).play(link, 0.0, "fixed:AC-5x").run
    mine = Stage(offer, PlayOptions(1.0, 0.02, 1.5)).play(link, 0.0, "anytime").run
    assert mine["ttft_s"] < 0.8 * slow["ttft_s"]


def test_what_saves_much_is_tried_although_the_estimate_says_that_it_comes_too_late():
    def asked(policy: str) -> set[str]:
        play = session(catalog(2, layered=True), 1.0, policy)
        play.start(0.0)
        todo = of(play.actions(), Fetch)
        play.first_byte(todo[0].request, 0.02)
        more = bring(play, todo[0], 0.8)  # one base in so long a time: nothing more can come, by the estimate
        return {fetch.track for fetch in more}

    assert asked("anytime:stake=0.1") == set()
    assert asked("anytime:stake=0.001") == {"layer-1"}


def test_what_fails_is_asked_for_again_and_an_upgrade_that_fails_always_is_let_be():
    offer = catalog(2, layered=True)
    play = session(offer, 2.0, config=PlayerConfig(attempts=2))
    play.start(0.0)
    first, second = of(play.actions(), Fetch)
    play.failed(first.request, "reset", 0.05)
    (again,) = of(play.actions(), Fetch)
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
            play.timer(play.next_timer())
        actions = play.actions()
        todo += of(actions, Fetch)
        if of(actions, Deliver):
            break
    assert play.record.met
    assert sorted(failed) == [(0, "layer-1"), (0, "layer-1"), (1, "layer-1"), (1, "layer-1")]


def test_an_engine_computes_from_the_front_while_the_network_loads_from_the_back():
    cost = PrefillCost(0.0, 4.0 / (16 * 128))  # all of it takes twice the deadline
    stage = Stage(catalog(16, layered=True), PlayOptions(2.0, 0.05, 0.1, cost))
    link = world("steady", [1e6])
    alone = stage.play(link, 0.0, "anytime").run
    helped = stage.play(link, 0.0, "anytime:compute=0.9").run
    assert alone["tokens_recomputed"] == 0
    assert helped["met"]
    sources = [group["source"] for group in helped["groups"]]
    assert sources[:5] == ["recomputed"] * 5
    assert "recomputed" not in sources[8:]
    assert helped["loss"] < 0.7 * alone["loss"]


def test_groups_that_the_engine_will_not_reach_are_fetched_after_all():
    play = session(catalog(8, layered=True), 2.0, "anytime:compute=0.9", cost=PrefillCost(0.0, 0.25 / 128))
    play.start(0.0)
    actions = play.actions()
    assert [(one.first, one.last) for one in of(actions, Recompute)] == [(0, 1)]
    assert {fetch.group for fetch in of(actions, Fetch)} == {7}
    play.compute_failed("out of memory", 0.3)
    assert {fetch.group for fetch in of(play.actions(), Fetch)} == set(range(7))


def test_offers_are_worked_out_once_for_each_group_that_comes_into_place(monkeypatch):
    made = []
    best = Anytime._best
    monkeypatch.setattr(Anytime, "_best", lambda self, *what: made.append(what) or best(self, *what))
    record = simulate(catalog(64, layered=True), 1e6)
    assert len(made) <= 64 + len(record.steps)
    assert len(made) == len(set(made)) + 64  # the first 64 were for the order of the base


def test_parameters_are_checked():
    with pytest.raises(PolicyError, match="no parameter"):
        load_policy("anytime:depth=3")
    with pytest.raises(PolicyError, match="must be from"):
        load_policy("anytime:ahead_ttfb=100")


def test_what_settles_is_remembered_in_order():
    settled = Settled()
    for group in (3, 1, 3):
        settled.add(group)
    settled.discard(1)
    assert settled == {3}
    assert settled.history == [3, 1, 3]
