"""Replays of a cache that is being prefilled, and their bound: against linear programs, schedules, and the policies."""

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from kvabr.abr.ladder import every_option, stack
from kvabr.abr.plugins import policies
from kvabr.cli.main import main
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.live_bound import LiveClairvoyant, Producer
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from tests.catalogs import catalog
from tests.replay.worlds import world, worlds


def least_loss(offer, room):
    """The linear program: shares of every option of every group, within nested capacities."""
    hulls = every_option(offer)
    columns = [(group, option) for group, hull in enumerate(hulls) for option in hull]
    loss = [option.loss for _, option in columns]
    nested = [[option.bytes * (group >= first) for group, option in columns] for first in range(offer.groups)]
    one = [[float(group == wanted) for group, _ in columns] for wanted in range(offer.groups)]
    found = linprog(loss, A_ub=nested, b_ub=room, A_eq=one, b_eq=[1.0] * offer.groups, bounds=(0, 1))
    return found.fun if found.success else math.inf


@pytest.mark.parametrize("seed", range(12))
def test_the_greedy_walk_solves_the_linear_program(seed):
    dice = random.Random(seed)
    offer = catalog(dice.randint(1, 6), layered=True, decode=0.0, short=dice.choice([0, 40]))
    link = Capacity(world("any", [dice.uniform(1e4, 4e5) for _ in range(8)]), slow_start=False)
    begins = sorted(dice.uniform(0.0, 2.0) for _ in range(offer.groups))
    end_s = begins[-1] + dice.uniform(0.05, 3.0)
    room = [link.between(begin_s, end_s) for begin_s in begins]
    found = LiveClairvoyant(offer).loss_at(link, begins, end_s)
    wanted = least_loss(offer, room)
    assert found == (wanted if wanted == math.inf else pytest.approx(wanted, rel=1e-6, abs=1e-12))


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_is_below_the_bound(seed):
    dice = random.Random(seed)
    offer = catalog(3, layered=True, decode=0.0)
    link = Capacity(world("any", [dice.uniform(1e4, 3e5) for _ in range(8)]), slow_start=False)
    begins = sorted(dice.uniform(0.0, 1.5) for _ in range(3))
    price, deadline_s = 1e-2, 4.0
    bound = LiveClairvoyant(offer).best(link, begins, deadline_s, time_price=price)
    best = math.inf
    for choice in itertools.product(offer.tracks, repeat=3):
        now = loss = 0.0
        # With one end for all, what exists first may as well go first.
        for group, track in enumerate(choice):
            nbytes = sum(layer.bytes[group] for layer in stack(offer, track))
            now = link.when(max(now, begins[group]), nbytes)
            loss += track.loss[group]
        if now <= deadline_s:
            best = min(best, loss + price * now)
    assert best < math.inf
    assert bound.feasible
    assert bound.objective <= best + 1e-9
    assert bound.objective >= 0.5 * best


def test_the_command_replays_a_cache_that_is_being_prefilled(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["replay", "traces/lte-train.csv", "--producer", "2", "--deadline", "3", "--json", str(report)]) == 0
    result = json.loads(report.read_text())
    assert result["options"]["producer"] == {"seconds": 2.0, "begins_s": 0.0, "surprise": 1.0}
    assert result["runs"][0]["ttft_s"] >= 2.0
    assert capsys.readouterr().out


def experiment(**options):
    given = {"deadline_s": 4.0, "rtt_s": 0.02, "producer": Producer(2.0), **options}
    return Experiment(catalog(8, layered=True), ReplayOptions(**given))


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("surprise", [0.5, 1.4])
def test_every_policy_plays_a_growing_cache_and_none_beats_the_bound(policy, surprise):
    policy = "fixed:Int4" if policy == "fixed" else policy
    made = experiment(producer=Producer(2.0, surprise=surprise), slow_start=False)
    published = made.options.producer.published_s(made.catalog)
    for trace in worlds():
        outcome = made.play(trace, 0.0, policy, log=True)
        run = outcome.run
        for group in run["groups"]:
            if group["requested_s"] is not None:
                assert group["requested_s"] >= published[group["group"]]
        if run["feasible"]:
            assert run["regret"] >= -1e-9, trace.name
        if run["ttft_s"] is not None:
            assert run["ttft_s"] >= published[-1]
            assert not outcome.record.missing


def test_anytime_uses_the_time_in_which_the_producer_works():
    made = experiment(deadline_s=8.0, producer=Producer(4.0))
    steady = world("steady", [2e5])
    anytime, base = (made.play(steady, 0.0, policy).run for policy in ("anytime", "fixed:base"))
    assert anytime["met"]
    assert anytime["ttft_s"] < base["ttft_s"] + 0.5
    assert anytime["loss"] < 0.2 * base["loss"]


def test_the_pace_is_that_of_the_prefill_and_the_time_is_kept():
    offer = catalog(4)
    assert Producer(2.0).published_s(offer) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert Producer(2.0, begins_s=-1.0, surprise=2.0).published_s(offer) == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert Producer(2.0, surprise=2.0).expected_s(offer) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    quadratic = replace(offer, prefill=PrefillCost(0.0, 0.0, 1.0))
    assert np.diff(Producer(2.0).published_s(quadratic)).tolist() == pytest.approx([0.375, 0.625, 0.875])


@pytest.mark.parametrize("values", [(0.0,), (-1.0,), (math.inf,), (1.0, math.nan), (1.0, 0.0, 0.0)])
def test_a_producer_that_cannot_be_is_refused(values):
    with pytest.raises(UsageError):
        Producer(*values)
