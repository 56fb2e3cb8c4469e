"""The commands, as people run them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from kvabr.cli.main import main
from tests.catalogs import catalog
from tests.lab.matrices import tuned
from tests.lab.test_matrix import trace_file

pytestmark = pytest.mark.slow


PATIENT = """
from kvabr.abr import Decision, Policy, View

class Patient(Policy):
    def decide(self, view: View) -> Decision:
        group = view.first_missing()
        if group is None:
            return Decision.finish("all are there")
        return Decision.fetch(group, view.ladder.cheapest, "the base")
"""


@pytest.fixture
def links(tmp_path):
    for family in ("bus", "train"):
        for number in range(2):
            trace_file(tmp_path / "links" / family / f"{number}.csv", 1.0 + number)
    (tmp_path / "small.json").write_text(catalog(6, layered=True).dumps())
    return [str(tmp_path / "links"), "--asset", str(tmp_path / "small.json"), "--deadline", "1", "--jobs", "1"]


def test_lab_then_report_then_lab_again(links, tmp_path, capsys):
    out = str(tmp_path / "out")
    words = ["lab", *links, "--policy", "cheapfirst", "mpc", "--load", ".1", "own", "--rtt", "20", "--out", out]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "cheapfirst has the least mean regret" in said
    assert "4 traces are too few" in said
    assert "16 plays, 0 of them from earlier runs" in said
    told = json.loads((tmp_path / "out" / "result.json").read_text())
    assert told["schema"] == "kvabr.lab/1"
    assert set(told["families"]) == {"bus", "train"}
    assert main(["report", out]) == 0
    assert "missing" not in capsys.readouterr().out
    assert "kvabr lab" in (tmp_path / "out" / "report.html").read_text()
    assert main([*words, "--starts", "2", "--html", str(tmp_path / "page.html")]) == 0
    assert "32 plays, 16 of them from earlier runs" in capsys.readouterr().out
    assert (tmp_path / "page.html").is_file()


def test_a_policy_from_a_file_is_played_once_wherever_it_is_called_from(links, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "patient.py").write_text(PATIENT)
    monkeypatch.chdir(tmp_path)
    words = ["lab", *links, "--load", ".3", "--out", "out"]
    assert main([*words, "--policy", "mine/patient.py:Patient", "mpc"]) == 0
    assert main(["report", "out"]) == 0
    assert "outdated" not in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "./mine/patient.py:Patient" in page
    assert str(tmp_path / "mine") not in page
    monkeypatch.chdir(tmp_path / "mine")
    again = ["--policy", "./patient.py:Patient", "mpc", "--out", "../out"]
    assert main([*words[:-2], *again]) == 0
    assert re.search(r"(\d+) plays, \1 of them from earlier runs", capsys.readouterr().out)


def test_tune_writes_what_it_found_and_lab_takes_it(links, tmp_path, capsys):
    found, out = tmp_path / "tuned.json", str(tmp_path / "out")
    words = ["tune", tuned(tmp_path), *links, "--load", ".3", "--points", "3", "--rounds", "1", "--near", "1"]
    assert main([*words, "--out", out, "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert "Tuning" in said
    told = json.loads(found.read_text())
    assert told["schema"] == "kvabr.tune/1"
    assert {fold["held_out"] for fold in told["folds"]} == {"bus", "train"}
    assert told["verdict"] in said
    assert main(["lab", *links, "--load", ".3", "--policy", told["chosen"], "--out", out]) == 0
    assert re.search(r"4 plays, 4 of them from earlier runs", capsys.readouterr().out)
    assert main(["tune", "cachegen", *links, "--out", out]) == 2


@pytest.mark.process
def test_ctrl_c_keeps_what_was_played(links, tmp_path):
    """A real interrupt, in the middle, to a run with children of its own."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kvabr", "lab", *links[:-2], "--jobs", "2", "--policy", "cheapfirst"]
    command += ["--load", ".1", "--starts", "4000", "--out", str(out)]
    process = subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wal = out / "plays.sqlite-wal"
    while process.poll() is None and not (wal.exists() and wal.stat().st_size > 200_000):
        with contextlib.suppress(subprocess.TimeoutExpired):  # until some are kept of each kind
            process.wait(timeout=0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "the same command continues from there" in err
    fewer = [*command[:-3], "10", *command[-2:]]
    again = subprocess.run(fewer, capture_output=True, text=True, check=True)  # noqa: S603
    kept = int(re.search(r"40 plays, (\d+) of them from earlier runs", again.stdout)[1])
    assert kept > 0
