import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from kvabr.replay.experiment import ReplayOptions
from kvabr.replay.run import Matrix, replay
from kvabr.replay.summary import percentile, summarise, wilson
from kvabr.replay.workers import in_processes, named_play
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PlayError, PolicyError, UsageError
from tests.catalogs import catalog
from tests.lab.matrices import tuned
from tests.processes import LIMIT_S, gone
from tests.replay.worlds import worlds


def matrix(**changes):
    fields = {
        "catalog": catalog(8),
        "traces": tuple(worlds()[:3]),
        "policies": ("fixed:AC-5x", "cheapfirst"),
        "options": ReplayOptions(1.0, 0.03, 0.4, PrefillCost(0.0, 1e-3)),
        "starts": 3,
        "seed": 4,
    }
    return Matrix(**(fields | changes))


def test_the_same_seed_gives_the_same_bytes_on_any_number_of_processes():
    texts = {json.dumps(replay(matrix(), jobs=jobs).result) for jobs in (1, 1, 2)}
    assert len(texts) == 1
    assert json.dumps(replay(matrix(seed=5), jobs=1).result) not in texts


def test_the_report_keeps_its_schema():
    told = []
    report = replay(matrix(timelines=3), jobs=1, on_progress=told.append)
    result = report.result
    assert result["schema"] == "kvabr.replay/1"
    assert sum(told) == len(result["runs"]) == 3 * 3 * 2 == len(report.steps)
    assert set(result["runs"][0]) >= {
        "trace", "start_s", "policy", "deadline_s", "ttft_s", "met", "loss", "bytes_fetched", "bytes_wasted",
        "tokens_recomputed", "recompute_s", "objective", "clairvoyant_loss", "clairvoyant_objective", "regret",
        "groups",
    }  # fmt: skip
    assert set(result["runs"][0]["groups"][0]) == {
        "group", "track", "bytes", "requested_s", "first_byte_s", "done_s", "ready_s", "source",
    }  # fmt: skip
    assert set(result["summary"]) == {"fixed:AC-5x", "cheapfirst"}
    assert set(result["summary"]["cheapfirst"]) >= {
        "runs", "hit_ratio", "hit_ratio_ci95", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "loss_mean", "loss_p95",
        "objective_mean", "regret_mean", "regret_p99", "tokens_recomputed_mean", "bytes_wasted_share", "track_share",
    }  # fmt: skip
    assert sum(result["summary"]["cheapfirst"]["track_share"].values()) == pytest.approx(1.0)
    assert [timeline["run"] for timeline in report.timelines] == [0, 1, 6]
    assert all(timeline["log"] and timeline["link"] for timeline in report.timelines)
    json.dumps(result, allow_nan=False)


def test_a_bad_policy_is_found_before_the_work_and_one_that_fails_late_fails_it_all(tmp_path):
    with pytest.raises(PolicyError, match="nosuch"):
        matrix(policies=("nosuch",))
    path = tmp_path / "late.py"
    path.write_text("from kvabr.abr import Policy\nclass Late(Policy):\n    def decide(self, view): return 7\n")
    for jobs in (1, 2):
        with pytest.raises(PolicyError, match=r"must return a Decision, got 7.*late\.py, line 3"):
            replay(matrix(policies=("cheapfirst", f"{path}:Late")), jobs=jobs)


@pytest.mark.parametrize("changes", [{"traces": ()}, {"starts": 0}])
def test_nothing_to_play_is_refused(changes):
    with pytest.raises(UsageError):
        matrix(**changes)


def test_wilson_is_honest_at_the_ends():
    low, high = wilson(10, 10)
    assert 0.69 < low < 0.73
    assert high == pytest.approx(1.0)
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(50, 100)
    assert low == pytest.approx(0.4038, abs=1e-3)
    assert high == pytest.approx(0.5962, abs=1e-3)


def test_ttft_covers_the_plays_that_the_hit_ratio_covers():
    report = replay(matrix(starts=1), jobs=1)
    runs = [run for run in report.result["runs"] if run["policy"] == "cheapfirst"]
    assert [run["feasible"] for run in runs] == [True] * 3
    for run, ttft_s in zip(runs, (1.0, 2.0, 90.0), strict=True):
        run["ttft_s"] = ttft_s
    runs[2]["feasible"] = False
    entry = summarise(runs)["cheapfirst"]
    assert entry["ttft_p50_s"] == 1.5
    assert entry["ttft_p99_s"] == pytest.approx(1.99)
    assert entry["infeasible_ttft_p50_s"] == entry["infeasible_ttft_p95_s"] == 90.0
    runs[1]["ttft_s"] = None  # given up: later than every other
    entry = summarise(runs)["cheapfirst"]
    assert entry["ttft_p50_s"] is None
    runs[2]["feasible"], runs[2]["ttft_s"] = True, 3.0
    assert summarise(runs)["cheapfirst"]["ttft_p50_s"] == 3.0


def test_plays_below_the_bound_are_counted():
    runs = replay(matrix(), jobs=1).result["runs"]
    assert summarise(runs)["cheapfirst"]["below_bound"] == 0
    feasible = [run for run in runs if run["feasible"] and run["policy"] == "cheapfirst"]
    feasible[0]["regret"] = -0.01
    assert summarise(runs)["cheapfirst"]["below_bound"] == 1


def test_plays_that_nobody_could_make_stand_apart():
    report = replay(matrix(options=ReplayOptions(1.0, 0.03, 0.05), starts=1), jobs=1)
    entry = report.result["summary"]["cheapfirst"]
    assert entry["infeasible"] == entry["runs"] == 3
    assert entry["hit_ratio"] is None
    assert entry["regret_mean"] is None
    assert entry["ttft_p50_s"] is None
    assert entry["infeasible_ttft_p50_s"] == percentile([run["ttft_s"] for run in report.result["runs"]], 0.5)
    assert all(run["regret"] is None for run in report.result["runs"])
    assert summarise([]) == {}


def test_without_detail_the_totals_are_the_same():
    whole, totals = replay(matrix(), jobs=1), replay(matrix(detail=False), jobs=1)
    assert totals.result["summary"] == whole.result["summary"]
    assert totals.result["families"] == whole.result["families"]
    assert "groups" not in totals.result["runs"][0]
    assert not any(totals.steps)


def test_the_expected_loss_falls_to_that_of_the_play():
    """What the page draws over time ends with what the play lost, whatever the policy does."""
    options = ReplayOptions(1.0, 0.03, 0.4)
    layered = matrix(catalog=catalog(8, layered=True), policies=("anytime", "cheapfirst", "mpc"), options=options)
    report = replay(replace(layered, timelines=-1), jobs=1)
    done = 0
    for timeline in report.timelines:
        run, falling = report.result["runs"][timeline["run"]], [loss for _, loss in timeline["losses"]]
        assert falling == sorted(falling, reverse=True)
        if run["gave_up"] is None and run["met"]:
            assert falling[-1] == pytest.approx(run["loss"], rel=0.02)
            done += 1
    assert done >= 9


def test_the_play_is_named():
    with pytest.raises(PolicyError, match=r"broken \(while playing a trace from 0 s\)"):
        named_play("a trace from 0 s", lambda: (_ for _ in ()).throw(PolicyError("broken")))


INTERRUPTED = """
import os, signal, sys
os.register_at_fork(after_in_parent=lambda: os.killpg(0, signal.SIGINT))
from kvabr.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""The command line, with a Ctrl-C right after each fork."""


@pytest.mark.process
@pytest.mark.parametrize("command", ["replay", "lab", "tune"])
def test_ctrl_c_while_workers_start_is_not_lost(command, tmp_path):
    for name in "ab":
        (tmp_path / "traces" / name).mkdir(parents=True)
        (tmp_path / "traces" / name / "t.csv").write_text("time_s,bits_per_second\n0,8000000\n60,0\n")
    words = {"replay": [], "lab": ["--out", "out"], "tune": ["--out", "out", tuned(tmp_path)]}[command]
    words += [str(tmp_path / "traces"), "--starts", "5000", "--jobs", "4"]
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", INTERRUPTED, command, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert said.startswith("kvabr: interrupted")
    assert said.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_task_is_answered_once(processes):
    assert sorted(in_processes(hex, range(50), processes)) == list(enumerate(map(hex, range(50))))
    assert list(in_processes(hex, [], processes)) == []


def test_closing_ends_the_processes_in_the_middle_of_their_tasks():
    answers = in_processes(lambda task: os.getpid() if task < 1 else time.sleep(10 * LIMIT_S), range(20), 2)
    _, worker = next(answers)
    answers.close()
    assert gone(worker)


def test_the_first_error_is_raised_and_says_where_it_came_from():
    with pytest.raises(ZeroDivisionError) as caught:
        list(in_processes(lambda task: 1 // task, [1, 1, 0, 1], 2))
    assert "in <lambda>" in "".join(caught.value.__notes__)


def test_a_process_that_dies_is_an_error():
    with pytest.raises(PlayError, match=r"worker process died.*--jobs 1"):
        list(in_processes(os._exit, range(4), 2))
    with pytest.raises(UsageError):
        list(in_processes(hex, range(4), 0))
