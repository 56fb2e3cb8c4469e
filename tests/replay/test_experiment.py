"""Every policy over every kind of link, with every kind of engine: whole plays in the simulator."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr.plugins import policies
from kvabr.data import default_catalog, traces_folder
from kvabr.player.session_types import BlendGoal, PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import FIRST_BYTE_S, LOOKUP_ROUND_TRIPS, PAYLOAD_SHARE
from kvabr.replay.live_bound import Producer
from kvabr.replay.outcome import NO_CACHE_LOSS
from kvabr.replay.readers import find, read
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError, UsageError
from kvabr.types.tails import TailLoss
from tests.catalogs import catalog
from tests.examples import examples
from tests.replay.worlds import world, worlds

POLICIES = ["fixed:AC-5x", "fixed:FP16", *(name for name in policies() if name != "fixed")]
COST = PrefillCost(0.005, 1 / 1500)
ENGINES = {"none": (None, "hole"), "hole": (COST, "hole"), "suffix": (COST, "suffix")}
WORLDS = [trace.name for trace in worlds()]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trace", worlds(), ids=lambda trace: trace.name)
def test_every_play_ends_complete_or_says_why_and_never_beats_the_clairvoyant(trace, engine):
    cost, mode = ENGINES[engine]
    # Each trace, and each engine, meets caches in layers and without.
    offer = catalog(12, short=40, layered=bool((list(ENGINES).index(engine) + WORLDS.index(trace.name)) % 2))
    options = ReplayOptions(2.0, 0.05, 0.4, cost, mode, config=PlayerConfig(give_up_after=5.0))
    experiment = Experiment(offer, options)
    for policy in POLICIES:
        outcome = experiment.play(trace, 0.3, policy, log=True)
        run, record = outcome.run, outcome.record
        if record.gave_up is None:
            assert all(group["track"] is not None for group in run["groups"])
            assert run["met"] == (run["ttft_s"] <= 2.0)
            assert all(group["ready_s"] <= run["ttft_s"] for group in run["groups"])
            useful = sum(group["bytes"] for group in run["groups"])
            assert run["bytes_fetched"] == useful + run["bytes_wasted"]
        else:
            assert run["ttft_s"] is None
            assert cost is None or mode == "suffix" or "not in place" in record.gave_up
        if run["met"]:
            assert run["feasible"], policy
            recomputed = any(group["source"] == "recomputed" for group in run["groups"])
            assert recomputed or run["loss"] >= run["clairvoyant_loss"] - 1e-9
        if cost is None:
            assert record.tokens_recomputed == 0
        times = [line.t for line in outcome.log]
        assert times == sorted(times)
        assert all(line.reason for line in outcome.log if line.name == "decision")
        assert outcome.log[0].name == "start"
        assert outcome.log[-1].name == "deliver"


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    engine=st.sampled_from(sorted(ENGINES)),
    load=st.sampled_from([0.05, 0.2, 0.6, 2.0, 10.0]),
    time_price=st.sampled_from([0.0, 1e-3, 0.03, 1.0]),
    decoders=st.integers(1, 3),
    layered=st.booleans(),
    cold=st.booleans(),
    sources=st.integers(1, 2),
)
def test_no_play_costs_less_than_the_bound(seed, policy, engine, load, time_price, decoders, layered, cold, sources):
    dice = random.Random(seed)
    cold, step = cold and sources == 1, dice.choice([0.02, 0.2])
    link, *others = (
        world(f"random {n}", [dice.choice([0.0, 0.3, 1.0, 3.0]) + 0.01 for _ in range(40)], step)
        for n in range(sources)
    )
    cost, mode = ENGINES[engine]
    config = PlayerConfig(time_price=time_price, gpu_price=dice.choice([0.0, 1e-3, 0.1]), give_up_after=5.0)
    options = ReplayOptions(
        2.0, dice.choice([0.0, 0.02, 0.1]), load, cost, mode, decode_scale=dice.choice([0.0, 1.0, 20.0]),
        decoders=decoders, cold=cold, slow_start=not cold and dice.random() < 0.7, config=config, links=tuple(others),
    )  # fmt: skip
    run = Experiment(catalog(6, short=40, layered=layered), options).play(link, dice.uniform(0, 8), policy).run
    if run["feasible"]:
        assert run["regret"] >= -1e-6
        assert run["regret"] == pytest.approx(run["objective"] - run["clairvoyant_objective"], abs=1e-8)
    else:
        assert run["regret"] is run["clairvoyant_objective"] is None
        assert not run["met"]


def test_hole_plays_meet_the_deadline_where_the_network_alone_cannot():
    slow = world("steady", [1e6])
    alone = Experiment(catalog(12), ReplayOptions(2.0, 0.05, 0.12)).play(slow, 0.0, "cheapfirst")
    helped = Experiment(catalog(12), ReplayOptions(2.0, 0.05, 0.12, PrefillCost(0.0, 1 / 1000))).play(
        slow, 0.0, "cheapfirst"
    )
    assert not alone.run["met"]
    assert not alone.run["feasible"]
    assert helped.run["met"]
    assert helped.run["feasible"]
    assert 0 < helped.record.tokens_recomputed < 12 * 128


def test_a_policy_that_raises_fails_the_play_with_its_place(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "from kvabr.abr import Decision, Policy\n\n\nclass Bad(Policy):\n    def decide(self, view):\n"
        "        if view.now > 0.5:\n            return [][0]\n"
        "        return Decision.fetch(view.first_missing(), 'Int4', 'so far so good')\n"
    )
    with pytest.raises(PolicyError, match=r"Bad raised IndexError.*bad\.py, line 7"):
        Experiment(catalog(12), ReplayOptions(2.0, 0.02, 0.4)).play(world("steady", [1e6]), 0.0, f"{path}:Bad")


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_s": 0.0}, {"deadline_s": -1.0}, {"deadline_s": float("nan")}, {"scale_to_mean": 0.0},
        {"question": -1}, {"question": 1 << 30}, {"question": 20, "tail": -1},
        {"question": 20, "producer": Producer(1.0)}, {"rtt_s": -0.1}, {"decode_scale": float("nan")},
        {"decode_scale": -1.0}, {"decoders": 0}, {"decoders": 1 << 20},
        {"producer": Producer(1.0), "cost": COST}, {"producer": Producer(1.0), "cold": True},
        {"blend": BlendGoal(None, 20)}, {"blend": BlendGoal(None, 20), "cost": COST, "mode": "suffix"},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(UsageError):
        ReplayOptions(**({"deadline_s": 1.0} | options))


def test_a_trace_counts_whole_packets_of_which_a_share_is_payload():
    offer = catalog(12)
    run = (
        Experiment(offer, ReplayOptions(60.0, 0.05, slow_start=False))
        .play(world("steady", [1e6]), 0.0, "fixed:Int8")
        .run
    )
    size = offer.track("Int8").total_bytes
    assert run["ttft_s"] == pytest.approx(0.05 + FIRST_BYTE_S + size / (PAYLOAD_SHARE * 1e6), rel=0.02)


def test_what_the_lookup_brought_has_opened_the_window():
    """A catalog with more groups is longer, so the first round trip of its play carries more."""
    link = world("steady", [1e9])
    short, _, _ = Experiment(catalog(4), ReplayOptions(2.0, 0.1)).prepare(link, 0.0)
    long, _, _ = Experiment(catalog(64), ReplayOptions(2.0, 0.1)).prepare(link, 0.0)
    more = len(catalog(64).dumps()) - len(catalog(4).dumps())
    assert long.between(0.0, 0.2) - short.between(0.0, 0.2) == pytest.approx(more)


@pytest.mark.parametrize("policy", ["fixed:AC-5x", "cheapfirst"])
def test_a_cold_play_counts_the_lookup_and_begins_as_much_later_in_the_trace(policy):
    rtt, link = 0.1, world("walk", [1e6, 3e5, 2e6, 5e5] * 20)
    experiment = Experiment(catalog(12), ReplayOptions(2.0, rtt, cold=True))
    lookup = experiment.lookup_s(link, 0.5, rtt)
    assert lookup > LOOKUP_ROUND_TRIPS * rtt
    cold = experiment.play(link, 0.5, policy, log=True)
    warm = Experiment(catalog(12), ReplayOptions(2.0 - lookup, rtt)).play(link, 0.5 + lookup, policy)
    assert cold.run["ttft_s"] == pytest.approx(warm.run["ttft_s"] + lookup)
    assert cold.run["met"] == warm.run["met"]
    assert cold.run["loss"] == warm.run["loss"]
    assert cold.run["clairvoyant_loss"] == warm.run["clairvoyant_loss"]
    for one, other in zip(cold.run["groups"], warm.run["groups"], strict=True):
        assert one["ready_s"] == pytest.approx(other["ready_s"] + lookup)
    assert cold.log[-1].t == pytest.approx(cold.run["ttft_s"])
    assert cold.link[0][0] == pytest.approx(lookup)


def test_without_patience_a_late_play_is_cut_at_the_deadline_and_counts_as_no_cache():
    link = world("slow", [catalog(12).track("AC-5x").total_bytes / 3.0])
    late, cut = (
        Experiment(catalog(12), ReplayOptions(2.0, 0.05, config=PlayerConfig(give_up_after=patience))).play(
            link, 0.0, "fixed:AC-5x", log=True
        )
        for patience in (10.0, 1.0)
    )
    assert late.run["ttft_s"] > 3.0
    assert late.run["gave_up"] is None
    assert cut.run["ttft_s"] is None
    assert cut.run["gave_up"].endswith("of 12 groups are still not in place")
    assert cut.log[-1].t == 2.0
    assert not cut.run["met"]
    assert cut.run["loss"] == NO_CACHE_LOSS
    assert cut.run["objective"] == pytest.approx(NO_CACHE_LOSS + 0.5 + 2.0 * PlayerConfig().time_price)
    assert cut.run["track_tokens"]["none"] == 128 * len(cut.record.missing)
    cold = ReplayOptions(2.0, 0.2, cold=True, config=PlayerConfig(give_up_after=1.0))
    assert Experiment(catalog(12), cold).play(link, 0.0, "fixed:AC-5x", log=True).log[-1].t == pytest.approx(2.0)


def test_no_bound_is_above_a_play_without_a_cache():
    offer = catalog(4)
    worthless = replace(offer, tracks=tuple(replace(track, loss=(3.0,) * 4) for track in offer.tracks), mixes=())
    options = ReplayOptions(2.0, 0.05, config=PlayerConfig(give_up_after=1.0))
    run = Experiment(worthless, options).play(world("steady", [1e6]), 0.0, "fixed:AC-5x").run
    assert run["met"]
    assert run["clairvoyant_objective"] == pytest.approx(NO_CACHE_LOSS + 0.5 + 2.0 * PlayerConfig().time_price)


def test_a_lookup_longer_than_the_deadline_is_late_not_an_error():
    run = Experiment(catalog(4), ReplayOptions(0.5, 0.2, cold=True)).play(world("steady", [2e7]), 0.0, "cheapfirst").run
    assert run["gave_up"] is None
    assert not run["met"]
    assert run["ttft_s"] > LOOKUP_ROUND_TRIPS * 0.2


def test_a_guarded_player_ends_early_and_is_judged_by_the_whole_deadline():
    link = world("steady", [4e5])
    plain = Experiment(catalog(12), ReplayOptions(2.0, 0.05)).play(link, 0.0, "cheapfirst").run
    guarded = Experiment(catalog(12), ReplayOptions(2.0, 0.05, guard_s=0.2)).play(link, 0.0, "cheapfirst").run
    assert plain["ttft_s"] > 1.8 >= guarded["ttft_s"]
    assert guarded["deadline_s"] == 2.0
    assert guarded["met"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["anytime", "fixed:Int8"])
def test_every_trace_of_the_project_plays_at_a_hundred_times_the_cache(policy):
    experiment = Experiment(default_catalog(), ReplayOptions(4.0, rtt_s=0.02, scale_to_mean=100.0))
    traces = [trace for path in find([traces_folder()]) for trace in read(path)]
    assert max(max(trace.rates) for trace in traces) > 3e9  # a port of 25 Gbit/s is among them
    for trace in traces:
        capacity, rtt_s, bound = experiment.prepare(trace, trace.duration_s / 3)
        assert experiment.played(trace).mean_rate == pytest.approx(100 * default_catalog().fp16_bytes / 4.0)
        assert bound.feasible
        assert experiment.play_on(trace, trace.duration_s / 3, policy, capacity, rtt_s, bound, log=False).run["met"]


def _tailed(groups: int = 12):
    offer = catalog(groups, short=40, layered=True)
    tails = (TailLoss(16, 0.5), TailLoss(128, 0.2), TailLoss(512, 0.06))
    return replace(offer, tracks=tuple(replace(track, tails=tails) for track in offer.tracks))


@pytest.mark.parametrize("load", [0.05, 0.3, 3.0])
@pytest.mark.parametrize("policy", ["anytime", "fixed:Int4", "oracle"])
def test_the_end_of_a_cache_is_computed_with_the_question(policy, load):
    options = ReplayOptions(2.0, 0.05, load, PrefillCost(0.02, 1e-5), question=20)
    link = world("steady", [1e6])
    with_tail, without = (
        Experiment(_tailed(), each).play(link, 0.0, policy).run for each in (options, replace(options, tail=0))
    )
    assert without["tail_tokens"] == 0
    if policy == "anytime":  # it has everything computed in one call instead
        assert with_tail["objective"] == without["objective"]
        return
    assert 0 < with_tail["tail_tokens"] <= 512
    assert with_tail["tail_s"] == pytest.approx(1e-5 * with_tail["tail_tokens"])
    assert with_tail["recompute_s"] >= with_tail["tail_s"]
    fetched = [
        group["ready_s"] for group in with_tail["groups"][: 12 - math.ceil((with_tail["tail_tokens"] - 88) / 128) - 1]
    ]
    assert with_tail["ttft_s"] > with_tail["tail_s"] - 1e-6 + max(fetched)
    assert [group["group"] for group in with_tail["groups"]] == list(range(12))
    assert with_tail["groups"][-1]["source"] == "recomputed"
    assert with_tail["objective"] <= without["objective"] + 1e-3
    for run in (with_tail, without):
        assert run["met"]
        assert run["regret"] >= -1e-9
    # The clairvoyant chooses its own tail.
    assert with_tail["clairvoyant_objective"] <= without["clairvoyant_objective"] + 1e-9


def test_groups_that_questions_are_about_are_the_first_to_become_better():
    options, link = ReplayOptions(2.0, 0.05, 0.08, None, question=20), world("steady", [1e6])
    asked = tuple(1.0 if group in (3, 7) else 0.02 for group in range(12))
    for shares, better in ((asked, {3, 7}), ((), {0, 2})):
        played = Experiment(replace(_tailed(), asked=shares), options).play(link, 0.0, "anytime").run["groups"]
        assert {group["group"] for group in played if group["track"] != "base"} == better
