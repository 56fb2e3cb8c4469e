"""Prompts of passages in the simulator: whole plays, their bound, and what reports say of them."""

import json
import math
from dataclasses import replace

import pytest

from kvabr.cli.main import main
from kvabr.player.blend_plan import BlendPlan
from kvabr.player.session_types import BlendGoal, PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.passages import prompt_of
from kvabr.replay.report.timeline import computations
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.events import TokensDone, TokensStarted
from kvabr.types.joined import fusion_loss, joined_passages
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import PassageNotes
from kvabr_lab.matrix import build
from tests import assets
from tests.catalogs import catalog
from tests.replay.worlds import world, worlds

FUSION = ((0.0, 0.08), (0.05, 0.05), (0.15, 0.03), (0.3, 0.02))
COST = PrefillCost(0.005, 1 / 1500)
DEAR = PlayerConfig(gpu_price=0.5, give_up_after=5.0)
"""Too dear to compute passages, and not some of their tokens."""


def passage(number, groups, *, fusion=FUSION, layered=True, ordered=False):
    made = catalog(groups, short=40, layered=layered)
    chunks = tuple(f"{number:02d}{index:062x}" for index in range(groups))
    name = TrackNamespace(made.namespace.model, chunks[-1])
    order = bytes(token % 251 for token in range(made.tokens)) if ordered else b""
    return replace(made, namespace=name, chunks=chunks, passage=PassageNotes("mean", 4, order, fusion))


def joined(**how):
    return prompt_of([passage(1, 4, **how), passage(2, 3, **how), passage(3, 4, **how)], 30)


@pytest.mark.parametrize("policy", ["anytime", "cachegen", "oracle"])
@pytest.mark.parametrize("goal", [BlendGoal(None, 20), BlendGoal(0.15, 20), BlendGoal(0.0)], ids=["any", "15 %", "0"])
@pytest.mark.parametrize("trace", worlds(), ids=lambda trace: trace.name)
def test_no_play_beats_the_clairvoyant_and_every_play_says_what_it_computed(trace, goal, policy):
    if policy == "oracle":
        policy = "anytime"
        options = ReplayOptions(6.0, 0.05, 0.2, COST, config=DEAR, blend=goal)
    else:
        options = ReplayOptions(2.0, 0.05, 0.4, COST, config=DEAR, blend=goal)
    experiment = Experiment(joined(), options)
    outcome = experiment.play(trace, 0.3, policy, log=True)
    run, blend = outcome.run, outcome.record.blend
    if run["feasible"]:
        assert run["regret"] >= -1e-9
    if outcome.record.gave_up is not None:
        return
    assert run["share"] == blend.share
    assert run["met"] == (run["ttft_s"] <= options.deadline_s)
    coverage = [group["track"] for group in run["groups"]]
    assert run["fusion_loss"] == pytest.approx(fusion_loss(experiment.catalog, coverage, blend.share))
    assert run["loss"] >= run["fusion_loss"] - 1e-9
    started = [event for event in outcome.log if isinstance(event, TokensStarted)]
    assert len(started) == (blend.tokens > 0) == sum(isinstance(event, TokensDone) for event in outcome.log)
    if goal.share == 0.0:
        assert not blend.tokens
        return
    if blend.tokens:
        spans = [run for run in computations(outcome.log) if run.tokens]
        assert [run.tokens for run in spans] == [blend.tokens]
        seconds = COST.seconds(experiment.catalog.tokens - blend.tokens, blend.tokens)
        assert spans[0].end_s - spans[0].start_s >= seconds - 1e-9


def test_an_idle_engine_computes_tokens_ahead_on_a_slow_link():
    cost, config = PrefillCost(0.0, 1 / 1500), PlayerConfig(gpu_price=0.43)
    prompt = joined(ordered=True, fusion=((0.0, 0.08), (0.15, 0.01)))
    for rate in (2e4, 4e4):
        options = ReplayOptions(12.0, 0.02, None, cost, config=config, blend=BlendGoal(0.15, 20))
        played = Experiment(prompt, options).play(world("steady", [rate]), 0.0, "anytime", log=True)
        blend = played.record.blend
        assert blend.ahead > 0
        assert played.record.tokens_recomputed >= blend.ahead + blend.tokens
        assert sum(run.tokens for run in computations(played.log)) == blend.ahead + blend.tokens
        assert played.run["regret"] >= 0


def test_passages_that_a_player_would_not_join_are_computed():
    told = []
    catalogs = [passage(1, 4), passage(2, 3, fusion=()), passage(3, 4)]
    prompt = prompt_of(catalogs, 30, refused=lambda number, reason: told.append((number, reason)))
    assert [(number, "not measured" in reason) for number, reason in told] == [(1, True)]
    assert len(joined_passages(prompt)) == 2
    assert prompt.tokens == prompt_of(catalogs, 30, math.inf).tokens
    played = Experiment(prompt, ReplayOptions(2.0, 0.02, None, COST, blend=BlendGoal(None, 20))).play(
        world("steady", [1e6]), 0.0, "anytime"
    )
    assert [group.track for group in played.record.groups].count("recomputed") >= 2
    with pytest.raises(UsageError, match="none of these passages can be joined: the loss of joining it"):
        prompt_of([passage(1, 3, fusion=())], 30)


@pytest.mark.parametrize(("deadline_s", "met"), [(5.0, True), (0.5, False)])
def test_a_prompt_that_would_lose_too_much_is_computed(deadline_s, met):
    prompt = joined()
    options = ReplayOptions(deadline_s, 0.02, None, COST, blend=BlendGoal(None, 20, 0.0))
    played = Experiment(prompt, options).play(world("steady", [1e6]), 0.0, "anytime")
    assert (played.run["gave_up"], played.run["loss"], played.run["met"]) == (None, 0.0, met)
    assert played.run["ttft_s"] == pytest.approx(COST.seconds(0, prompt.tokens), abs=1e-6)
    assert played.run["tokens_recomputed"] == prompt.tokens
    assert played.run["regret"] >= -1e-9 or not played.run["feasible"]


def test_computed_tokens_lose_nothing():
    # At a share of 1 nothing of the codec and nothing of the joining is left.
    options = ReplayOptions(20.0, 0.02, None, COST, config=DEAR, blend=BlendGoal(1.0, 20))
    played = Experiment(joined(), options).play(world("steady", [1e6]), 0.0, "anytime")
    assert (played.run["share"], played.run["loss"]) == (1.0, 0.0)


def test_a_publisher_cannot_make_a_play_weigh_thousands_of_shares():
    many = [
        passage(number, 2, fusion=tuple(((64 * number + step) / 4096, 0.5) for step in range(64)))
        for number in range(40)
    ]
    prompt = prompt_of(many, 30)
    for goal in (BlendGoal(None, 20), BlendGoal(0.9, 20)):
        ladder = Experiment(prompt, ReplayOptions(2.0, cost=COST, config=DEAR, blend=goal)).ladder
        plan = BlendPlan(ladder, COST, goal, time_price=0.0, gpu_price=0.0)
        shares = [option.share for option in plan.options]
        assert len(shares) <= 65
        assert shares == sorted(set(shares))
        assert shares[-1] == goal.share or shares[-1] == 2559 / 4096


@pytest.mark.parametrize(("rate", "deadline_s"), [(1e5, 0.8), (2e5, 0.6), (4e5, 0.6)])
def test_groups_that_are_computed_too_late_are_not_taken_for_exact(rate, deadline_s):
    options = ReplayOptions(deadline_s, 0.02, None, COST, config=PlayerConfig(gpu_price=0.2), blend=BlendGoal(None, 20))
    record = Experiment(joined(), options).play(world("steady", [rate]), 0.0, "anytime").record
    assert record.blend.tokens
    assert all(group.ready_s <= record.blend.begun_s for group in record.groups)
    assert record.recompute_s <= record.delivered_s


def test_what_is_no_prompt_of_passages_is_refused():
    other = passage(2, 3)
    foreign = replace(other, spec=replace(other.spec, model="another"))
    for catalogs, exact in (([passage(1, 3), catalog(4)], 30), ([passage(1, 3)], 0), ([passage(1, 3), foreign], 30)):
        with pytest.raises(UsageError):
            prompt_of(catalogs, exact)


@pytest.fixture
def passages(tmp_path):
    folder = tmp_path / "passages"
    for number in range(3):
        ids = range(100 * number, 100 * number + 30)
        assets.make_asset(folder / f"p{number}", ids, passage=PassageNotes("mean", 4, b"", FUSION))
    return folder


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "link.csv"
    path.write_text("t_s,mbps\n" + "".join(f"{second},{8 + second % 5}\n" for second in range(30)))
    return path


def test_the_command_replays_a_prompt_of_passages(passages, trace, tmp_path, capsys):
    report, page, slices = tmp_path / "report.json", tmp_path / "page.html", tmp_path / "slices.json"
    names = [str(each) for each in sorted(passages.iterdir())]
    how = ["replay", str(trace), "--passages", *names, "--prefill-rate", "50", "--jobs", "1"]
    assert main([*how, "--share", "0.15", "--json", str(report), "--html", str(page), "--perfetto", str(slices)]) == 0
    run = json.loads(report.read_text())["runs"][0]
    assert run["share"] == 0.15
    shown = [each for each in json.loads(slices.read_text())["traceEvents"] if "tokens again" in each["name"]]
    assert [each["args"]["tokens"] for each in shown] == [14]  # of 90
    assert "tokens of passages, computed again" in page.read_text()
    for wrong, words in (
        ([*how, "--asset", names[0]], "cannot be combined with --asset"),
        ([*how, "--exact", "0"], "at least 1"),
        ([*how, "--share", "2"], "0 to 1"),
        ([*how, "--recompute-mode", "suffix"], "mode 'hole'"),
        ([*how[:-4], "--no-recompute"], "needs an engine"),
        ([*how, "--live"], "--passages cannot be used with --live"),
        (["replay", str(trace), "--share", "0.1"], "--passages"),
    ):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err
    unknown = tmp_path / "unknown"
    assets.make_asset(unknown, range(900, 930), passage=PassageNotes("mean", 4))
    assert main([*how[:3], str(unknown), *how[3:]]) == 0
    assert "unknown is computed: the loss of joining it was not measured" in capsys.readouterr().err


def test_the_laboratory_plays_a_folder_of_passages(passages, trace, tmp_path):
    out = tmp_path / "lab"
    how = ["lab", str(trace), "--asset", str(passages), "--engine", "2x", "--policy", "anytime", "--load", "0.3", "1"]
    assert main([*how, "--out", str(out), "--jobs", "1"]) == 0
    assert main([*how, "--out", str(out), "--jobs", "1"]) == 0
    with pytest.raises(UsageError, match="engine 'asset'"):  # which is the default, and was not measured here
        build({"traces": [str(trace)], "assets": [str(passages)]})
