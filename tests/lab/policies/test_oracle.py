"""The plan of the one who knows the link: how near it comes to the bound, and that no policy beats it."""

import random

import pytest

from kvabr.abr.plugins import policies
from kvabr.player.session_types import PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError
from tests.abr.plain import steady
from tests.catalogs import catalog
from tests.lab import small
from tests.replay.worlds import world, worlds

TIME_PRICES = (0.0, 1e-3)


def experiment(offer, deadline_s, rtt_s, load, cost=None, mode="hole", *, time_price=1e-3, decoders=1):
    options = ReplayOptions(
        deadline_s, rtt_s, load, cost, mode, decoders=decoders, config=PlayerConfig(time_price=time_price)
    )
    return Experiment(offer, options)


def test_it_runs_only_where_the_future_is_known():
    with pytest.raises(PolicyError, match="it runs only in a simulation"):
        steady("oracle", catalog(4), 1e6)


@pytest.mark.parametrize("time_price", TIME_PRICES)
@pytest.mark.parametrize("layered", [True, False])
def test_its_regret_is_about_zero(layered, time_price):
    regrets, rtt = [], 0.01 if layered == (time_price > 0) else 0.1
    for load in (0.1, 0.3, 3.0):
        chosen = experiment(catalog(32, layered=layered, short=30), 4.0, rtt, load, time_price=time_price)
        for link in worlds():
            run = chosen.play(link, 0.7, "oracle").run
            if run["feasible"]:
                assert run["met"]
                regrets.append(run["regret"])
    assert len(regrets) > 6
    assert sum(regrets) / len(regrets) < 0.0015
    # The rest is the last layer that did not fit: 0.0062 nats, of the heaviest group.
    assert max(regrets) < 0.007


def others(catalog):
    named = [name for name in policies() if name not in {"fixed", "oracle"}]
    return [*named, *(f"fixed:{track.name}" for track in catalog.tracks if track.refines is None)]


@pytest.mark.slow
@pytest.mark.parametrize("time_price", TIME_PRICES)
@pytest.mark.parametrize("layered", [True, False])
def test_nobody_passes_it(layered, time_price):
    compared = 0
    for seed in range(6):
        offer = small.offer(4, seed, layered=layered)
        dice = random.Random(seed)
        rates = tuple(1e6 * dice.choice((0.01, 0.3, 1.0, 2.5)) for _ in range(20))
        link = Trace("steps", "test", tuple(step / 20 for step in range(20)), rates, 1.0)
        chosen = experiment(offer, 1.0, 0.02, dice.choice((0.12, 0.2, 0.35, 0.6)), time_price=time_price)
        best = chosen.play(link, 0.0, "oracle").run
        if not best["feasible"]:
            continue
        for name in others(offer):
            run = chosen.play(link, 0.0, name).run
            compared += 1
            # Another order of the requests may end a few milliseconds sooner.
            assert best["regret"] <= run["regret"] + 0.005 * time_price + 1e-9, (seed, name)
    assert compared > 30


def test_where_the_engine_computes_all_behind_a_cut_the_front_is_there_when_it_begins():
    cost = PrefillCost(0.0, 4.0 / (16 * 128))
    offer = catalog(16, layered=True)
    outcome = experiment(offer, 2.0, 0.02, 0.1, cost, "suffix").play(world("steady", [1e6]), 0.0, "oracle", log=True)
    run = outcome.run
    sources = [group["source"] for group in run["groups"]]
    cut = sources.index("recomputed")
    assert 0 < cut < 16
    assert sources[cut:] == ["recomputed"] * (16 - cut)
    assert run["met"]
    (begun,) = [line.t for line in outcome.log if line.name == "recompute_start"]
    assert all(line.t <= begun for line in outcome.log if line.name == "decoded" and line.track == "base")
    assert (
        run["objective"]
        < experiment(offer, 2.0, 0.02, 0.1).play(world("steady", [1e6]), 0.0, "oracle").run["objective"]
    )


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_over_a_dead_link_it_computes_all_however_late(mode):
    cost = PrefillCost(0.0, 4.0 / (8 * 128))
    chosen = experiment(catalog(8), 2.0, 0.02, None, cost, mode)
    run = chosen.play(world("dead", [0.001, 0.0, 0.0, 0.0], 50.0), 0.0, "oracle").run
    assert run["tokens_recomputed"] == 8 * 128
    assert 4.0 <= run["ttft_s"] < 4.2
