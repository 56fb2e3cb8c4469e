"""What commands load: help loads one command, and replay and lab need no tensors."""

import subprocess
import sys

import pytest

from kvabr.cli.commands import COMMANDS, LAB

pytestmark = pytest.mark.process

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
    args = ("replay", trace, "--policy", "anytime", "oracle", "cheapfirst", "--deadline", 2, "--load", 0.4)
    files = ("--json", tmp_path / "runs.json", "--html", tmp_path / "page.html", "--log", tmp_path / "log.jsonl")
    assert loaded(RUN, *args, "--prefill-rate", 1500, *files) == "0 []"


@pytest.mark.parametrize(
    "module", ["kvabr.abr.plugins", "kvabr.codec.container", "kvabr.player.session", "kvabr.types.engine"]
)
def test_what_a_replay_is_made_of_loads_neither_torch_nor_numpy(module):
    code = "import importlib, sys\nimportlib.import_module(sys.argv[1])\nprint({'torch', 'numpy'} & set(sys.modules))"
    assert loaded(code, module) == "set()"


LISTING = """
import sys
from kvabr.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(*sorted(sys.modules), file=sys.stderr)
"""


def packages_and_modules(*argv):
    """Return the top-level packages and the modules that a command line loads."""
    command = [sys.executable, "-c", LISTING, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)  # noqa: S603
    modules = set(done.stderr.splitlines()[-1].split())
    return {name.partition(".")[0] for name in modules}, modules


def test_help_loads_no_command():
    packages, modules = packages_and_modules("--help")
    mine = {name.removeprefix("kvabr.") for name in modules if name.startswith("kvabr.")}
    assert mine == {"cli", "cli.commands", "cli.interrupt", "cli.main", "types", "types.errors", "types.installing"}
    assert not packages & {"torch", "numpy", "rich", "structlog", "transformers", "asyncio", "kvabr_lab"}
    assert "importlib.metadata" not in modules, "reading entry points takes as long as all the rest"


@pytest.mark.parametrize("command", [*COMMANDS, *LAB])
def test_help_of_a_command_loads_that_command_only(command):
    packages, modules = packages_and_modules(command, "--help")
    assert not packages & {"torch", "transformers", "rich", "structlog", "qh3", "aioquic", "moq", "cryptography"}
    home = COMMANDS[command][0].partition(":")[0] if command in COMMANDS else "none"
    shared = {"commands", "fields", "main", "interrupt", "options", "network", "serving", "kv_events"}
    loaded = {name.split(".")[2] for name in modules if name.startswith("kvabr.cli.")}
    assert {name for name in loaded if not name.startswith(f"{home}_")} <= {home, *shared}
    lab = {name.split(".")[2] for name in modules if name.startswith("kvabr_lab.cli.")}
    assert lab <= ({command, "lab"} if command in LAB else set())  # `report` and `tune` have the options of `lab`


FIRST_PLAY = """
import asyncio, pathlib, sys
import kvabr.engines.player_process.process
from kvabr.client.async_client import AsyncClient
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from tests.client.playing import connection
from tests.client.virtual import VirtualLoop
from tests.toymodel import SPEC, prompt, toy_asset
async def play():
    async with AsyncClient(connection(PublishedAssets(folder), 1e6, 0.02), model=SPEC) as client:
        found = await client.find(prompt(70).tokens, within_s=60)
        played = await client.play_prefix(found, deadline=60.0, cost=PrefillCost.from_rate(1.0), uncached=16)
    assert played.tokens, played.cut
folder = pathlib.Path(sys.argv[1])
toy_asset(folder / "one")
before = set(sys.modules)
with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    runner.run(play())
print(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in {"kvabr", "numpy", "torch"}))
"""


def test_the_first_play_of_a_player_process_waits_for_no_module(tmp_path):
    assert loaded(FIRST_PLAY, tmp_path) == "[]"
