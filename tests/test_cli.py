"""The command line as a user meets it: exit statuses, messages, files."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from kvabr.cli import main as cli
from kvabr.cli.main import COMMANDS, main
from kvabr.types.catalog import Catalog
from tests.catalogs import catalog
from tests.processes import cpu_s, gone, workers_of

TRACES = Path(__file__).parent.parent / "traces"


@pytest.fixture
def asset(tmp_path):
    path = tmp_path / "catalog.json"
    path.write_text(catalog(10).dumps())
    return str(path)


def run(capsys, *argv):
    status = main(list(map(str, argv)))
    out, err = capsys.readouterr()
    return status, out, err


def test_help_of_every_command_teaches(capsys):
    benches = (["bench", name] for name in ("quality", "rd", "codec"))
    for argv in ([], *([name] for name in COMMANDS), ["traces", "synth"], *benches):
        with pytest.raises(SystemExit) as caught:
            main([*argv, "--help"])
        assert caught.value.code == 0
        assert len(capsys.readouterr().out) > 150


def test_bad_usage_is_status_two(capsys):
    for argv in (["dance"], ["--dance"], ["--"], ["fetch"], ["replay", "x", "--engine-mode", "both"], ["bench", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert argv == ["--"] or "usage" in capsys.readouterr().err


def test_without_a_command_it_prints_its_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "publish the KV cache of a text" in capsys.readouterr().out


def test_a_mistyped_name_is_met_with_the_right_one(capsys, asset):
    with pytest.raises(SystemExit):
        main(["replya", "traces"])
    assert "did you mean 'replay'?" in capsys.readouterr().err
    for policy, meant in (("anytme", "anytime"), ("fixed:int8", "Int8"), ("fixed:AC5x", "AC-5x")):
        err = run(capsys, "replay", TRACES / "flat.csv", "--asset", asset, "--policy", policy)[2]
        assert f"did you mean {meant!r}?" in err
    assert "did you mean" not in run(capsys, "replay", TRACES / "flat.csv", "--asset", asset, "--policy", "zzz")[2]


def test_replay_prints_a_table_and_a_verdict_and_writes_every_file(capsys, asset, tmp_path):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "html", "jsonl", "perfetto")}
    status, out, err = run(
        capsys, "replay", TRACES / "lte.csv", TRACES / "flat.csv", "--asset", asset, "--policy", "all", "--deadline", 1,
        "--scale-to-mean", 0.4, "--json", files["json"], "--html", files["html"], "--log", files["jsonl"],
        "--perfetto", files["perfetto"],
    )  # fmt: skip
    assert status == 0, err
    assert "cheapfirst" in out
    assert "fixed:AC-5x" in out
    assert str(files["html"]) in out
    result = json.loads(files["json"].read_text())
    assert len(result["runs"]) == 2 * len(result["summary"])
    assert "<html" in files["html"].read_text()
    assert all(json.loads(line)["event"] for line in files["jsonl"].read_text().splitlines())
    assert json.loads(files["perfetto"].read_text())["traceEvents"]


def test_the_same_seed_gives_the_same_bytes(capsys, asset, tmp_path):
    texts = set()
    for jobs in (1, 2):
        path = tmp_path / f"{jobs}.json"
        argv = ["replay", TRACES, "--asset", asset, "--deadline", 1, "--scale-to-mean", 0.4, "--starts", 2, "--seed", 3]
        assert run(capsys, *argv, "--jobs", jobs, "--json", path)[0] == 0
        texts.add(path.read_bytes())
    assert len(texts) == 1


def test_it_needs_no_model_and_no_asset(capsys):
    status, out, _ = run(capsys, "replay", TRACES / "flat.csv", "--deadline", 4, "--scale-to-mean", 0.4)
    assert status == 0
    assert "anytime" in out


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["--policy", "nosuch"], 2, "unknown policy 'nosuch'"),
        (["--policy", "fixed:MP3"], 1, "no track 'MP3'"),
        (["--policy", "fixed"], 1, "fixed:TRACK"),
        (["--policy", "absent.py:Mine"], 1, "no such file"),
        (["--estimator", "nosuch"], 2, "unknown estimator"),
        (["--deadline", "0"], 2, "deadline"),
        (["--deadline", "-1"], 2, "deadline"),
        (["--scale-to-mean", "0"], 2, "scale-to-mean"),
        (["--rtt", "-5"], 2, "round trip"),
        (["--starts", "0"], 2, "starts"),
        (["--prefill-rate", "0"], 2, "prefill rate"),
        (["--json", "/no/such/folder/out.json"], 2, "cannot be written"),
        (["--verify"], 2, "--verify needs an asset"),
    ],
)
def test_what_makes_no_sense_is_said_before_any_work(capsys, asset, argv, status, words):
    got, _, err = run(capsys, "replay", TRACES / "flat.csv", "--asset", asset, *argv)
    assert got == status
    assert words in err
    assert "Traceback" not in err


def test_missing_and_foreign_files_are_named(capsys, asset, tmp_path):
    assert "no-such.asset" in run(capsys, "replay", TRACES / "flat.csv", "--asset", tmp_path / "no-such.asset")[2]
    newer = tmp_path / "newer.json"
    newer.write_text(Path(asset).read_text().replace("kvabr.catalog/1", "kvabr.catalog/9"))
    status, _, err = run(capsys, "replay", TRACES / "flat.csv", "--asset", newer)
    assert status == 1
    assert "upgrade" in err
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    status, _, err = run(capsys, "replay", empty, "--asset", asset)
    assert status == 1
    assert "empty.csv" in err
    status, _, err = run(capsys, "replay", tmp_path / "nowhere", "--asset", asset)
    assert status == 1
    assert "nowhere" in err


def test_a_trace_that_is_shorter_than_the_play_wraps_and_says_so(capsys, asset, tmp_path):
    short = tmp_path / "short.csv"
    short.write_text("time_s,rate_mbps\n0,4\n0.5,2\n1.0,4\n")
    status, _, err = run(capsys, "replay", short, "--asset", asset, "--deadline", 4, "--scale-to-mean", 0.4)
    assert status == 0
    assert "wraps" in err
    assert "short" in err


def test_a_policy_that_fails_fails_the_replay_with_file_and_line(capsys, asset, tmp_path):
    path = tmp_path / "late.py"
    code = "from kvabr.abr import Policy\n\nclass Late(Policy):\n    def decide(self, view):\n        return 1 / 0\n"
    path.write_text(code)
    status, _, err = run(capsys, "replay", TRACES, "--asset", asset, "--policy", "cheapfirst", f"{path}:Late")
    assert status == 1
    assert "late.py, line 5" in err
    assert "ZeroDivisionError" in err
    assert "Traceback" not in err


def test_the_policy_of_the_readme_plays(capsys, asset, tmp_path):
    readme = (TRACES.parent / "README.md").read_text()
    code = next(text.split("```")[0] for text in readme.split("```python") if "class Cautious" in text)
    path = tmp_path / "cautious.py"
    path.write_text(code)
    argv = ["--policy", f"{path}:Cautious", "--deadline", 1, "--scale-to-mean", 0.4]
    status, out, err = run(capsys, "replay", TRACES / "lte.csv", "--asset", asset, *argv)
    assert status == 0, err
    assert "Cautious" in out


def test_lists_name_everything(capsys):
    out = run(capsys, "policies")[1]
    assert "anytime" in out
    assert "cachegen-oracle" in out
    assert "harmonic" in run(capsys, "estimators")[1]


@pytest.mark.process
def test_ctrl_c_ends_it_at_once_and_leaves_nothing(asset, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    argv = [sys.executable, "-m", "kvabr", "replay", str(TRACES), "--asset", asset, "--policy", "all"]
    argv += ["--starts", "500", "--deadline", "1", "--json", str(out / "r.json")]
    child = subprocess.Popen(argv, stderr=subprocess.PIPE, start_new_session=True)  # noqa: S603
    try:
        workers = workers_of(child.pid, 2, deaf=True)
        while min(map(cpu_s, workers)) < 0.3:  # until they are in the middle of it
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == 130
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert list(out.iterdir()) == []
    assert all(map(gone, workers))


def test_catalog_of_the_package_is_whole():
    from kvabr.data import default_catalog

    shipped = default_catalog()
    assert isinstance(shipped, Catalog)
    assert shipped.groups > 32
    assert shipped.prefill is not None
    assert all(track.measured is not None for track in shipped.tracks)


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_failure():
    """As with ``| head``; also where what is left fits into the buffers."""
    command = [sys.executable, "-m", "kvabr", "policies"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(300) == 0
    process.stderr.close()


@pytest.mark.process
def test_it_may_be_started_without_an_output():
    """As with ``>&-``."""
    words = f"exec {sys.executable} -m kvabr policies >&-"
    process = subprocess.run(["/bin/sh", "-c", words], stderr=subprocess.PIPE, timeout=600, check=False)  # noqa: S603
    assert (process.returncode, process.stderr) == (0, b"")


def test_ctrl_c_while_a_command_is_loaded(monkeypatch, capsys):
    def interrupted(_name):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvabr.cli.main.command_parser", interrupted)
    assert main(["policies"]) == 130
    assert capsys.readouterr().err == "kvabr: interrupted\n"


def test_a_warning_of_kvabrs_looks_as_its_errors_do_and_others_say_where_they_come_from(capsys):
    kept = warnings.formatwarning
    try:
        assert run(capsys, "policies")[0] == 0
        ours = warnings.formatwarning("no room", RuntimeWarning, cli.__file__, 3)
        assert ours == "kvabr: no room\n"
        assert "elsewhere.py:3" in warnings.formatwarning("overflow", RuntimeWarning, "/elsewhere.py", 3)
    finally:
        warnings.formatwarning = kept
