"""The tutorial on policies: its commands run, and its figures are what they print, rounded.

None of the figures is a time that was measured here: plays are simulated.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvabr.cli.main import main
from kvabr.replay.report.queries import DASH

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorials" / "write-a-policy.md"
TEXT = PAGE.read_text()
SAID = " ".join(TEXT.split())
"""The page as one line."""

RANK = re.compile(rf"^ +\d +(\S+) +([\d.]+) +[\d.]+{DASH}", re.MULTILINE)
"""A line of the laboratory's ranking: place, policy, mean regret, interval."""

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the page's policies and the traces, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r'```python title="(\w+\.py)"\n(.*?)^```', TEXT, re.DOTALL | re.MULTILINE):
        Path(name).write_text(code)
    Path("traces").symlink_to(ROOT / "traces")
    return tmp_path


def line(start: str) -> list[str]:
    """Return the words of the page's command that starts like this, without `kvabr`."""
    (found,) = re.findall(rf"^kvabr ({re.escape(start)}.*)", TEXT, re.MULTILINE)
    return shlex.split(found)


def test_every_command_of_the_page_is_run_here():
    starts = ("replay traces --policy ./cautious.py", "replay traces --policy ./patient.py", "traces synth")
    starts += ("replay leased.csv", "lab traces", "report", "tune")
    assert len({tuple(line(start)) for start in starts}) == len(re.findall(r"^kvabr .*", TEXT, re.MULTILINE))


def replayed(words: list[str]) -> dict[str, Any]:
    """Run a replay and return its summary by policy."""
    assert main([*words, "--json", "x.json"]) == 0
    summary: dict[str, Any] = json.loads(Path("x.json").read_text())["summary"]
    return {name.rpartition(":")[2]: row for name, row in summary.items()}


@pytest.mark.parametrize(
    ("start", "written"), [("replay traces --policy ./cautious.py", "page.html"), ("tune", "tuned")]
)
def test_what_the_page_says_nothing_of(start, written, folder):
    """Two traces are enough."""
    words = line(start)
    at = words.index("traces")
    assert main([*words[:at], "traces/lte.csv", "traces/wan-far.csv", *words[at + 1 :]]) == 0
    assert Path(written).exists()


def test_layers(folder):
    of = replayed(line("replay traces --policy ./patient.py"))
    patient, default = of["Patient"], of["anytime"]
    claims = [
        f"`Patient` has about the same loss as the default, {patient['loss_mean']:.1g} nats per token on average",
        f"and `anytime` {default['loss_mean']:.1g}.",
        f"median TTFT is {patient['ttft_p50_s']:.1f} s, that of `anytime` {default['ttft_p50_s']:.1f} s",
        f"its regret is {patient['regret_mean']:.2g}, that of `anytime` {default['regret_mean']:.2g}",
        f"`mpc` and `rate` {of['mpc']['regret_mean']:.2g} and {of['rate']['regret_mean']:.2g}.",
    ]
    assert not [claim for claim in claims if claim not in SAID]


def test_a_policy_that_knows_its_link_beats_the_default(folder):
    assert main(line("traces synth")) == 0
    words = line("replay leased.csv")
    of = replayed(words)
    mine, default = of["Leased"], of["anytime"]
    claims = [
        f"| `{name}` | {row['ttft_p50_s']:.2f} s | {_plain(row['loss_mean'])} | {row['regret_mean']:.2g} |"
        for name, row in of.items()
    ]
    claims.append(f"`Leased` gains {default['ttft_p50_s'] - mine['ttft_p50_s']:.1g} s")
    words.remove("--no-slow-start")
    of = replayed(words)
    regrets = [of[name]["regret_mean"] for name in ("Leased", "anytime")]
    claims.append(
        "both wait for slow start: the regret of `Leased` is {:.2g}, that of `anytime` {:.2g}.".format(*regrets)
    )
    elsewhere = replayed([word.replace("leased.csv", "traces/lte.csv") for word in line("replay leased.csv")])
    regrets = [elsewhere[name]["regret_mean"] for name in ("Leased", "anytime")]
    claims.append("the regret of `Leased` is {:.1g}, that of `anytime` {:.1g}. `kvabr.Client".format(*regrets))
    assert not [claim for claim in claims if claim not in SAID]
    assert mine["hit_ratio"] == default["hit_ratio"] == 1.0


def test_plays_that_cannot_be_told_apart(folder, capsys):
    assert main(line("lab traces")) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\./patient\.py:Patient [^A-Za-z]*cheapfirst", out)
    assert "thirty plays cannot distinguish them" in SAID
    assert main(line("report")) == 0


def test_the_table_of_the_laboratory(folder, capsys):
    """The guide's ranking and its sentence; every play of it takes tens of seconds together."""
    text = (ROOT / "docs" / "guides" / "laboratory.md").read_text()
    assert main(guide_line(text, "lab traces")) == 0
    out = capsys.readouterr().out
    told, said = (dict(RANK.findall(shown)) for shown in (out, text))
    assert said == told
    assert len(said) == 5
    plays = re.search(r"\d+ feasible plays over \d+ traces, each by every policy", out)
    assert plays is not None
    assert plays[0] in text
    (sentence,) = re.findall(r"^anytime leads with mean regret .*$", out, re.MULTILINE)
    assert sentence in " ".join(text.split())


def guide_line(text, start):
    """Return the words of the guide's command that starts like this."""
    (words,) = re.findall(rf"^    kvabr ({start} .*)", text.replace("\\\n", " "), re.MULTILINE)
    return shlex.split(words)


def _plain(value: float) -> str:
    """Return a small number with one digit and without an exponent."""
    return f"{float(f'{value:.1g}'):.6f}".rstrip("0")
