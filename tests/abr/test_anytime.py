"""The default policy: its requests, their order, and how near it comes to the clairvoyant bound."""

import dataclasses
from collections import Counter

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean, Prior
from kvabr.abr.plugins import load_policy
from kvabr.data import default_catalog
from kvabr.player.session import Session
from kvabr.player.session_types import Deliver, FetchGroup, PlayerConfig, PlayRecord, Recompute
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.replay.trace import Trace
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.events import RequestSent
from tests.catalogs import catalog
from tests.player.sessions import decode_all, of
from tests.replay.worlds import world


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


@pytest.mark.parametrize("price", [0.0, 1e-3])
def test_where_not_all_come_in_time_the_earliest_do(price):
    """They are the part of an incomplete cache that can be used."""
    offer = catalog(32, layered=True)
    config = PlayerConfig(give_up_after=1.0, time_price=price, min_ahead_bytes=1)
    play = Session(Ladder(offer), 2.0, load_policy("anytime")(), HarmonicMean(), config=config)
    link = Capacity(world("slow", [0.6 * sum(offer.track("base").bytes) / 2.0]), 0.0, 0.05, slow_start=False)
    record = Simulator(play, offer, link, rtt_s=0.05).run()
    assert record.gave_up
    came = offer.groups - len(record.missing)
    assert 12 < came < 24
    assert record.missing[0] >= came - 6


@pytest.mark.parametrize("told", [True, False])
def test_upgrades_are_requested_in_bursts(told):
    """Neighbours that are requested together share a range of an object store."""
    offer = catalog(64, layered=True)
    options = ReplayOptions(4.0, 0.02, 1.0, prior=Prior(offer.fp16_bytes / 4.0, 0.02) if told else None)
    experiment, link = Experiment(offer, options), world("steady", [1e6])
    played = experiment.play_on(link, 0.0, "anytime", *experiment.prepare(link, 0.0), log=True)
    at = [line.t for line in played.log if isinstance(line, RequestSent) and line.t > 0.2]
    assert len(at) > 20
    assert len(set(at)) < 0.3 * len(at)


def test_a_layer_that_only_pays_with_the_one_upon_it_is_the_way_to_that():
    offer = catalog(4, layered=True)
    useless = dataclasses.replace(offer.track("layer-1"), loss=tuple(1.01 * loss for loss in offer.track("base").loss))
    layers = [track for track in offer.tracks if track.refines or track.name == "base"]
    tracks = tuple(useless if track.name == "layer-1" else track for track in layers)
    record = simulate(dataclasses.replace(offer, tracks=tracks), 1e6, policy="anytime")
    assert {group.track for group in record.groups} == {"layer-2"}


def test_what_fails_is_asked_for_again_and_an_upgrade_that_fails_always_is_let_be():
    offer = catalog(2, layered=True)
    play = session(offer, 2.0, "anytime", config=PlayerConfig(attempts=2))
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
    assert set(Counter(failed).values()) == {2}
    assert {group for group, _ in failed} == {0, 1}


WHOLE_S = 4.0
TWICE = PrefillCost(0.0, WHOLE_S / (16 * 128))
"""An engine that takes twice a deadline of two seconds for 16 groups."""


def beside_an_engine(load: float, price: float, mode: str = "hole", groups: int = 16) -> dict:
    options = ReplayOptions(2.0, 0.05, load, TWICE, mode, config=PlayerConfig(gpu_price=price))
    return Experiment(catalog(groups, layered=True), options).play(world("steady", [1e6]), 0.0, "anytime").run


def test_the_dearer_the_engine_the_less_it_computes():
    prices = (0.0, 1e-3, 3e-2, 1.0, float("inf"))
    runs = [beside_an_engine(0.12, price) for price in prices]
    spent = [run["recompute_s"] for run in runs]
    assert all(run["met"] for run in runs)
    assert spent[:-1] == sorted(spent[:-1], reverse=True)
    assert spent[0] > 0.5
    assert spent[-1] <= WHOLE_S / 16  # at most the one group that may be late at the lower bound
    assert spent[-1] == 0
    cheap, dear = ([run["loss"] + price * run["recompute_s"] for run in runs] for price in (1e-3, 1.0))
    assert cheap[1] < cheap[-1]
    assert dear[3] <= dear[0]


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


def test_a_suffix_engine_begins_with_everything_when_half_the_deadline_has_brought_nothing():
    options = ReplayOptions(2.0, 0.05, None, TWICE, "suffix")
    run = Experiment(catalog(16, layered=True), options).play(world("dead", [0.0] * 200 + [1.0]), 0.0, "anytime").run
    assert run["ttft_s"] == pytest.approx(1.0 + WHOLE_S, abs=0.1)
    assert {group["source"] for group in run["groups"]} == {"recomputed"}


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
        assert "8 of 8 groups are still not in place, and no data has arrived" in outcome.run["gave_up"]
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


@pytest.mark.parametrize("mode", ["hole", "suffix"])
@pytest.mark.parametrize("names", [["AC-5x"], ["base"], ["base", "layer-1", "layer-2"]], ids="+".join)
def test_an_engine_beside_tracks_of_which_none_replaces_another(names, mode):
    full = catalog(16, layered=True)
    offer = dataclasses.replace(full, tracks=tuple(full.track(name) for name in names))
    options = ReplayOptions(2.0, 0.05, 0.3, TWICE, mode, config=PlayerConfig(gpu_price=1e-5))
    run = Experiment(offer, options).play(world("steady", [1e6]), 0.0, "anytime").run
    assert run["met"]
    assert {group["track"] for group in run["groups"]} <= {*names, "recomputed"}


@pytest.mark.parametrize("load", [0.1, 1.0])
@pytest.mark.parametrize("wrong", [1.0, 30.0, 1 / 30])
def test_on_the_word_of_a_server_alone_no_final_track_goes_before_a_base(load, wrong):
    """The link dies after half a second: the announced rate costs at most twice as much as no known rate."""
    offer, rate = default_catalog(), load * default_catalog().fp16_bytes / 4.0
    link = Trace("dies", "dies", (0.0, 0.5), (rate, 0.0), 1e4)
    costs = [
        Experiment(offer, ReplayOptions(4.0, 0.02, prior=prior)).play(link, 0.0, "anytime").run["objective"]
        for prior in (None, Prior(wrong * rate, 0.02, 0.5))
    ]
    assert costs[1] <= 2.0 * costs[0]
