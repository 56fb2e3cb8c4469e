"""The command line as a user meets it: exit statuses, messages, files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from kvabr.cli import main as cli
from kvabr.cli.commands import names
from kvabr.cli.display import output, plain, table
from kvabr.cli.main import main, parse
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
    for argv in ([], *([name] for name in names()), ["traces", "synth"], *benches):
        with pytest.raises(SystemExit) as caught:
            main([*argv, "--help"])
        assert caught.value.code == 0
        assert len(capsys.readouterr().out) > 150


def test_bad_usage_is_status_two(capsys):
    for argv in (
        ["dance"],
        ["--dance"],
        ["--"],
        ["fetch"],
        ["replay", "x", "--recompute-mode", "both"],
        ["bench", "x"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert argv == ["--"] or "--help`" in capsys.readouterr().err


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


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(capsys, asset, tmp_path):
    texts = set()
    for jobs in (1, 2):
        path = tmp_path / f"{jobs}.json"
        argv = ["replay", TRACES, "--asset", asset, "--deadline", 1, "--load", 0.4, "--starts", 2, "--seed", 3]
        assert run(capsys, *argv, "--jobs", jobs, "--json", path)[0] == 0
        texts.add(path.read_bytes())
    assert len(texts) == 1


def test_it_needs_no_model_and_no_asset(capsys):
    status, out, _ = run(capsys, "replay", TRACES / "flat.csv", "--deadline", 4, "--load", 0.4)
    assert status == 0
    assert "anytime" in out


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["--policy", "nosuch"], 2, "unknown policy 'nosuch'"),
        (["--policy", "fixed:MP3"], 1, "no track 'MP3'"),
        (["--policy", "fixed"], 1, "fixed:TRACK"),
        (["--policy", "absent.py:Mine"], 2, "no such file"),
        (["--estimator", "nosuch"], 2, "unknown estimator"),
        (["--deadline", "0"], 2, "deadline"),
        (["--deadline", "-1"], 2, "deadline"),
        (["--load", "0"], 2, "the load is 0.0"),
        (["--time-price", "-0.1"], 2, "the price of time is -0.1"),
        (["--time-price", "-1"], 2, "the price of time is -1"),
        (["--rtt", "-5"], 2, "round trip"),
        (["--starts", "0"], 2, "starts"),
        (["--prefill-rate", "0"], 2, "prefill rate"),
        (["--json", "/no/such/folder/out.json"], 2, "there is no folder"),
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
    assert status == 2
    assert "empty.csv" in err
    status, _, err = run(capsys, "replay", tmp_path / "nowhere", "--asset", asset)
    assert status == 2
    assert "nowhere" in err


def test_a_trace_that_is_shorter_than_the_play_wraps_and_says_so(capsys, asset, tmp_path):
    short = tmp_path / "short.csv"
    short.write_text("time_s,rate_mbps\n0,4\n0.5,2\n1.0,4\n")
    status, _, err = run(capsys, "replay", short, "--asset", asset, "--deadline", 4, "--load", 0.4)
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
    argv = ["--policy", f"{path}:Cautious", "--deadline", 1, "--load", 0.4]
    status, out, err = run(capsys, "replay", TRACES / "lte.csv", "--asset", asset, *argv)
    assert status == 0, err
    assert "Cautious" in out


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


def test_lists_name_everything(capsys):
    out = run(capsys, "policies")[1]
    assert "anytime" in out
    assert "cachegen-oracle" in out
    assert "harmonic" in run(capsys, "estimators")[1]
    assert "legolink" in run(capsys, "selectors")[1]


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
@pytest.mark.parametrize(
    "words",
    [
        ["replay", "MISSING"],
        ["replay", "EMPTY"],
        ["replay", "FOLDER"],
        ["replay", TRACES, "--policy", "MISSING.py:X"],
        ["replay", TRACES, "--asset", "MISSING"],
        ["lab", "MISSING", "--out", "out"],
        ["report", "FOLDER"],
        ["inspect", "MISSING"],
        ["inspect", "FOLDER"],
        ["serve", "MISSING", "--dev"],
        ["store", "ls", "MISSING"],
        ["fetch", "moqt://127.0.0.1:1/", "--prompt", "MISSING"],
        ["fetch", "moqt://127.0.0.1:1/", "--prompt", "EMPTY"],
        ["fetch", "moqt://127.0.0.1:1/#kvcache:m/0", "--token-file", "EMPTY"],
        ["encode", "--text", "MISSING", "--tokens", "9", "--out", "x"],
        ["encode", "--text", "EMPTY", "--tokens", "9", "--out", "x"],
    ],
    ids=lambda words: " ".join(map(str, words)).replace(str(TRACES), "traces"),
)
def test_what_is_named_but_missing_or_empty_is_wrong_usage(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").touch()
    Path("FOLDER").mkdir()
    status, _, error = run(capsys, *words)
    assert (status, error.count("\n")) == (2, 1), error
    assert re.search("MISSING|EMPTY|FOLDER", error)


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


def test_an_error_of_the_options_is_one_line_with_the_way_out(capsys):
    for argv, said in (
        (["replay", "-d", "2s"], "kvabr replay: -d/--deadline: '2s' is not a number of seconds; write 2; "),
        (["replay", "--deadline", "500ms"], "write 0.5; "),
        (["replay", "--starts", "many"], "--starts 'many': must be a whole number; "),
        (["replay", "-j", "x"], "--jobs 'x': must be a whole number; "),
        (["replay", "--polcy=mpc"], "kvabr replay: no option --polcy (did you mean '--policy'?); "),
        (["traces", "synth", "constant", "--mean-mbps", "x"], "`kvabr traces synth --help` lists the options"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        err = capsys.readouterr().err
        assert caught.value.code == 2
        assert said in err
        assert err.count("\n") == 1


def test_short_options(capsys):
    given = parse(["replay", "-p", "mpc", "rate", "-d", "2", "-j", "3"])
    assert (given.policy, given.deadline, given.jobs) == (["mpc", "rate"], 2.0, 3)
    assert parse(["fetch", "moqt://h/", "-o", "F"]).out == Path("F")
    assert parse(["serve", "-v"]).verbose


def test_the_version_tells_the_build(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"kvabr \S+, Python 3\.\d+\.\d+\S*, .+, coder: \w+\n", capsys.readouterr().out)


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


def test_a_policy_with_a_syntax_error_is_shown_as_a_compiler_would(capsys, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("from kvabr.abr import Policy\nclass X(Policy:\n    pass\n")
    status, _, err = run(capsys, "replay", TRACES / "flat.csv", "--policy", f"{path}:X")
    assert status == 1
    assert re.fullmatch(rf"kvabr: {re.escape(str(path))}:2: .*class X\(Policy:\n", err)


def test_an_empty_text_is_called_so(capsys, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    words = ["--text", tmp_path / "empty.txt"]
    said = f"kvabr: --text {tmp_path / 'empty.txt'}: is empty; name a file with a text\n"
    assert run(capsys, "encode", *words, "--tokens", 5, "--out", tmp_path / "x") == (2, "", said)
    assert run(capsys, "fetch", "moqt://localhost:1/", *words, "--model", "smollm2") == (2, "", said)


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


def test_a_file_gets_wide_tables_whole(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    numbers = [f"{number:.7f}" for number in range(1, 15)]
    output().print(table(None, numbers, [numbers]))
    heads, _, line = capsys.readouterr().out.split("\n")[1:4]
    assert heads.split() == line.split() == numbers


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


def test_two_links_of_one_trace_are_two(capsys, asset, tmp_path):
    flat, report = TRACES / "flat.csv", tmp_path / "report.json"
    status, _, err = run(
        capsys, "replay", flat, "--link", flat, "--link", flat, "--asset", asset, "--deadline", 1, "--json", report
    )
    assert status == 0, err
    assert len(json.loads(report.read_text())["options"]["links"]) == 2
