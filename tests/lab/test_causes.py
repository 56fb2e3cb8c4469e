"""Causes add up to the regret, whatever happens, and each is found where it was put."""

from dataclasses import replace

import pytest

from kvabr.abr.plugins import policies
from kvabr.player.session_types import TIME_PRICE, PlayerConfig
from kvabr.replay.experiment import ReplayOptions
from kvabr.types.cost import PrefillCost
from kvabr.types.tails import TailLoss
from kvabr_lab.causes import CAUSES
from kvabr_lab.cell import CellPlayer
from tests.catalogs import catalog
from tests.replay.worlds import world, worlds

pytestmark = pytest.mark.slow

POLICIES = ["fixed:AC-5x", "fixed:FP16", *(name for name in policies() if name != "fixed")]
ENGINES = {"none": (None, "hole"), "hole": (PrefillCost(0.005, 1 / 800), "hole"),
           "suffix": (PrefillCost(0.0, 1 / 1500), "suffix")}  # fmt: skip
WORLDS = [trace.name for trace in worlds()]


def bench(
    cost=None, mode="hole", *, deadline=2.0, rtt=0.05, load=0.3, layered=True, time_price=TIME_PRICE, **catalog_options
):
    config = PlayerConfig(give_up_after=5.0, time_price=time_price)
    options = ReplayOptions(deadline, rtt, load, cost, mode, config=config)
    return CellPlayer(catalog(12, layered=layered, **catalog_options), options)


def play(on, policy, trace, start_s=0.0):
    return on.play(trace, on.link(trace, start_s), policy)[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trace", worlds(), ids=lambda trace: trace.name)
def test_causes_add_up_to_the_regret(trace, engine):
    cost, mode = ENGINES[engine]
    # Each trace, and each engine, meets both loads, caches in layers and without, and every second policy.
    place, world = list(ENGINES).index(engine), WORLDS.index(trace.name)
    layered, light = bool((place + world) % 2), (place + world // 2) % 2
    on = bench(cost, mode, load=0.1 if light else 0.6, layered=layered, short=40)
    for policy in POLICIES[(place // 2 + world) % 2 :: 2]:
        line = play(on, policy, trace, 0.3)
        if not line["feasible"]:
            assert line["causes"] is None
            assert line["regret"] is None
            continue
        assert set(line["causes"]) == set(CAUSES)
        assert sum(line["causes"].values()) == pytest.approx(line["regret"], rel=1e-4, abs=1e-6)
        assert abs(line["causes"]["residual"]) <= 1e-6
        if line["met"]:
            assert line["loss"] >= line["clairvoyant_loss"] - 1e-9, f"{policy} passes the bound"
            for cause in ("too_high", "too_low", "waited", "order", "idle", "wasted", "decode"):
                assert line["causes"][cause] >= -1e-9, (policy, cause)
        if cost is None:
            assert abs(line["causes"]["compute"]) < 1e-9


@pytest.mark.parametrize("trace", worlds()[:3], ids=lambda trace: trace.name)
@pytest.mark.parametrize("engine", ["none", "hole"])
def test_causes_add_up_with_a_question_behind_the_cache(trace, engine):
    """Whatever of the cache is left to its call; without a tail the question is one."""
    offer = catalog(12, layered=True)
    tails = (TailLoss(16, 0.5), TailLoss(128, 0.2), TailLoss(512, 0.06))
    offer = replace(offer, tracks=tuple(replace(track, tails=tails) for track in offer.tracks))
    cost = None if engine == "none" else PrefillCost(0.005, 1e-5)
    chosen = set()
    for load in (0.1, 0.6):
        config = PlayerConfig(give_up_after=5.0)
        on = CellPlayer(offer, ReplayOptions(2.0, 0.05, load, cost, "hole", config=config, question=20))
        for policy in ("fixed:AC-5x", "anytime"):
            line = play(on, policy, trace)
            chosen.add(line["tail_tokens"])
            if not line["feasible"]:
                continue
            assert line["network_loss"] >= line["clairvoyant_loss"] - 1e-9
            assert line["objective"] == pytest.approx(line["clairvoyant_objective"] + line["regret"], abs=1e-6)
            assert sum(line["causes"].values()) == pytest.approx(line["regret"], rel=1e-4, abs=1e-6)
            assert abs(line["causes"]["residual"]) <= 1e-6
    assert (max(chosen) > 0) == (cost is not None)


def main(line):
    return max(CAUSES, key=lambda cause: line["causes"][cause])


STEADY = world("steady", [1e6])


def test_too_low_is_found(tmp_path):
    path = tmp_path / "shy.py"
    path.write_text(
        "from kvabr.abr import Decision, Policy\n\n\nclass Shy(Policy):\n    def decide(self, view):\n"
        "        group = view.first_missing()\n        if group is None:\n"
        "            return Decision.finish('enough')\n"
        "        return Decision.fetch(group, 'base', 'I dare no more')\n"
    )
    line = play(bench(load=0.3), f"{path}:Shy", STEADY)
    assert line["met"]
    assert main(line) == "too_low"


def test_waiting_is_found():
    """The whole cache without loss comes in time, but not at such a price of time."""
    line = play(bench(load=2.0, time_price=1.0), "fixed:FP16", STEADY)
    assert line["met"]
    assert main(line) == "waited"
    assert main(play(bench(load=2.0, time_price=0.0), "fixed:FP16", STEADY)) != "waited"


def test_order_is_found():
    """What is not layers was chosen once and for all: the same bytes buy more in layers."""
    line = play(bench(load=0.3), "budget", STEADY)
    assert line["met"]
    assert main(line) == "order"


def test_idle_is_found(tmp_path):
    path = tmp_path / "single.py"
    path.write_text(
        "from kvabr.abr import Decision, Policy\n\n\nclass Single(Policy):\n    def decide(self, view):\n"
        "        if view.in_flight:\n            return Decision.wait('one at a time')\n"
        "        group = view.first_missing()\n        if group is None:\n"
        "            return Decision.finish('enough')\n"
        "        return Decision.fetch(group, 'AC-5x', 'next')\n"
    )
    slow = bench(load=0.6, rtt=0.15)
    line = play(slow, f"{path}:Single", world("steady", [1e6]))
    assert not line["met"]
    assert main(line) == "idle"
    assert play(bench(load=0.6, rtt=0.001), f"{path}:Single", STEADY)["causes"]["idle"] < 0.01


def test_wasted_is_found(tmp_path):
    """Fetching everything twice, cheap first, then dear: what was replaced is charged as waste."""
    path = tmp_path / "twice.py"
    path.write_text(
        "from kvabr.abr import Decision, Policy\n\n\nclass Twice(Policy):\n    def decide(self, view):\n"
        "        group = view.first_missing()\n        if group is not None:\n"
        "            return Decision.fetch(group, 'FP4', 'once')\n"
        "        for group in sorted(view.settled):\n            if view.track_of[group] == 'FP4':\n"
        "                return Decision.upgrade(group, 'AC-5x', 'twice')\n        return Decision.finish('done')\n"
    )
    line = play(bench(load=0.6, layered=False), f"{path}:Twice", STEADY)
    assert line["met"]
    assert line["bytes_wasted"] > 0.3 * line["bytes_fetched"]
    assert main(line) == "wasted"


def test_compute_is_found():
    """An engine that could have computed most of it, and a policy that never asks while the network makes it."""
    line = play(bench(PrefillCost(0.0, 1 / 700), load=0.1), "cheapfirst", STEADY)
    assert line["met"]
    assert main(line) == "compute"
    assert line["network_regret"] < line["regret"]
    assert line["network_loss"] > line["clairvoyant_loss"]


def test_a_play_that_was_given_up_has_one_cause():
    dies = world("dies", [3e6] + [0.0] * 400 + [1.0])
    line = play(bench(load=None, rtt=0.01), "fixed:FP16", dies)
    assert line["gave_up"]
    if line["feasible"]:
        assert main(line) == "gave_up"
        assert line["causes"]["gave_up"] == pytest.approx(line["regret"])
