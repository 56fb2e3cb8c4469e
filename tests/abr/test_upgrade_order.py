"""Where time has a price: the default policy on fast links, when it ends a play, and the plans that it follows."""

import dataclasses
import itertools

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.abr.time_planner import TimePlanner
from kvabr.abr.view import GroupSet, View
from kvabr.data import default_catalog
from kvabr.player.session import Session
from kvabr.player.session_types import Cancel, Deliver, FetchGroup, PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from tests.catalogs import catalog
from tests.player.sessions import bring, decode_all, of
from tests.replay.worlds import world

PRICE = 1e-3
LINK = world("steady", [1e6])


def played(load, *, policy="anytime", rtt_s=0.02, link=LINK, offer=None, price=PRICE):
    config = PlayerConfig(time_price=price)
    options = ReplayOptions(4.0, rtt_s, load, config=config)
    return Experiment(offer or catalog(24, layered=True), options).play(link, 0.0, policy).run


@pytest.mark.parametrize(
    ("load", "rtt_s"),
    # At 100 ms this small cache comes within slow start if the link carries ten times as much.
    [*((load, 0.02) for load in (0.3, 1.0, 3.0, 10.0, 30.0)), (0.3, 0.1), (1.0, 0.1), (3.0, 0.1)],
)
def test_no_fixed_track_is_noticeably_better_at_any_speed(load, rtt_s):
    mine = played(load, rtt_s=rtt_s)
    offer = catalog(24, layered=True)
    alone = [track.name for track in offer.tracks if track.refines is None]
    best = min(played(load, policy=f"fixed:{track}", rtt_s=rtt_s)["objective"] for track in alone)
    assert mine["met"]
    assert mine["objective"] <= 1.05 * best + PRICE * 2 * rtt_s
    assert mine["regret"] >= 0


SHIPPED = default_catalog()


def test_a_base_that_cannot_be_decoded_in_time_is_replaced_by_what_can():
    offer = catalog(24, layered=True)
    layers = ("base", "layer-1", "layer-2")
    times = [0.0125 if track.name in layers else 0.002 for track in offer.tracks]  # really ten times as much
    slow = [dataclasses.replace(track, decode_s=time) for track, time in zip(offer.tracks, times, strict=True)]
    experiment = Experiment(
        dataclasses.replace(offer, tracks=tuple(slow)),
        ReplayOptions(2.0, 0.1, 10.0, decode_scale=10.0, config=PlayerConfig(time_price=PRICE)),
    )
    played = experiment.play(LINK, 0.0, "anytime")
    assert played.run["met"]


def test_a_play_ends_once_nothing_is_worth_the_wait_and_the_dearer_time_is_the_sooner():
    plays = [played(0.3, price=price) for price in (0.0, 1e-4, 1e-3, 1e-2)]
    ends = [play["ttft_s"] for play in plays]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] < 0.6 * ends[0]
    losses = [play["loss"] for play in plays]
    assert losses == sorted(losses)


def test_the_play_does_not_end_in_an_outage_right_after_the_base():
    outage = world("outage", [1e6, 0.0, 0.0, *[1e6] * 13])
    play = played(0.3, link=outage)
    assert play["met"]
    assert play["loss"] < 0.01


def test_what_is_in_flight_is_cancelled_if_the_link_becomes_too_slow_for_it():
    offer = catalog(2, layered=True)
    play = Session(Ladder(offer), 20.0, load_policy("anytime")(), HarmonicMean(), config=PlayerConfig(time_price=0.1))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.05
    while any(fetch.track == "base" for fetch in todo):
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    while not play.over:
        now = play.next_timer()
        play.timer(now)
        actions = decode_all(play, play.actions(), now)
    assert of(actions, Deliver)
    assert play.record.met
    assert now < 20.0
    assert {cancel.request for cancel in of(actions, Cancel)} >= set(play.view.in_flight)


@pytest.mark.parametrize("rate", [3e4, 3e5, 3e6, 3e7])
@pytest.mark.parametrize("decode", [0.1, 1.0, 20.0])
def test_a_plan_is_near_the_best_of_all_assignments(rate, decode):
    offer = catalog(3, layered=True, decode=decode)
    view = View(Ladder(offer), 2.0, time_price=0.01)
    plan = TimePlanner(view).plan(view, rate)

    def objective(tracks):
        loss = sum(offer.track(track).loss[group] for group, track in enumerate(tracks))
        nbytes = sum(
            offer.track(layer).bytes[group] for group, track in enumerate(tracks) for layer in view.layers(track, None)
        )
        decodes = [offer.track(track).decode_s for track in tracks]
        return loss + 0.01 * max(nbytes / rate + max(decodes), sum(decodes))

    best = min(objective(tracks) for tracks in itertools.product([track.name for track in offer.tracks], repeat=3))
    assert plan.objective >= best - 1e-12
    assert plan.objective <= 1.1 * best


def test_what_builds_on_an_unavailable_layer_cannot_be_had_either():
    offer = catalog(3, layered=True)
    layers = tuple(track for track in offer.tracks if track.name in {"base", "layer-1", "layer-2", "Int8"})
    view = View(Ladder(dataclasses.replace(offer, tracks=layers)), 2.0, time_price=1e-3)
    view.track_of = ["base", "layer-1", "base"]
    view.settled.update(range(3))
    view.missing_groups = GroupSet(view.groups, ())
    view.unavailable = {(0, "layer-1"), (1, "layer-1")}
    planner = TimePlanner(view)
    planner.sync(view)
    names = [planner.names[target] for target in planner.plan(view, 1e5).targets]
    assert names == ["Int8", "layer-2", "layer-2"]  # the second has the layer: it is no obstacle any more


@pytest.mark.parametrize(("price", "probes"), [(1e-3, True), (10.0, False)])
def test_if_everything_was_in_the_local_store_one_upgrade_finds_out_the_rate(price, probes):
    offer = catalog(64, layered=True)
    play = Session(Ladder(offer), 2.0, load_policy("anytime")(), HarmonicMean(), config=PlayerConfig(time_price=price))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    while todo and todo[0].track == "base":
        now += 1e-4
        play.done(todo.pop(0).request, now, limit="kept")
        todo += of(decode_all(play, play.actions(), now), FetchGroup)
    assert play.view.rate == 0.0
    assert play.over is not probes
    assert len({fetch.group for fetch in todo}) == probes
    if probes:
        for number, fetch in enumerate(todo):
            play.first_byte(fetch.request, 0.05 + number / 100)
            play.done(fetch.request, 0.06 + number / 100)
        assert play.view.rate > 0
        assert of(play.actions(), FetchGroup)
