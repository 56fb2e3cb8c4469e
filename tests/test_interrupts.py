"""Ctrl-C in every long command: it ends in order, leaves nothing half-written, and shows no traceback.

The work takes many times longer than the test waits for its beginning, on every machine.
`kvabr fetch`, `kvabr lab` and `kvabr replay --live` are interrupted in the tests of their packages.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import tinymodels
from tests.processes import LIMIT_S, cpu_s, gone, workers_of
from tests.toymodel import toy_asset
from tests.warm import WarmCommand

pytestmark = pytest.mark.process

TRACES = Path(__file__).parent.parent / "traces"
MODEL = "MODEL"
STARTED_S = 1.5
"""CPU seconds after which a command that says nothing is past its start."""
STARTING_S = (0.1, 0.4, 0.8, STARTED_S)
"""CPU seconds at which it is still loading what it needs."""

LOOPS = """
import signal

from kvabr.abr import Policy

class Loops(Policy):
    def decide(self, view):
        while True:
            try:
                print("looping", flush=True)
                while signal.getsignal(signal.SIGINT) != signal.SIG_DFL:
                    pass
                print("the first has come", flush=True)
                while True:
                    pass
            except BaseException:
                pass
"""

CODEC = ("bench", "codec", "--models", "llama-8b", "--seconds", 4000, "--json", "x.json", "--work", "work")
COMMANDS = {
    "encode": (
        ("encode", "--text", "text", "--model", MODEL, "--tokens", 30000, "--continuation", 1000, "--out", "x.asset"),
        r"prefill|encode|time|measure",
    ),
    "prefill": (
        ("prefill", "--text", "text", "--model", MODEL, "--tokens", 30000, "--out", "kept", "--live"),
        r"can be played from now on",
    ),
    "calibrate": (
        (
            *("calibrate", "--model", MODEL, "--text", "text", "--contexts", 5000, "--context-tokens", 128),
            *("--out", "x.st"),
        ),
        r"\(contexts\): \d+",
    ),
    "demo": (("demo", "--html", "x.html"), "on average"),
    "tune in processes": (
        ("tune", "anytime", TRACES, "--points", 16, "--starts", 1000, "--jobs", 2, "--load", 0.1, "--out", "kept"),
        r": \d+",
    ),
    "replay": (("replay", "--policy", "all", "--starts", 4000, "--jobs", 1, "--json", "x.json"), r": \d+ of"),
    "bench quality": (
        ("bench", "quality", "--model", MODEL, "--text", "text", "--tokens", 30000, "--continuation", 1000),
        r"prefill|encode|time|measure",
    ),
    "bench rd": (
        (
            *("bench", "rd", "--model", MODEL, "--texts", "texts", "--domains", "prose", "--retrieval", 0),
            *("--contexts", 200, "--tokens", 4000, "--continuation", 1000, "--json", "x.json", "--work", "work"),
        ),
        None,
    ),
    "bench blend": (
        (
            *("bench", "blend", "--model", MODEL, "--texts", "texts", "--kinds", "text", "--prompts", 300),
            *("--passage-tokens", 64, "--tracks", "--json", "x.json", "--work", "work"),
        ),
        r"recipes: \d+ of",
    ),
    "traces": (
        ("traces", "synth", "markov", "--mean-mbps", 50, "--duration", 39999, "--step", 0.01, "--out", "x.csv"),
        None,
    ),
    "serve": (("serve", "asset", "--dev", "--bind", "127.0.0.1:0"), r"kvabr fetch"),
    "relay": (
        ("relay", "--upstream", "moqt://127.0.0.1:9/", "--dev", "--bind", "127.0.0.1:0"),
        r"fetch through it",
    ),
}
"""Words, and what is printed when the command is at work; None: it says nothing."""
SERVERS = {"serve", "relay"}
"""End by draining, which is their usual end."""


class Command:
    """A command that runs in a folder, in a process group of its own."""

    def __init__(self, words, folder: Path, *, warm: bool = False) -> None:
        words = [*map(str, words)]
        self.said: list[str] = []
        self.process = WarmCommand(words, folder) if warm else subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "kvabr", *words],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TRACES.parent), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self._over = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.said.append(line)
                self._changed.notify()
        with self._changed:
            self._over = True
            self._changed.notify()

    def until(self, pattern: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self._over or self._has(pattern), timeout=LIMIT_S)
        assert found, "".join(self.said)
        assert self._has(pattern), "".join(self.said)

    def _has(self, pattern: str) -> bool:
        return re.search(pattern, "".join(self.said)) is not None

    def until_busy(self, seconds: float = STARTED_S) -> None:
        """Wait until it has used some CPU time."""
        end = time.monotonic() + LIMIT_S
        while cpu_s(self.process.pid) < seconds:
            assert time.monotonic() < end
            assert self.process.poll() is None, "".join(self.said)
            time.sleep(0.01)

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def status(self) -> int:
        try:
            status = self.process.wait(LIMIT_S)
            self._reader.join(LIMIT_S)
            return status
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed: tools/setup-venv")
    return tinymodels.save(tmp_path_factory.mktemp("model") / "tiny-llama", max_position_embeddings=1 << 16)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "work").mkdir()
    text = "".join(f"{number} is the square root of {number * number}. " for number in range(30_000))
    (tmp_path / "text").write_text(text)
    (tmp_path / "texts" / "prose.txt").write_text(text)
    toy_asset(tmp_path / "asset")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_a_command_in_order(name, folder, request):
    words, at_work = COMMANDS[name]
    if MODEL in words:
        model = request.getfixturevalue("model")
        words = [model if word == MODEL else word for word in words]
    before = set(folder.iterdir())
    command = Command(words, folder, warm=MODEL in COMMANDS[name][0])
    if at_work is None:
        command.until_busy()
    else:
        command.until(at_work)
    workers = workers_of(command.process.pid, 2, deaf=True) if "in processes" in name else []
    command.interrupt()
    status, said = command.status(), "".join(command.said)
    assert all(map(gone, workers))
    assert status == (0 if name in SERVERS else 130), said
    assert name in SERVERS or "kvabr: interrupted" in said
    assert "Traceback" not in said
    assert "Exception" not in said
    left = {path.name for path in set(folder.iterdir()) - before}
    assert left == ({"kept"} if "kept" in words else set())  # what was done so far


@pytest.mark.parametrize("seconds", STARTING_S)
def test_ctrl_c_ends_a_command_while_it_starts(seconds, folder):
    command = Command(CODEC, folder)
    command.until_busy(seconds)
    command.interrupt()
    assert (command.status(), command.said[-1:]) == (130, ["kvabr: interrupted\n"])


@pytest.mark.parametrize("live", [False, True])
def test_a_second_one_ends_it_whatever_it_does(live, folder):
    (folder / "loops.py").write_text(LOOPS)
    words = ["replay", "--policy", "./loops.py:Loops", "--jobs", 1]
    command = Command([*words, "--live", "--asset", "asset"] if live else words, folder)
    command.until("looping")
    command.interrupt()
    command.until("the first has come")  # two that come together are one
    command.interrupt()
    assert command.status() == -signal.SIGINT
    assert "Traceback" not in "".join(command.said)


TAKEN_APART = """
import sys

class Left:
    def __del__(self):
        print("taken apart", flush=True)

left = Left()
import obstore
from kvabr.cli.main import main

print("printed")
sys.exit(main())
"""


def test_a_command_that_used_obstore_ends_before_its_threads_can_abort_the_process(seaweed):
    """They abort it, with status 134, if they come back to Python while the interpreter is taken apart."""
    place = seaweed.url()
    for words, status in ((("store", "ls", place), 0), (("store", "rm", place, "x"), 1)):
        done = subprocess.run([sys.executable, "-c", TAKEN_APART, *words], capture_output=True, text=True, check=False)  # noqa: S603
        assert (done.returncode, "taken apart" in done.stdout) == (status, False), done.stderr
        assert done.stdout.startswith("printed\n")


INTERRUPTED = """
import os, runpy, signal, sys, weakref

class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def at_once():
    raise KeyboardInterrupt

def in_a_destructor():
    Thing()  # Python ignores exceptions of destructors

def in_a_careless_library():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except:
        pass

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "{where}":
            sys.meta_path.remove(self)
            {how}()
sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = "replay --policy all --starts 4000 --jobs 1".split()
runpy.run_module("kvabr", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("where", "how"),
    [("kvabr.cli.interrupt", "at_once"), ("rich", "in_a_destructor"), ("rich", "in_a_careless_library")],
)
def test_an_interrupt_while_something_is_imported_is_not_lost(where, how):
    """Wherever it comes: the work would take minutes."""
    code = INTERRUPTED.format(where=where, how=how)
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert (done.returncode, done.stderr[-19:]) == (130, "kvabr: interrupted\n")
    assert how == "in_a_destructor" or done.stderr == "kvabr: interrupted\n"  # else Python says that it ignores it
