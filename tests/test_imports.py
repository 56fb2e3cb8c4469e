"""What a command loads: replay and lab work on catalog numbers, so they need no tensors."""

import subprocess
import sys

import pytest

RUN = """
import sys
from kvabr.cli.main import main
status = main(sys.argv[1:])
print(status, sorted({"torch", "triton", "safetensors"} & set(sys.modules)))
"""


def loaded(code, *args):
    """Return the last line that a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=True)  # noqa: S603 - our own code
    return done.stdout.splitlines()[-1]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "links" / "steady.csv"
    path.parent.mkdir()
    path.write_text("t_s,mbps\n" + "".join(f"{second},{8 + second % 5}\n" for second in range(30)))
    return path


def test_a_simulated_replay_never_loads_torch(trace, tmp_path):
    args = ("replay", trace, "--policy", "anytime", "oracle", "cheapfirst", "--deadline", 2, "--scale-to-mean", 0.4)
    files = ("--json", tmp_path / "runs.json", "--html", tmp_path / "page.html", "--log", tmp_path / "log.jsonl")
    assert loaded(RUN, *args, "--prefill-rate", 1500, *files) == "0 []"


def test_the_laboratory_never_loads_torch(trace, tmp_path):
    args = ("lab", trace.parent, "--policy", "anytime", "mpc", "--load", 0.1, "--rtt", 10, "--starts", 1)
    assert loaded(RUN, *args, "--jobs", 1, "--out", tmp_path / "results") == "0 []"


@pytest.mark.parametrize(
    "module", ["kvabr.abr.plugins", "kvabr.codec.container", "kvabr.player.session", "kvabr.types.engine"]
)
def test_what_a_replay_is_made_of_loads_neither_torch_nor_numpy(module):
    code = "import importlib, sys\nimportlib.import_module(sys.argv[1])\nprint({'torch', 'numpy'} & set(sys.modules))"
    assert loaded(code, module) == "set()"
