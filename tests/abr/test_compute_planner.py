"""What an engine with spare time computes, and the prices of bytes and of its time."""

import math
from itertools import pairwise

import numpy as np
import pytest

from kvabr.abr import Ladder, Transfer, View
from kvabr.abr.compute_planner import ComputePlanner
from kvabr.abr.estimator import Prior
from kvabr.abr.ladder import every_option, rank
from kvabr.abr.time_planner import TimePlanner
from kvabr.data import default_catalog
from kvabr.player.session_types import PlayerConfig
from kvabr.replay.clairvoyant import Clairvoyant
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.events import GroupDecoded, WorkDivided
from kvabr.types.loss import predicted_loss
from tests.catalogs import catalog
from tests.replay.worlds import world, worlds


def test_a_byte_is_worth_less_the_more_there_are():
    offer = catalog(12, layered=True)
    ladder = Ladder(offer)
    assert ladder.price(-1.0) == math.inf
    steps = rank(every_option(offer))
    assert ladder.price(0.0) == steps[0].worth
    prices = [ladder.price(1e4 * count) for count in range(300)]
    assert prices == sorted(prices, reverse=True)
    everything = sum(step.bytes for step in steps)
    assert ladder.price(everything) == steps[-1].worth
    assert ladder.price(everything + 1) == 0.0


@pytest.mark.parametrize("price", [-1.0, float("nan")])
def test_a_price_that_makes_no_sense_is_refused(price):
    with pytest.raises(UsageError, match="zero or more"):
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


def on_its_way(group, *, rate=1e6, deadline=4.0, gpu_price=1e-3, time_price=0.0):
    """All groups are in place on the base, but for one that is in flight; return the view and a planner."""
    offer = catalog(8, layered=True)
    view = View(Ladder(offer), deadline, cost=PrefillCost(0.0, 0.1 / 128), gpu_price=gpu_price, time_price=time_price)
    planner = ComputePlanner(
        view, TimePlanner(view), lambda one, track: 0.0 if track is None else view.loss(one, track)
    )
    view.rate = view.lower_bound = rate
    for one in range(offer.groups):
        view.track_of[one] = "base"
        view.missing_groups.discard(one)
        if one == group:
            size = offer.track("base").bytes[one]
            view.in_flight[0] = Transfer(0, one, "base", size, upgrade=False, requested_s=0.0)
            view.outstanding_bytes = size
        else:
            view.settled.add(one)
            planner.settled(one, "base", view.loss(one, "base"))
    view.solid = offer.groups if group is None else group
    planner.plan(view)
    return view, planner


def test_what_is_in_place_is_computed_while_the_next_group_is_on_its_way():
    view, planner = on_its_way(5)
    found = planner.next(view)
    worst = max(range(5), key=lambda group: view.loss(group, "base"))
    assert (found.kind, found.group) == ("recompute", worst)
    # What is behind that group cannot be computed yet, and the engine stays free for what may come late.
    for group, gpu_price in ((0, 1e-3), (5, 1.0)):
        view, planner = on_its_way(group, gpu_price=gpu_price)
        assert planner.next(view) is None
    # What comes too late is computed, with what is in place in front of it.
    view, planner = on_its_way(5, rate=2_010)
    found = planner.next(view)
    assert (found.group, planner.reserved.stop > 5) == (0, True)


def test_time_has_its_price_where_the_play_could_end():
    for time_price, group in ((1e-3, 0), (10.0, None)):
        view, planner = on_its_way(None, time_price=time_price)
        found = planner.next(view)
        assert (None if found is None else found.group) == group
    # Another group is on its way: what a computation takes longer than the network costs its time.
    for network_s, group in ((0.02, None), (0.2, 0)):
        view, planner = on_its_way(5, time_price=1.0)
        planner._network_s = network_s
        found = planner.next(view)
        assert (None if found is None else found.group) == group


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


@pytest.mark.slow
def test_an_engine_is_part_of_the_plan_over_every_kind_of_link():
    offer = catalog(16, layered=True)
    cost = PrefillCost(0.0, 4.0 / offer.tokens)
    helped, alone = [], []
    for price, runs in ((1e-3, helped), (math.inf, alone)):
        experiment = Experiment(
            offer, ReplayOptions(2.0, 0.05, 0.1, cost, "hole", config=PlayerConfig(gpu_price=price))
        )
        runs += [experiment.play(link, start_s, "anytime").run for link in worlds() for start_s in (0.0, 1.3)]
    both = [(mine, other) for mine, other in zip(helped, alone, strict=True) if mine["met"] and other["met"]]
    assert len(both) >= 11
    assert sum(run["met"] for run in helped) >= sum(run["met"] for run in alone)
    assert sum(mine["loss"] for mine, _ in both) < 0.7 * sum(other["loss"] for _, other in both)


def test_a_group_that_could_not_be_decoded_is_computed_after_all():
    """It had settled, so it counted as in place."""
    view, planner = on_its_way(3, rate=1e3, gpu_price=0.0)
    planner.settled(3, "base", view.loss(3, "base"))
    view.in_flight.pop(0)
    view.outstanding_bytes = 0
    planner.next(view)
    view.track_of[3] = None
    view.missing_groups.add(3)
    planner._worth = lambda *_: 1.0
    planner.plan(view)
    decision = planner.next(view)
    assert decision.kind == "recompute"
    assert decision.group <= 3 < planner.reserved.stop


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


@pytest.mark.parametrize(("mode", "prefix"), [("hole", False), ("suffix", True)])
@pytest.mark.parametrize("rate", [3e5, 1e6, 1e7])
def test_what_playing_computing_and_both_take_is_expected_and_told(mode, prefix, rate):
    """On a steady link of which earlier plays told, a play does each of them as it was expected to."""
    offer, cost = catalog(32, layered=True), PrefillCost.from_rate(2000.0)
    link = world("steady", [rate])

    def played(cost, **options):
        experiment = Experiment(offer, ReplayOptions(4.0, 0.02, None, cost, prior=Prior(rate, 0.02), **options))
        return experiment.play_on(link, 0.0, "anytime", *experiment.prepare(link, 0.0), log=True)

    both, alone = played(cost, mode=mode, prefix=prefix), played(None).run
    found = both.run["division"]
    assert found["compute_s"] == pytest.approx(cost.seconds(0, offer.tokens), rel=0.1)
    assert found["play_s"] == pytest.approx(alone["ttft_s"], rel=0.25)
    assert found["ends_s"] == pytest.approx(both.run["ttft_s"], rel=0.25)
    first, *_ = told = [event for event in both.log if isinstance(event, WorkDivided)]
    assert (first.first, first.last, first.play_s) == (found["first"], found["last"], found["play_s"])
    assert len(told) <= 2 * offer.groups  # one for each new division, not for each question
    assert "division" not in alone


def test_a_slow_engine_waits_for_the_rate():
    """What it began could not be taken back, and the play would wait for it."""
    slow = PrefillCost.from_rate(300.0)
    run, alone = simulated(slow, load=30.0), simulated(None, load=30.0)
    assert run["recompute_s"] == 0.0
    assert run["ttft_s"] <= 1.05 * alone["ttft_s"]


@pytest.mark.parametrize("load", [0.1, 1.0, 10.0])
def test_a_slow_engine_makes_no_play_miss_a_deadline_that_the_network_meets(load):
    with_engine = simulated(PrefillCost.from_rate(300.0), deadline=1.0, rtt=0.1, load=load)
    assert simulated(None, deadline=1.0, rtt=0.1, load=load)["met"]
    assert with_engine["met"]


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


def test_one_call_computes_what_a_second_would_pay_the_constant_for_again():
    cost = PrefillCost(0.1, 0.1 / 4096)
    run = simulated(cost, rates=(1.0,))  # next to nothing comes
    assert run["ttft_s"] == pytest.approx(cost.seconds(0, 4096))


@pytest.mark.parametrize("mode", ["hole", "suffix", "prefix"])
@pytest.mark.parametrize("rate", [3000, 30_000, 300_000])
@pytest.mark.parametrize("load", [0.1, 1.0])
def test_an_engine_makes_no_play_worse(mode, rate, load):
    """On the slower ones, what is computed behind groups whose upgrade is in flight would inherit their errors."""
    cost, groups = PrefillCost.from_rate(float(rate)), 32
    how = {"mode": "hole" if mode == "hole" else "suffix", "prefix": mode == "prefix"}
    run = simulated(cost, rtt=0.1, load=load, groups=groups, **how)
    alone = simulated(None, rtt=0.1, load=load, groups=groups)
    config, seconds = PlayerConfig(), cost.seconds(0, groups * 128)
    computed = seconds * (config.time_price + config.gpu_price)
    assert run["met"]
    assert run["objective"] <= 1.1 * min(alone["objective"], computed)


def test_a_division_that_only_a_rate_of_a_moment_speaks_for_does_not_cut_a_prefix():
    """The link stops for a moment in the middle of a play."""
    offer, cost = catalog(32, layered=True), PrefillCost.from_rate(3000.0)
    base = sum(offer.track("Int8").bytes)
    link = world("gap", [base, base, 1.0, base, base, base, base, base], step=0.25)
    options = ReplayOptions(4.0, 0.02, None, cost, "suffix", prefix=True, slow_start=False)
    run = Experiment(offer, options).play(link, 0.0, "anytime").run
    assert run["recompute_s"] == 0.0


@pytest.mark.parametrize("load", [1.0, 3.0])
def test_an_engine_that_is_not_worth_its_time_makes_no_play_worse_on_a_link_that_is_known(load):
    """The order in which groups are requested is the one that suits the network alone."""
    known = Prior(load * catalog(32, layered=True).fp16_bytes / 4.0, 0.02)
    run, alone = (
        simulated(cost, load=load, prior=known, decode_scale=8.0) for cost in (PrefillCost.from_rate(300.0), None)
    )
    assert run["recompute_s"] == 0.0
    assert run["objective"] <= 1.05 * alone["objective"]


@pytest.mark.parametrize(("deadline", "load", "rate"), [(1.0, 3.0, 30_000), (1.0, 0.3, 300), (4.0, 3.0, 3000)])
def test_on_a_known_link_an_engine_that_computes_nothing_changes_nothing(deadline, load, rate):
    """Few choices of tracks make the network look slow, mixtures of them do not; groups wait for all their layers."""
    offer = default_catalog()
    prior = Prior(load * offer.fp16_bytes / deadline, 0.02)

    def played(cost):
        options = ReplayOptions(deadline, 0.02, load, cost, prior=prior)
        return Experiment(offer, options).play(world("steady", [1e6]), 0.0, "anytime").run

    run, alone = played(PrefillCost.from_rate(float(rate))), played(None)
    assert run["recompute_s"] == 0.0
    assert (run["ttft_s"], run["loss"]) == (alone["ttft_s"], alone["loss"])


@pytest.mark.parametrize("prefix", [True, False])
def test_some_groups_on_better_tracks_than_others_end_just_in_time(prefix):
    """None of the tracks that are tried for all of them does."""
    offer, groups = catalog(32, layered=True), 32
    play = View(Ladder(offer), 4.0, cost=PrefillCost(0.0, 1e-3), front_first=prefix, prefix=prefix, time_price=1e-3)
    play.rate = play.lower_bound = 1.6 * sum(offer.track("base").bytes) / 4.0
    times = TimePlanner(play)
    times.sync(play)
    (objective,), (network_s,), (late,) = times.divide(
        play, play.rate, 0, np.array([groups if prefix else 0]), np.zeros(1), np.zeros(1)
    )
    assert not late
    assert network_s == pytest.approx(4.0)
    assert offer.track("layer-1").total_loss < objective - 4e-3 < 0.9 * offer.track("base").total_loss


@pytest.mark.parametrize("prefix", [True, False])
def test_no_engine_is_expected_to_begin_behind_groups_before_they_are_published(prefix):
    cost = PrefillCost(0.0, 1.0)
    play = View(Ladder(catalog(4)), 60.0, cost=cost, front_first=True, prefix=prefix, time_price=1.0)
    play.edge, play.ready_s = 1, {1: 5.0, 2: 10.0}.get
    stops, engine_s = np.array([1, 2, 3]), np.full(3, 7.0)
    found = TimePlanner(play).divide(play, 1e12, 0, stops, engine_s, np.zeros(3))
    assert list(found.network_s) == pytest.approx([0.0, 5.0, 10.0], abs=0.05)
    assert list(found.objective) == pytest.approx([7.0, 12.0, 17.0], abs=0.05)


@pytest.mark.parametrize("backlog_s", [0.0, 3.0])
def test_no_engine_is_expected_to_begin_behind_groups_before_they_are_decoded(backlog_s):
    offer = catalog(4, layered=True, decode=1000.0)  # a second for each group on FP16, two on the base
    play = View(Ladder(offer), 60.0, cost=PrefillCost(0.0, 1.0), front_first=True, time_price=1.0, decoders=1)
    play.decode_backlog_s = backlog_s
    found = TimePlanner(play).divide(play, 1e12, 0, np.array([2, 3]), np.full(2, 7.0), np.zeros(2))
    assert list(found.objective) == pytest.approx([backlog_s + 9.0, backlog_s + 10.0], abs=0.1)


def test_what_was_computed_keeps_the_errors_of_what_was_in_place_then():
    """The engine begins behind the base, whose layers come while it computes."""
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


def test_the_last_group_of_a_prefix_comes_with_a_layer_as_it_carries_most_of_the_loss():
    """Groups come in order. An upgrade is requested once its group is in place: too late on a link that slows down."""
    offer = default_catalog()
    prior = Prior(0.02 * offer.fp16_bytes, 0.02)

    def played(cost, **options):
        options = ReplayOptions(1.0, 0.02, 0.02, cost, prior=prior, **options)
        return Experiment(offer, options).play(world("slower", [1e6, 0.3e6], step=0.125), 0.0, "anytime").run

    prefix, alone = played(PrefillCost.from_rate(300.0), mode="suffix", prefix=True), played(None)
    assert prefix["met"]
    assert prefix["objective"] < 1.5 * alone["objective"]


@pytest.mark.parametrize("load", [0.062, 0.07])
def test_layers_in_front_of_what_an_engine_computes_are_worth_what_it_would_bring_out(load):
    """Their errors count about twice as much then. A play that does not see that is cut on the base."""
    offer, cost = default_catalog(), PrefillCost(0.03, 0.25e-3)
    options = ReplayOptions(4.0, 0.02, load, cost, mode="suffix", prefix=True)
    run = Experiment(offer, options).play(world("steady", [1e6]), 0.0, "anytime").run
    assert 0.0 < run["recompute_s"] < cost.seconds(0, offer.tokens)
    assert run["loss"] < 1e-3


def test_a_play_does_not_end_before_an_engine_has_computed_what_it_was_given():
    """All groups are in place, the last ones on the base, as the engine is to take them over."""
    options = ReplayOptions(4.0, 0.02, 0.25, PrefillCost(0.03, 0.25e-3), mode="suffix")
    run = Experiment(default_catalog(), options).play(world("steady", [1e6]), 0.0, "anytime").run
    assert run["recompute_s"] > 0
    assert run["loss"] < 1e-3


def test_slow_start_hopes_for_no_link_that_is_much_faster_than_earlier_plays_told():
    """Groups that come next would be fetched in 8 bits, and hold up all others."""
    offer = default_catalog()
    prior = Prior(0.3 * offer.fp16_bytes / 4, 0.1)

    def played(cost, **options):
        options = ReplayOptions(4.0, 0.1, 0.45, cost, prior=prior, **options)
        return Experiment(offer, options).play(world("steady", [1e6]), 0.0, "anytime").run

    prefix, alone = played(PrefillCost(0.03, 0.25e-3), mode="suffix", prefix=True), played(None)
    assert prefix["objective"] < 1.06 * alone["objective"]


def test_what_earlier_plays_told_bounds_the_rates_also_where_slow_start_takes_long_to_get_there():
    """The estimate does not begin with such a rate, as slow start may not reach it in time."""
    offer = catalog(8, layered=True)
    view = View(Ladder(offer), 1.0, PrefillCost.from_rate(3000.0), time_price=1e-3)
    view.ttfb_s, told = 0.1, offer.fp16_bytes / 3
    planner = ComputePlanner(view, TimePlanner(view), lambda *_: 0.0)
    spread, _ = planner._rates_of(view)
    assert min(spread) < 0.7 * told < told < max(spread)
    view.told_rate = told
    rates, ramp = planner._rates_of(view)
    assert rates == pytest.approx([0.7 * told, told])
    assert ramp is not None
    view.rate, view.growing = 0.9 * told, True
    assert max(planner._rates_of(view)[0]) == pytest.approx(1.35 * told)  # it may double before a request has an effect


def test_slow_start_leaves_nothing_to_an_engine_that_no_division_gives_anything():
    """Nothing has come for a tenth of the deadline: that is a round trip."""
    run = simulated(PrefillCost.from_rate(300.0), deadline=1.0, rtt=0.1, load=1.0)
    assert run["recompute_s"] == 0.0


def test_a_prefix_is_cut_once_what_has_arrived_is_decoded():
    cost = PrefillCost.from_rate(3000.0)
    view = View(Ladder(catalog(8, layered=True)), 4.0, cost, front_first=True, prefix=True, time_price=1e-3)
    planner = ComputePlanner(view, TimePlanner(view), lambda *_: 0.0)
    planner.reserved, planner._network_s, view.decode_backlog_s = range(8), 0.1, 0.1
    assert planner.rest(view) is None  # the network is to bring more
    assert planner.rest(view, idle=True).kind == "wait"
    view.decode_backlog_s = 0.0
    assert planner.rest(view, idle=True).kind == "recompute"
    view.decodes_last, view.decode_backlog_s = True, 0.1  # of better tracks than the cheapest, once it is cut
    assert planner.rest(view, idle=True).kind == "recompute"
    view.undecoded[7] = 1
    assert planner.rest(view, idle=True).kind == "wait"


def test_where_some_groups_of_a_long_prompt_are_better_than_others_to_stop_costs_what_they_lose():
    """Groups are taken together there; what they have is one of the choices all the same."""
    offer = catalog(512, layered=True)
    view = View(Ladder(offer), 4.0, cost=PrefillCost(0.0, 1e-3), gpu_price=0.0, time_price=1e-3)
    view.rate = view.lower_bound = 1e6
    layers = [track.name for track in offer.tracks if track.name == "base" or track.refines is not None]
    for group in range(offer.groups):
        view.track_of[group] = layers[group % len(layers)]
        view.missing_groups.discard(group)
        view.settled.add(group)
    times = TimePlanner(view)
    times.sync(view)
    stops = np.array([0, offer.groups])
    divided = times.divide(view, 1e6, 0, stops, np.array([0.0, 60.0]), np.zeros(2))
    assert len(layers) > 1
    assert divided.objective[0] <= times.lost() + 1e-9


def test_a_prefix_is_cut_in_front_of_what_came_before_the_link_was_known_to_be_slow():
    """What is in place by then, on the base, costs more in what it brings out than the engine takes."""
    cost, offer = PrefillCost(0.03, 0.25e-3), default_catalog()
    experiment = Experiment(offer, ReplayOptions(4.0, 0.02, 0.03, cost, mode="suffix", prefix=True))
    link = world("slow", [1e6])
    play = experiment.play_on(link, 0.0, "anytime", *experiment.prepare(link, 0.0), log=True)
    came = [event for event in play.log if isinstance(event, GroupDecoded)]
    assert came
    assert play.run["track_tokens"] == {"recomputed": offer.tokens}
    assert play.run["bytes_wasted"] == play.run["bytes_fetched"]
    assert play.run["ttft_s"] < 1.1 * cost.seconds(0, offer.tokens)
