"""Live replays, whole: three processes, real QUIC, real decoding, short traces."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from kvabr.cli.main import main
from kvabr.player.session_types import PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.run import Matrix
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError, TransportError
from kvabr_lab.live.experiment import LiveExperiment, LiveOptions
from kvabr_lab.live.origin import LiveOrigin
from kvabr_lab.live.run import replay_live
from kvabr_lab.live.shaper import Shaper
from tests.client.classes import SLIDING, published
from tests.lab.live.links import trace
from tests.processes import LIMIT_S, gone, workers_of
from tests.toymodel import toy_asset

pytestmark = pytest.mark.process

RATE = 400e3
"""Bytes per second: any machine can fill it."""
TRACKS = ("FP16", "Int4")


@pytest.fixture(scope="module")
def asset(tmp_path_factory):
    """25 groups: 205 kB on FP16, 55 kB on Int4."""
    return toy_asset(tmp_path_factory.mktemp("live") / "asset", TRACKS, tokens=400)


@pytest.fixture(scope="module")
def origin(asset):
    with LiveOrigin(asset.store.where(asset.prompt_digest), "aioquic") as process:
        yield process


@pytest.fixture(scope="module")
def shaper(origin):
    with Shaper(origin.address) as process:
        yield process


def alike(run, simulated):
    """A busy machine, or a lost packet, makes a play late."""
    return run["ttft_s"] >= 0.75 * simulated["ttft_s"]


@pytest.fixture
def play(asset, origin, shaper):
    """Play once: ``play(trace, policy, live options, replay options)``; the outcome, and the simulated one."""

    async def run(link, policy="fixed:Int4", live=None, **options):
        experiment = Experiment(asset.catalog, ReplayOptions(**{"deadline_s": 60.0, "rtt_s": 0.02, **options}))
        outcome = await LiveExperiment(experiment, asset, origin, shaper, live or LiveOptions()).play(
            link, 0.0, policy, log=True
        )
        return outcome, experiment.play(link, 0.0, policy).run

    return run


async def test_a_play_on_a_steady_link_takes_what_the_simulator_says(play, asset):
    outcome, simulated = await play(trace([RATE]), "fixed:FP16")
    run, seen = outcome.run, outcome.run["transport"]
    assert run["track_tokens"] == {"FP16": 400}
    assert run["bytes_fetched"] == asset.catalog.track("FP16").total_bytes
    assert run["ttft_s"] >= 0.02 + run["bytes_fetched"] / RATE, "never faster than the link"
    if seen["limit"] == "network":
        assert alike(run, simulated)
    assert run["live"] is True
    assert run["lookup_s"] == 0
    assert seen["backend"] == "aioquic"
    assert seen["protocol"] == "moqt-22"
    assert seen["rtt_s"] >= 0.02
    assert seen["wire_bytes"] >= run["bytes_fetched"]
    assert seen["lost"] == seen["lost_up"] == 0
    kinds = {line.name for line in outcome.log}
    assert {"start", "decision", "request", "first_byte", "done", "decoded", "deliver"} <= kinds
    assert outcome.link


@pytest.mark.parametrize("loss", [0.01, 0.05])
async def test_losses_cost_time_and_nothing_else(play, loss):
    outcome, _ = await play(trace([RATE]), "fixed:FP16", LiveOptions(loss=loss, seed=3))
    run = outcome.run
    assert run["gave_up"] is None
    assert run["track_tokens"] == {"FP16": 400}
    assert run["transport"]["lost"] > 0
    assert run["transport"]["lost"] < 10 * loss * run["transport"]["packets"]


async def test_a_cold_play_counts_the_handshake_and_the_catalog(play):
    outcome, simulated = await play(trace([RATE]), live=LiveOptions(cold=True), cold=True, rtt_s=0.1)
    run = outcome.run
    assert run["lookup_s"] >= 0.2
    assert min(group["requested_s"] for group in run["groups"]) >= run["lookup_s"]
    assert run["ttft_s"] == max(group["ready_s"] for group in run["groups"])
    assert outcome.log[-1].t == pytest.approx(run["ttft_s"])
    if run["transport"]["limit"] == "network":
        assert alike(run, simulated)


def test_the_command_plays_compares_and_reports(asset, tmp_path, capsys):
    (tmp_path / "t.csv").write_text("time_s,bits_per_second\n0,1600000\n5,0\n")
    before = children()
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "jsonl", "pf")}
    status = main(
        [
            "replay", str(tmp_path / "t.csv"), "--asset", asset.store.where(asset.prompt_digest), "--live",
            "--deadline", "60", "--rtt", "20", "--policy", "fixed:Int4", "cheapfirst",
            "--json", str(files["json"]), "--html", str(files["html"]), "--log", str(files["jsonl"]),
            "--perfetto", str(files["pf"]),
        ]
    )  # fmt: skip
    assert status == 0
    assert children() == before
    printed = capsys.readouterr().out
    assert "against live" in printed
    result = json.loads(files["json"].read_text())
    assert result["schema"] == "kvabr.replay/1"
    assert [run["live"] for run in result["runs"]] == [True, True]
    assert result["options"]["live"]["quic"] == "aioquic"
    compared = result["live_comparison"]
    assert compared["all"]["plays"] == 2
    assert set(compared["policies"]) == {"fixed:Int4", "cheapfirst"}
    assert compared["plays"][0]["track_agreement"] == 1.0
    for play, run in zip(compared["plays"], result["runs"], strict=True):
        assert play["ttft_live_s"] == run["ttft_s"]
        assert play["ttft_error"] == pytest.approx(play["ttft_simulated_s"] / play["ttft_live_s"] - 1, abs=1e-4)
    assert all(path.stat().st_size for path in files.values())


def children():
    return {child.pid for child in multiprocessing.active_children()}


def matrix(asset, link, policy, **options):
    return Matrix(asset.catalog, (link,), (policy,), ReplayOptions(**{"deadline_s": 1.0, "rtt_s": 0.02, **options}))


def test_an_error_leaves_no_process_behind(asset, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from kvabr.abr import Decision, Policy\n"
        "class Mine(Policy):\n"
        "    def decide(self, view):\n"
        "        if view.now > 0.05: raise RuntimeError('enough')\n"
        "        return Decision.fetch(view.first_missing(), 'FP16', 'test')\n"
    )
    before = children()
    with pytest.raises(PolicyError, match="enough"):
        asyncio.run(replay_live(matrix(asset, trace([RATE]), f"{tmp_path}/mine.py:Mine"), asset, LiveOptions()))
    assert children() == before


async def test_an_origin_that_is_killed_ends_the_replay(asset, shaper):
    with LiveOrigin(asset.store.where(asset.prompt_digest), "aioquic") as origin, Shaper(origin.address) as link:
        for deadline_s in (0.5, 5.0, 50.0):  # on a loaded machine a play may be over before it is seen to have begun
            options = ReplayOptions(deadline_s, rtt_s=0.02, config=PlayerConfig(give_up_after=2.0))
            live = LiveExperiment(Experiment(asset.catalog, options), asset, origin, link, LiveOptions())
            playing = asyncio.create_task(live.play(trace([20e3]), 0.0, "fixed:FP16", log=False))
            while not (link.stats().most_queued_bytes or playing.done()):  # noqa: ASYNC110  # until it has begun
                await asyncio.sleep(0)
            if not playing.done():
                break
        os.kill(origin.pid, signal.SIGKILL)
        with pytest.raises(TransportError, match="has exited"):
            await asyncio.wait_for(playing, LIMIT_S)


def test_ctrl_c_ends_all_processes(asset, tmp_path):
    (tmp_path / "t.csv").write_text("time_s,bits_per_second\n0,8000\n60,0\n")
    command = [
        sys.executable,
        "-m",
        "kvabr",
        "replay",
        str(tmp_path / "t.csv"),
        "--asset",
        asset.store.where(asset.prompt_digest),
        "--live",
    ]
    with subprocess.Popen(  # noqa: S603
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        children = workers_of(parent.pid, 2)
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: everyone gets it
        _, said = parent.communicate(timeout=LIMIT_S)
    assert parent.returncode == 130
    assert "Traceback" not in said
    assert all(gone(child) for child in children)


@pytest.mark.parametrize("recompute", [False, True])
def test_several_layer_classes_are_played_live_and_simulated(tmp_path, recompute):
    """Slower than the engine, the link brings nothing in time: the stand-in computes everything."""
    asset = published(tmp_path, SLIDING, list(range(150))).assets[0]
    cost = PrefillCost.from_rate(300.0) if recompute else None
    play = asset.catalog.to_play
    rate = play.track("FP16").total_bytes / 60.0 if recompute else RATE
    options = ReplayOptions(2.0 if recompute else 60.0, rtt_s=0.02, cost=cost)
    link = Matrix(asset.catalog, (trace([rate]),), ("fixed:FP16",), options)
    report = asyncio.run(replay_live(link, asset, LiveOptions(warm=not recompute)))
    (run,) = report.result["runs"]
    assert [group["unit"] for group in run["groups"]] == list(play.titles)
    assert run["tokens_recomputed"] == (150 if recompute else 0)
    compared = report.result["live_comparison"]["all"]
    assert compared["plays"] == compared["compared"] == 1
    if not recompute:
        assert run["bytes_fetched"] == play.track("FP16").total_bytes
        assert compared["track_agreement"] == 1.0
