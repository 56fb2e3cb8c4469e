"""The command line as a user meets it: exit statuses, messages, files."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvabr.cli import main as cli
from kvabr.cli.commands import names
from kvabr.cli.display import plain
from kvabr.cli.main import main
from tests.catalogs import catalog

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
    for argv in ([], *([name] for name in names()), ["traces", "synth"], *benches):
        with pytest.raises(SystemExit) as caught:
            main([*argv, "--help"])
        assert caught.value.code == 0
        assert len(capsys.readouterr().out) > 150


def test_replay_prints_a_table_and_a_verdict_and_writes_every_file(capsys, asset, tmp_path):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "html", "jsonl", "perfetto")}
    status, out, err = run(
        capsys, "replay", TRACES / "lte.csv", TRACES / "flat.csv", "--asset", asset, "--policy", "all", "--deadline", 1,
        "--load", 0.4, "--json", files["json"], "--html", files["html"], "--log", files["jsonl"],
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


def test_a_prefill_rate_out_of_range_names_the_option(capsys):
    status, _, err = run(capsys, "replay", TRACES / "flat.csv", "--prefill-rate", "1e-300")
    assert (status, err) == (2, "kvabr: --prefill-rate 1e-300: must be at least 1e-100 and finite\n")


def test_a_trace_that_is_shorter_than_the_play_wraps_and_says_so(capsys, asset, tmp_path):
    short = tmp_path / "short.csv"
    short.write_text("time_s,rate_mbps\n0,4\n0.5,2\n1.0,4\n")
    status, _, err = run(capsys, "replay", short, "--asset", asset, "--deadline", 4, "--load", 0.4)
    assert status == 0
    assert "repeats" in err
    assert "short" in err


def test_the_estimator_of_the_help_plays(capsys, asset, tmp_path):
    with pytest.raises(SystemExit):
        main(["estimators", "--help"])
    lines = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    path = tmp_path / "median.py"
    path.write_text("\n".join(lines[lines.index("from collections import deque") :]).partition("\nkvabr ")[0])
    argv = ["--estimator", f"{path}:Median", "--deadline", 1, "--load", 0.4]
    status, out, err = run(capsys, "replay", TRACES / "lte.csv", "--asset", asset, *argv)
    assert status == 0, err
    assert "anytime" in out
    (tmp_path / "broken.py").write_text(path.read_text().replace("nbytes / seconds", "nbytes / 0"))
    argv[1] = f"{tmp_path / 'broken.py'}:Median"
    status, _, err = run(capsys, "replay", TRACES / "lte.csv", "--asset", asset, *argv)
    assert (status, "ZeroDivisionError" in err) == (1, True)


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_failure():
    """As with ``| head``; also where what is left fits into the buffers."""
    command = [sys.executable, "-m", "kvabr", "policies"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(300) == 0
    process.stderr.close()


def test_it_may_be_started_without_an_output():
    """As with ``>&-``."""
    words = f"exec {sys.executable} -m kvabr policies >&-"
    process = subprocess.run(["/bin/sh", "-c", words], stderr=subprocess.PIPE, timeout=600, check=False)  # noqa: S603
    assert (process.returncode, process.stderr) == (0, b"")


def test_a_warning_of_kvabrs_looks_as_its_errors_do_and_others_say_where_they_come_from(capsys):
    kept = warnings.formatwarning
    try:
        assert run(capsys, "policies")[0] == 0
        ours = warnings.formatwarning("no room", RuntimeWarning, cli.__file__, 3)
        assert ours == "kvabr: no room\n"
        assert "elsewhere.py:3" in warnings.formatwarning("overflow", RuntimeWarning, "/elsewhere.py", 3)
    finally:
        warnings.formatwarning = kept


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_unicode_is_no_failure(encoding, asset):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    for words in (["replay", TRACES / "lte.csv"], ["inspect", asset], ["traces", "info", TRACES], ["policies"]):
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "kvabr", *map(str, words)], env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode(encoding)
        assert len(done.stdout.decode(encoding)) > 200


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_a_narrow_terminal_without_cutting_numbers(capsys, monkeypatch, asset, width):
    monkeypatch.setenv("COLUMNS", str(width))
    traces = [TRACES / "flat.csv", TRACES / "lte.csv"]
    for words in (
        ["replay", *traces, "--policy", "anytime", "fixed:Int8", "--load", 0.4],
        ["inspect", asset],
        ["traces", "info", TRACES],
        ["traces", "info", TRACES, "--families"],
        ["engines"],
        ["policies"],
    ):
        status, out, _ = run(capsys, *words)
        assert status == 0
        assert "…" not in out
        assert max(map(len, out.partition("prompt digest")[0].splitlines()[:3])) <= width


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvabr re", ["relay", "replay", "report"]),
        ("kvabr replay --lo", ["--load", "--log", "--loss"]),
        ("kvabr replay --policy any", ["anytime"]),
        ("kvabr replay traces --policy anytime rob", ["robustmpc"]),
        ("kvabr bench quality --te", ["--text"]),
        ("kvabr fetch moqt://h/ --quic a", ["aioquic", "auto"]),
        ("kvabr traces s", ["synth"]),
        ("kvabr traces info --fam", ["--families"]),
        ("kvabr traces info --format sa", ["sabre"]),
        ("kvabr replay --scale", []),
    ],
)
def test_bash_completes(capsys, tmp_path, line, offered):
    status, script, _ = run(capsys, "completion", "bash")
    assert status == 0
    words = line.split()
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_kvabr; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)  # noqa: S603, S607 - our own
    assert sorted(done.stdout.split()) == offered


def test_control_characters_of_names_do_not_reach_the_terminal(capsys):
    plain("a\x1b[2J\u2028b\u202ec\td")
    assert capsys.readouterr().out.startswith("a?[2J?b?c")
