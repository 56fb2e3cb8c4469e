"""The commands of the first hour: demo, doctor, a picture."""

import io
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import closing
from pathlib import Path

import pytest

from kvabr.cli import display, options
from kvabr.cli.main import main
from kvabr.replay.report.queries import nats
from tests.client.conftest import root as root  # noqa: PLC0414 - the fixture
from tests.client.served import Served

TRACES = Path(__file__).parent.parent / "traces"


@pytest.mark.slow
def test_the_demo_and_its_page_agree(capsys, tmp_path):
    """It says what was won; both have the median of TTFT and the mean of losses, and say so."""
    assert main(["demo", "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "With anytime the first token came after" in shown
    assert "of 32 plays" in shown
    assert str(tmp_path / "page.html") in shown
    page = (tmp_path / "page.html").read_text()
    assert len(page) > 100_000
    data = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    mine = next(row for row in data["policies"] if row["name"] == "anytime")
    assert re.search(rf"anytime \(default\) +{mine['ttft_p50_s']:.1f} s +32 of 32 +{nats(mine['loss_mean'])} ", shown)
    assert f"{nats(mine['loss_mean'])} nats per token on average" in shown
    assert "first token: median; loss: mean" in shown
    home = " ".join((Path(__file__).parent.parent / "docs" / "index.md").read_text().split())
    words = " ".join(shown.split())
    (first, int8, fp16) = re.search(
        r"came after ([\d.]+) s \(median\), instead of ([\d.]+) s .* and ([\d.]+) s with", words
    ).groups()
    said = f"came after {first} s (median of 32 simulated plays), with a plain Int8 cache after {int8} s, and with the"
    assert f"{said} exact cache after {fp16} s. The expected loss was {nats(mine['loss_mean'])} nats per token." in home


@pytest.mark.slow
def test_a_demo_that_no_link_can_win_says_so(capsys, tmp_path):
    assert main(["demo", "--html", str(tmp_path / "page.html"), "--deadline", "0.0001"]) == 0
    assert "Try a later --deadline" in capsys.readouterr().out


def test_doctor_reports_and_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVABR_CODER", "nonsense")
    report = tmp_path / "report.json"
    assert main(["doctor", "--json", str(report)]) == 1
    lines = {line["what"]: line for line in json.loads(report.read_text())}
    assert lines["kvabr"]["state"] == "ok"
    assert lines["codec"] | {"detail": ""} == {
        "what": "codec", "state": "failed", "detail": "", "fix": "unset KVABR_CODER",
    }  # fmt: skip
    assert lines["decoding"]["state"] == "ok"
    assert re.search(r"\d+ threads; MB/s of FP16 cache in each: .*FP16 [\d,]+", lines["decoding"]["detail"])
    assert lines["vllm"]["state"] == "ok" or "pip install" in lines["vllm"]["fix"]
    out = " ".join(capsys.readouterr().out.split())
    assert "nonsense" in out
    assert "fix: unset KVABR_CODER" in out
    assert re.search(r"1 of \d+ checks failed; \d+ optional parts? missing\.$", out)


@pytest.mark.process
def test_doctor_asks_an_origin(capsys, root, tmp_path):
    with closing(Served(root / "short", tmp_path)) as origin:
        main(["doctor", origin.url, "--fingerprint", origin.fingerprint, "--timeout", "300"])
        out = " ".join(capsys.readouterr().out.split())
        assert "connected in" in out
        assert "moqt-22" in out
        assert "certificate ok has the given fingerprint" in out
        assert "over quic ok connected in" in out
        assert "over tcp ok connected in" in out
        main(["doctor", origin.url, "--insecure", "--timeout", "300"])
        assert "was not verified add: --ca F.pem or --fingerprint HEX" in " ".join(capsys.readouterr().out.split())
        assert main(["doctor", origin.url, "--timeout", "300"]) == 1
        assert "--fingerprint HEX" in " ".join(capsys.readouterr().out.split())


def test_a_picture_of_a_play(tmp_path):
    path = tmp_path / "play.svg"
    assert main(["replay", str(TRACES / "lte-train.csv"), "--load", "0.3", "--svg", str(path)]) == 0
    tree = ET.parse(path)  # noqa: S314 - written here
    space = "{http://www.w3.org/2000/svg}"
    assert "63 groups of a KV cache over cellular/lte-train" in (tree.findtext(f"{space}title") or "")
    bars = [bar for bar in tree.iter(f"{space}rect") if bar.get("class", "").startswith("t")]
    assert len(bars) > 63  # every group, and layers
    words = [text.text or "" for text in tree.iter(f"{space}text")]
    assert any(word.startswith("The cache was complete after") for word in words)
    assert "AC-L0" in words


def test_the_readme_shows_what_the_command_draws(tmp_path):
    path = tmp_path / "play.svg"
    words = ["replay", str(TRACES / "lte-train.csv"), "--deadline", "4", "--load", "0.3", "--svg", str(path)]
    assert main(words) == 0
    shipped = Path(__file__).parent.parent / "docs" / "assets" / "play.svg"
    assert path.read_text() == shipped.read_text(), "draw it again: " + " ".join(["kvabr", *words[:-1], str(shipped)])
    first = " ".join((shipped.parents[2] / "README.md").read_text().partition("![")[0].split())
    numbers = re.search(r"after ([\d.]+) s .* with ([\d.]+)% of .* loss ([\d.]+) nats", shipped.read_text())
    assert numbers is not None
    assert all(each in first for each in (f"{numbers[1]} s", f"{numbers[2]} %", f"{numbers[3]} nats"))


def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    with display.StageBar({"encode": "encoding groups"}) as bar:
        for done in range(1, 31):
            now[0] += 1.0
            bar("encode", done, 30)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "encoding groups: 2 of 30, about 28 s left",
        "encoding groups: 12 of 30, about 18 s left",
        "encoding groups: 22 of 30, about 8 s left",
    ]


_SPINS = """
import os, sys
from kvabr.cli.main import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
main(sys.argv[1:])
"""


@pytest.mark.process
@pytest.mark.parametrize("command", ["encode", "prefill", "calibrate"])
def test_torch_is_imported_after_its_threads_were_made_to_sleep(command, tmp_path):
    missing = tmp_path / "no" / "file"
    words = [command, "--text", missing, "--out", tmp_path / "file", *(("--tokens", 9) if command == "encode" else ())]
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    line = [sys.executable, "-c", _SPINS, *map(str, words)]
    set_by_user = {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "None"} if command == "encode" else {}
    for name, due in ({"unset": options.SPINS} | set_by_user).items():
        done = subprocess.run(line, env=clean | {name: "7"}, capture_output=True, text=True, check=False)  # noqa: S603
        assert done.stdout == f"torch {due}\n"


def test_a_wait_is_told_once_unless_it_changes(monkeypatch):
    # Not by capsys: what a thread prints while it is read is lost.
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    monkeypatch.setattr(display, "_FIRST_S", 0.0)
    monkeypatch.setattr(display, "_EVERY_S", 0.001)
    with display.waiting("loading") as say:
        while "loading ...\n" not in screen.getvalue():
            time.sleep(0.001)
        say("counting")
        while "counting ...\n" not in screen.getvalue():
            time.sleep(0.001)
    assert screen.getvalue() == "loading ...\ncounting ...\n"
