"""The groups that an engine with spare time computes, and the prices of bytes and of its time."""

import math
from itertools import pairwise

import numpy as np
import pytest

from kvabr.abr import Ladder, View
from kvabr.abr.belief import LinkBelief
from kvabr.abr.estimators import Prior
from kvabr.abr.planner import ComputePlanner
from kvabr.abr.time_planner import TimePlanner
from kvabr.abr.view import Transfer
from kvabr.data import default_catalog
from kvabr.player.session_types import PlayerConfig
from kvabr.replay.clairvoyant import Clairvoyant
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.events import GroupDecoded
from kvabr.types.loss import predicted_loss
from tests.catalogs import catalog
from tests.replay.worlds import world, worlds


@pytest.mark.parametrize("price", [-1.0, float("nan")])
def test_a_price_that_makes_no_sense_is_refused(price):
    with pytest.raises(UsageError, match="0 or more"):
        PlayerConfig(gpu_price=price)


@pytest.mark.parametrize("mode", ["hole", "suffix"])
@pytest.mark.parametrize("load", [0.7, 1.1, 2.5])
def test_the_bound_with_a_price_lies_between_that_without_an_engine_and_that_with_a_free_one(mode, load):
    offer = catalog(10, layered=True)
    cost = PrefillCost(0.0, 4.0 / offer.tokens)
    base = sum(offer.track("base").bytes)
    link = Capacity(world("flat", [load * base / 2.0]), 0.0, 0.0, slow_start=False)
    both, alone = Clairvoyant(offer, cost, mode), Clairvoyant(offer, None, mode)
    free = both.best(link, 2.0, time_price=0.0, gpu_price=0.0).least_loss
    without = alone.best(link, 2.0, time_price=0.0, gpu_price=1.0).objective
    found = [
        both.best(link, 2.0, time_price=0.0, gpu_price=price).objective
        for price in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 10.0, 1e6)
    ]
    assert found[0] == pytest.approx(free, abs=1e-6)
    assert all(low <= 1.005 * high for low, high in pairwise(found))  # a bound is not computed exactly
    if without < math.inf:
        assert found[-1] == without
    else:
        assert found[-1] > MISS_PENALTY  # rather late than at such a price


@pytest.mark.slow
def test_no_play_comes_below_the_bound_with_a_price():
    offer = catalog(12, layered=True)
    cost = PrefillCost(0.001, 4.0 / offer.tokens)
    compared = 0
    for mode in ("hole", "suffix"):
        for price in (0.0, 1e-3, 1e-2):
            experiment = Experiment(
                offer, ReplayOptions(2.0, 0.05, 0.09, cost, mode, config=PlayerConfig(gpu_price=price))
            )
            for link in worlds():
                capacity, rtt_s, bound = experiment.prepare(link, 0.4)
                run = experiment.play_on(link, 0.4, "anytime", capacity, rtt_s, bound, log=False).run
                if run["met"]:
                    assert run["objective"] >= bound.objective - 1e-9
                    compared += 1
    assert compared > 20


GPU = PrefillCost(20e-3, 1e-6)
"""An engine that computes any prompt here in the time of a lookup."""


def simulated(cost, *, rates=(1e6,), deadline=4.0, rtt=0.02, load=None, groups=32, **options):
    experiment = Experiment(catalog(groups, layered=True), ReplayOptions(deadline, rtt, load, cost, **options))
    link = world("steady", [*rates])
    capacity, rtt_s, bound = experiment.prepare(link, 0.0)
    return experiment.play_on(link, 0.0, "anytime", capacity, rtt_s, bound, log=False).run


@pytest.mark.parametrize(("mode", "prefix"), [("hole", False), ("suffix", False), ("suffix", True)])
@pytest.mark.parametrize("load", [0.03, 1.0, 30.0])
def test_what_is_sooner_computed_than_anything_comes_is_computed_at_once(mode, prefix, load):
    run = simulated(GPU, mode=mode, prefix=prefix, load=load)
    assert run["track_tokens"] == {"recomputed": 32 * 128}
    assert run["ttft_s"] == pytest.approx(GPU.seconds(0, 32 * 128))
    assert run["loss"] == 0.0


@pytest.mark.parametrize("load", [None, 3.0, 300.0])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("mode", "prefix"), [("hole", False), ("suffix", True)])
def test_an_engine_begins_in_time_where_the_link_brings_nothing(mode, prefix, told, load):
    """For as long as the link may recover it waits, but not until it could not meet the deadline any more."""
    cost, dead = PrefillCost.from_rate(32 * 128 / 2.7), [0.0] * 20 + [1e6] * 20
    prior = Prior((load or 1.0) * 1e6, 0.02) if told else None
    run = simulated(cost, rates=dead, load=load, mode=mode, prefix=prefix, prior=prior)
    assert run["met"]
    assert run["ttft_s"] < 3.6


@pytest.mark.parametrize(("mode", "prefix"), [("hole", False), ("suffix", True)])
@pytest.mark.parametrize("factor", [0.03, 0.1])
@pytest.mark.parametrize("load", [0.1, 1.0])
def test_a_link_that_used_to_be_slow_gets_a_chance(mode, prefix, factor, load):
    """The engine alone would miss the deadline, or take many times as long as the link."""
    cost, deadline = PrefillCost.from_rate(32 * 128 / 2.7), 2.0
    told = factor * load * catalog(32, layered=True).fp16_bytes / deadline
    run = simulated(cost, deadline=deadline, load=load, mode=mode, prefix=prefix, prior=Prior(told, 0.02))
    alone = simulated(None, deadline=deadline, load=load)
    assert run["met"]
    assert run["objective"] <= 1.6 * alone["objective"]


@pytest.mark.parametrize(
    ("seconds", "rate", "told"), [(1.97, 1.0, 1.0), (1.94, 0.1, 0.005), (1.94, 0.0, 1.0), (1.86, 0.1, 0.005)]
)
def test_an_engine_that_only_just_meets_the_deadline_waits_for_no_sample(seconds, rate, told):
    """``rate`` and ``told`` are multiples of the rate that brings the base in time."""
    base = sum(catalog(32, layered=True).track("base").bytes) / 2.0
    cost, how = PrefillCost(0.01, (seconds - 0.01) / (32 * 128)), {"mode": "suffix", "prior": Prior(told * base, 0.05)}
    run = simulated(cost, rates=[rate * base] * 400 + [1.0], deadline=2.0, rtt=0.05, **how)
    assert run["met"]


@pytest.mark.parametrize("mode", ["hole", "suffix", "prefix"])
@pytest.mark.parametrize("rate", [3000, 30_000, 300_000])
@pytest.mark.parametrize("load", [0.1, 1.0])
def test_an_engine_makes_no_play_worse(mode, rate, load):
    """On the slower links, groups computed after groups with an upgrade in flight would inherit their errors."""
    cost, groups = PrefillCost.from_rate(float(rate)), 32
    how = {"mode": "hole" if mode == "hole" else "suffix", "prefix": mode == "prefix"}
    run = simulated(cost, rtt=0.1, load=load, groups=groups, **how)
    alone = simulated(None, rtt=0.1, load=load, groups=groups)
    config, seconds = PlayerConfig(), cost.seconds(0, groups * 128)
    computed = seconds * (config.time_price + config.gpu_price)
    assert run["met"]
    assert run["objective"] <= 1.1 * min(alone["objective"], computed)


@pytest.mark.parametrize(("deadline", "load", "rate"), [(1.0, 3.0, 30_000), (1.0, 0.3, 300), (4.0, 3.0, 3000)])
def test_on_a_known_link_an_engine_that_is_hardly_worth_it_changes_next_to_nothing(deadline, load, rate):
    """Few choices of tracks make the network look slow, mixtures of them do not; groups wait for all their layers."""
    offer = default_catalog()
    prior = Prior(load * offer.fp16_bytes / deadline, 0.02)

    def played(cost):
        options = ReplayOptions(deadline, 0.02, load, cost, prior=prior)
        return Experiment(offer, options).play(world("steady", [1e6]), 0.0, "anytime").run

    run, alone = played(PrefillCost.from_rate(float(rate))), played(None)
    assert run["recompute_s"] <= 0.01
    assert run["objective"] <= 1.02 * alone["objective"]


@pytest.mark.parametrize("prefix", [True, False])
def test_no_engine_is_expected_to_begin_behind_groups_before_they_are_published(prefix):
    cost = PrefillCost(0.0, 1.0)
    play = View(Ladder(catalog(4)), 60.0, cost=cost, front_first=True, prefix=prefix, time_price=1.0)
    play.edge, play.ready_s = 1, {1: 5.0, 2: 10.0}.get
    stops, engine_s = np.array([1, 2, 3]), np.full(3, 7.0)
    found = TimePlanner(play).divide(play, [1e12], np.zeros_like(stops), stops, engine_s, np.zeros(3))[0]
    assert list(found.network_s) == pytest.approx([0.0, 5.0, 10.0], abs=0.05)
    assert list(found.objective) == pytest.approx([7.0, 12.0, 17.0], abs=0.05)


@pytest.mark.parametrize("group", [3, 0, None])
def test_no_call_begins_behind_a_group_that_is_being_decoded(group):
    """It would inherit the errors of that group's last track."""
    cost = PrefillCost.from_rate(1e5)
    play = View(Ladder(catalog(16, layered=True)), 4.0, cost=cost, time_price=1e-3, gpu_price=1e-3)
    for each in range(4):
        play.track_of[each] = "base"
        play.settled.add(each)
        play.missing_groups.discard(each)
    play.solid, play.now, play.rate, play.ttfb_s = 4, 1.0, 1e5, 0.02
    times, link = TimePlanner(play), LinkBelief()
    for now in (0.8, 0.9, 1.0):
        play.now = now
        link.update(play)
    planner = ComputePlanner(play, times, link)
    planner.plan(play)
    if group is not None:
        play.decoding = {1: Transfer(1, group, "layer-1", 100, upgrade=True, requested_s=0.9)}
    call = planner.next(play)
    first = planner.reserved.start
    assert (call is None) == (group is not None and first - 8 <= group < first)


def test_what_was_computed_keeps_the_errors_of_what_was_in_place_then():
    """The engine begins after the base; its layers arrive while the engine computes."""
    offer = catalog(16, layered=True)
    options = ReplayOptions(2.0, 0.05, 0.12, PrefillCost.from_rate(512.0), "suffix", config=PlayerConfig(gpu_price=0.0))
    experiment = Experiment(offer, options)
    link = world("steady", [1e6])
    played = experiment.play_on(link, 0.0, "anytime", *experiment.prepare(link, 0.0), log=False)
    steps, tracks = played.record.steps, [group.track for group in played.record.groups]
    began = next(index for index, step in enumerate(steps) if step[0] == "compute")
    assert steps[began][1:] == (tracks.index("recomputed"), 16)
    assert "base" not in tracks  # so all layers came later than that
    assert all(step[0] == "fetch" and step[2] != "base" for step in steps[began + 1 :])
    assert len(steps) > began + 8
    assert played.run["loss"] > 1.2 * predicted_loss(offer, tracks)


def test_a_prefix_is_cut_in_front_of_what_came_before_the_link_was_known_to_be_slow():
    """The groups in place on the base cost more, by errors in later tokens, than computing them again."""
    cost, offer = PrefillCost(0.03, 0.25e-3), default_catalog()
    experiment = Experiment(offer, ReplayOptions(4.0, 0.02, 0.03, cost, mode="suffix", prefix=True))
    link = world("slow", [1e6])
    play = experiment.play_on(link, 0.0, "anytime", *experiment.prepare(link, 0.0), log=True)
    came = [event for event in play.log if isinstance(event, GroupDecoded)]
    assert came
    assert play.run["track_tokens"] == {"recomputed": offer.tokens}
    assert play.run["bytes_wasted"] == play.run["bytes_fetched"]
    assert play.run["ttft_s"] < 1.11 * cost.seconds(0, offer.tokens)


@pytest.mark.parametrize("load", [0.3, 1.0, 3.0])
def test_a_play_does_not_end_because_its_plan_is_old(monkeypatch, load):
    """Upgrades that are not possible yet are dropped from a plan: it is renewed before the play may end."""
    offer, link = default_catalog(), world("steady", [1e6])
    told = Prior(1.6 * load * offer.fp16_bytes / 4.0, 0.02)
    experiment = Experiment(offer, ReplayOptions(4.0, 0.02, load, prior=told))
    prepared = experiment.prepare(link, 0.0)
    often = experiment.play_on(link, 0.0, "anytime", *prepared, log=False).run
    monkeypatch.setattr("kvabr.abr.policies.anytime.TIME_TOLERANCE", 1.0)
    seldom = experiment.play_on(link, 0.0, "anytime", *prepared, log=False).run
    assert seldom["objective"] < 1.2 * often["objective"]


@pytest.mark.parametrize(("groups_per_s", "again"), [(40.0, 40), (2.0, 62)])
def test_an_engine_continues_where_its_last_call_ended(groups_per_s, again):
    """Groups 4 to 7 are lossy, and there is no time to compute everything after them again."""
    cost, offer = PrefillCost.from_rate(groups_per_s * 128), default_catalog()
    play = View(Ladder(offer), 4.0, cost=cost, time_price=1e-3, gpu_price=1e-3)
    times, link = TimePlanner(play), LinkBelief()
    planner = ComputePlanner(play, times, link)
    planner.called_to = 40
    for group in range(63):
        play.missing_groups.discard(group)
        computed = group < 4 or 8 <= group < 40
        play.track_of[group] = RECOMPUTED if computed else "AC-L0"
        if not computed:
            play.settled.add(group)
    play.solid, play.rate, play.ttfb_s = 63, 1e3, 0.02
    for now in (3.1, 3.2, 3.3, 3.4):
        play.now = now
        link.update(play)
    planner.plan(play)
    call = planner.next(play)
    assert call is not None
    assert call.group == again


@pytest.mark.parametrize("start", [0.05, 0.2, 0.4])
def test_a_prefix_is_not_cut_for_an_engine_that_would_be_late_after_one_slow_sample(start):
    """The link is slow at first; computing everything would take six deadlines."""
    offer = default_catalog()
    cost = PrefillCost.from_rate(offer.tokens / 24.0)
    options = ReplayOptions(4.0, 0.02, 0.3, cost, mode="suffix", prefix=True)
    link = world("slow at first", [1e3] * round(start / 0.05) + [1e6] * 200, 0.05)
    experiment = Experiment(offer, options)
    play = experiment.play_on(link, 0.0, "anytime", *experiment.prepare(link, 0.0), log=False)
    assert play.run["met"]
