"""The clairvoyant plan: how near it comes to the bound, and that no policy beats it."""

import random
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvabr.abr.ladder import Choice, knapsack
from kvabr.abr.plugins import policies
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError
from tests.abr.plain import steady
from tests.catalogs import catalog
from tests.examples import examples
from tests.lab import small
from tests.replay.worlds import world, worlds


def fits(groups, picks):
    return sum(choices[index].bytes for choices, index in zip(groups, picks, strict=True))


def loses(groups, picks):
    return sum(choices[index].loss for choices, index in zip(groups, picks, strict=True))


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.0, 1.2))
@example(43150, 1, 5e-324)
def test_the_knapsack_finds_what_trying_everything_finds(seed, count, share):
    dice = random.Random(seed)
    groups = [[Choice(dice.randint(0, 2000), dice.random()) for _ in range(dice.randint(1, 5))] for _ in range(count)]
    budget = share * sum(max(choice.bytes for choice in choices) for choices in groups)
    every = [picks for picks in product(*(range(len(choices)) for choices in groups)) if fits(groups, picks) <= budget]
    found = knapsack(groups, budget)
    if not every:
        assert found is None
        return
    assert found is not None
    assert fits(groups, found) <= budget
    best = min(loses(groups, picks) for picks in every)
    # The grid may cost what a budget smaller by one cell a group would.
    less = budget * (1 - count / 8192) - count
    nearly = min((loses(groups, picks) for picks in every if fits(groups, picks) <= less), default=float("inf"))
    assert best - 1e-9 <= loses(groups, found) <= max(best, nearly) + 1e-9


def test_the_knapsack_fills_the_last_bytes_where_greed_does_not():
    groups = [[Choice(0, 1.0), Choice(60, 0.0)], [Choice(0, 0.9), Choice(50, 0.0)], [Choice(0, 0.9), Choice(50, 0.0)]]
    assert knapsack(groups, 100) == [0, 1, 1]  # the first saves nearly as much a byte, and would leave 40 unused
    assert knapsack(groups, 0) == [0, 0, 0]
    assert knapsack([[Choice(1, 0.0)]], 0) is None


def test_it_runs_only_where_the_future_is_known():
    with pytest.raises(PolicyError, match="it runs only in a simulation"):
        steady("oracle", catalog(4), 1e6)


@pytest.mark.parametrize("layered", [True, False])
@pytest.mark.parametrize("rtt", [0.01, 0.1])
def test_its_regret_is_about_zero(layered, rtt):
    regrets = []
    for share in (0.1, 0.3):
        experiment = Experiment(catalog(32, layered=layered, short=30), ReplayOptions(4.0, rtt, share))
        for link in worlds():
            run = experiment.play(link, 0.7, "oracle").run
            if run["feasible"]:
                assert run["met"]
                regrets.append(run["regret"])
    assert len(regrets) > 4
    assert sum(regrets) / len(regrets) < 0.0015
    # The rest is the last layer that did not fit: 0.0062 nats, of the heaviest group.
    assert max(regrets) < 0.007


def others(catalog):
    named = [name for name in policies() if name not in {"fixed", "oracle"}]
    return [*named, *(f"fixed:{track.name}" for track in catalog.tracks if track.refines is None)]


@pytest.mark.slow
@pytest.mark.parametrize("layered", [True, False])
def test_nobody_passes_it(layered):
    compared = 0
    for seed in range(12):
        offer = small.offer(4, seed, layered=layered)
        dice = random.Random(seed)
        rates = tuple(1e6 * dice.choice((0.01, 0.3, 1.0, 2.5)) for _ in range(20))
        link = Trace("steps", "test", tuple(step / 20 for step in range(20)), rates, 1.0)
        experiment = Experiment(offer, ReplayOptions(1.0, 0.02, dice.choice((0.12, 0.2, 0.35, 0.6))))
        best = experiment.play(link, 0.0, "oracle").run
        if not best["feasible"]:
            continue
        for name in others(offer):
            run = experiment.play(link, 0.0, name).run
            compared += 1
            assert best["regret"] <= run["regret"] + 1e-9, (seed, name)
    assert compared > 60


def test_with_an_engine_it_computes_the_prefix_that_there_is_time_for():
    cost = PrefillCost(0.0, 4.0 / (16 * 128))  # all of it takes twice the deadline
    run = Experiment(catalog(16), ReplayOptions(2.0, 0.02, 0.4, cost)).play(world("steady", [1e6]), 0.0, "oracle").run
    sources = [group["source"] for group in run["groups"]]
    assert sources == ["recomputed"] * 8 + ["fetched"] * 8
    assert run["met"]
    assert run["regret"] < 1e-3


def test_where_the_engine_computes_all_behind_a_cut_the_front_is_there_when_it_begins():
    cost = PrefillCost(0.0, 4.0 / (16 * 128))
    experiment = Experiment(catalog(16, layered=True), ReplayOptions(2.0, 0.02, 0.1, cost, "suffix"))
    outcome = experiment.play(world("steady", [1e6]), 0.0, "oracle", log=True)
    run = outcome.run
    sources = [group["source"] for group in run["groups"]]
    cut = sources.index("recomputed")
    assert 0 < cut < 16
    assert sources[cut:] == ["recomputed"] * (16 - cut)
    assert run["met"]
    (begun,) = [line.t for line in outcome.log if line.name == "recompute_start"]
    assert all(line.t <= begun for line in outcome.log if line.name == "decoded" and line.track == "base")
    alone = Experiment(catalog(16, layered=True), ReplayOptions(2.0, 0.02, 0.1))
    assert run["loss"] < alone.play(world("steady", [1e6]), 0.0, "oracle").run["loss"]


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_over_a_dead_link_it_computes_all_however_late(mode):
    cost = PrefillCost(0.0, 4.0 / (8 * 128))
    experiment = Experiment(catalog(8), ReplayOptions(2.0, 0.02, None, cost, mode))
    run = experiment.play(world("dead", [0.001, 0.0, 0.0, 0.0], 50.0), 0.0, "oracle").run
    assert run["tokens_recomputed"] == 8 * 128
    assert 4.0 <= run["ttft_s"] < 4.2
