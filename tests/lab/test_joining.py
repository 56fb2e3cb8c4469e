"""How the laboratory joins `kvabr`, what is said without it, and what a broken command of another package does."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from kvabr.abr.plugins import policies
from kvabr.abr.policies import BUILTIN
from kvabr.cli.commands import COMMANDS, LAB
from kvabr.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "tools" / "lab" / "pyproject.toml").read_text())["project"]
REPLAY = ("replay", ROOT / "traces" / "flat.csv", "--load", 0.4, "--deadline", 2, "--jobs", 1)
ESTIMATORS = {"ewma", "last", "percentile"}
SELECTORS = {"hkvd", "legolink", "random", "oracle"}
POLICIES = {
    "bola", "bola-e", "budget", "cachegen", "cachegen-oracle", "cake", "dynamic", "fugu", "kvserve", "l2a", "oracle",
    "robustmpc",
}  # fmt: skip

ALONE = """
import sys
sys.path += {paths!r}
from kvabr.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that runs `kvabr` where all is installed but the laboratory."""
    site = tmp_path_factory.mktemp("site")
    for folder in (Path(path) for path in sys.path if path.endswith("-packages")):
        for item in folder.iterdir():
            if "kvabr_lab" not in item.name and not (site / item.name).exists():
                (site / item.name).symlink_to(item)
    code = ALONE.format(paths=[str(ROOT), str(site)])

    def run(*words, config=""):
        command = [sys.executable, "-I", "-S", "-c", code, *map(str, words)]
        env = os.environ | {"KVABR_CONFIG": str(config)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)  # noqa: S603 - our own code

    return run


def test_every_command_and_policy_of_the_laboratory_joins():
    groups = PROJECT["entry-points"]
    assert set(groups["kvabr.commands"]) == {
        *LAB,
        "calibrate.blend",
        "replay.live",
        "replay.live.check",
        "replay.live.table",
        "replay.sharing",
    }
    assert set(groups["kvabr.policies"]) == POLICIES
    assert set(groups["kvabr.selectors"]) == SELECTORS
    assert set(groups["kvabr.estimators"]) == ESTIMATORS
    assert not LAB.keys() & COMMANDS.keys()
    installed = metadata.distribution("kvabr-lab").entry_points
    assert {(entry.group, entry.name, entry.value) for entry in installed} == {
        (group, name, value) for group, entries in groups.items() for name, value in entries.items()
    }, "install it again: tools/setup-venv"
    for entry in installed:
        assert callable(entry.load())
    assert policies().keys() >= POLICIES | BUILTIN.keys()
    for name in POLICIES:
        assert policies()[name].name == name


def test_the_trial_of_wheels_passes_here(capsys):
    trial = runpy.run_path(str(ROOT / "tools" / "try-wheel"))
    assert trial["round_trip"]()
    assert trial["lab_is_here"]()
    assert "million indices a second\nkvabr-lab: lab, " in capsys.readouterr().out


@pytest.mark.process
def test_without_the_laboratory_everything_else_is_there(alone, tmp_path):
    helped = alone("--help")
    assert helped.returncode == 0
    assert "commands of the laboratory (pip install ./tools/lab, in the clone of kvabr):\n    lab " in helped.stdout
    listed = alone("policies")
    assert listed.returncode == 0, listed.stderr
    assert "anytime (default)" in listed.stdout
    assert "cachegen" not in listed.stdout
    assert alone(*REPLAY, "--policy", "all").returncode == 0
    missing = "` is part of the laboratory, which is not installed"
    for words, said in (
        *(((command, "whatever"), f"`kvabr {command}{missing}") for command in LAB),
        ((*REPLAY, "--policy", "cachegen"), "unknown policy 'cachegen'"),
        (("calibrate", "--blend", "--out", tmp_path / "x.json"), f"`kvabr calibrate --blend{missing}"),
        ((*REPLAY, "--live", "--asset", tmp_path), f"`kvabr replay --live{missing}"),
        ((*REPLAY, "--one-connection"), f"`kvabr replay --one-connection{missing}"),
    ):
        refused = alone(*words)
        assert refused.returncode == 2
        assert said in refused.stderr
    script = alone("completion", "bash")
    assert script.returncode == 0
    (completed,) = re.findall(r"^_shtab_kvabr_subparsers=\((.*)\)$", script.stdout, re.MULTILINE)
    assert set(re.findall(r"\w+", completed)) == set(COMMANDS)
    assert "did you mean 'lab'?" in alone("lba").stderr


@pytest.mark.process
def test_a_section_of_the_laboratory_in_the_configuration_is_no_mistake_without_it(alone, tmp_path):
    config = tmp_path / "kvabr.toml"
    config.write_text('[lab]\njobs = 1\n[replay]\npolicy = ["rate"]\n')
    assert "rate" in alone(*REPLAY, config=config).stdout
    config.write_text("[lba]\njobs = 1\n")
    refused = alone(*REPLAY, config=config)
    assert refused.returncode == 2
    assert "lba: unknown command (did you mean 'lab'?)" in refused.stderr


THEIRS = """
def add(parser):
    parser.add_argument("--times", type=int, default=1)
    parser.set_defaults(run=lambda args: print("hello" * args.times) or 0)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Install a package with two commands, one of which cannot be loaded."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "theirs_broken.py").write_text("import not_there_at_all\n")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvabr.commands]\nhello = theirs:add\nbroken = theirs_broken:add\nreplay = theirs_broken:add\n"
        "[kvabr.policies]\nbroken = theirs_broken:Policy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_another_packages_command_is_a_command(theirs, capsys, monkeypatch):
    assert main(["hello", "--times", "2"]) == 0
    assert capsys.readouterr().out == "hellohello\n"
    (theirs / "mine.toml").write_text("[hello]\ntimes = 3\n")
    monkeypatch.setenv("KVABR_CONFIG", str(theirs / "mine.toml"))
    assert main(["hello"]) == 0
    assert capsys.readouterr().out == "hellohellohello\n"


def test_a_broken_command_of_another_package_fails_alone(theirs, capsys):
    assert main(["broken"]) == 1
    assert "`kvabr broken` of the package theirs (theirs_broken:add)" in capsys.readouterr().err
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "_shtab_kvabr_hello_option_strings=(-h --help --times)" in script
    assert " hello broken)\n" in script
    words = list(map(str, REPLAY))
    assert main(words) == 0  # kvabr's own
    assert main([*words, "--policy", "broken"]) == 1
    assert "broken of an installed package cannot be loaded: ModuleNotFoundError" in capsys.readouterr().err
