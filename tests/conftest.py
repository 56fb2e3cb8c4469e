"""Shared by all tests: settings, the real model loaded once, and a small asset that was really encoded."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvabr.engines.transformers.model_loader import LoadedModel
    from kvabr.store.asset import Asset
    from tests.seaweed import Seaweed

# Shells start background jobs with Ctrl-C ignored, and some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in parallel, and threads that wait for each other spin.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ["KVABR_CONFIG"] = ""  # the developer's own file is not for the tests
_HOME = tempfile.TemporaryDirectory(prefix="kvabr-tests-")
os.environ["XDG_STATE_HOME"] = _HOME.name  # development certificates: one for all tests of a process
os.environ.pop("COLUMNS", None)  # xdist sets it in its processes; commands would wrap lines that nobody reads

ASSET_TOKENS = 300
"""Three groups, the last one short."""
_MODEL_FIXTURES = {"loaded", "encoded"}
_LONG = {"model", "process", "browser", "slow"}
_FIRST = (
    *("test_tutorial.py", "test_smollm2.py", "test_wrong_command_lines.py", "test_regret.py", "test_same_bytes.py"),
    *("test_interrupts.py", "test_long_prompts.py", "test_liars.py", "test_fetch.py"),
)
"""Files that take longest, about in that order; some of their tests belong to the quick run.

Those that need the encoded asset are apart, or one process would wait while another encodes.
"""


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the processes that run tests: all but the one that only hands them out."""
    if getattr(config.option, "numprocesses", None):
        return
    try:
        import hypothesis
        import torch
    except ImportError as error:
        raise pytest.UsageError(
            f"the tests need {error.name}: run tools/test, which makes their environment (or tools/setup-venv, then "
            ".venv/bin/python -m pytest)"
        ) from error

    torch.set_num_threads(1)
    from tests.examples import PROFILE, of_profile

    # However slow the machine, the examples are the same, unless new ones are wanted.
    patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("same", derandomize=True, **patient)
    hypothesis.settings.register_profile("fast", derandomize=True, max_examples=of_profile(100), **patient)
    hypothesis.settings.register_profile("search", **patient)
    hypothesis.settings.load_profile(PROFILE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a fixture of the real model, or of a server; begin with the files that take long."""
    for item in items:
        if "seaweed_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.process)
        if _MODEL_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.model)
    # Whichever process is done first takes the next file, so that short ones at the end make all end together.
    long = {item.path for item in items if _LONG & {mark.name for mark in item.iter_markers()}}
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: (places.get(item.path.name, len(places)), item.path not in long))


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what is there now: 700,000 objects take it 0.4 s each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let everything be freed at the end: some libraries complain about what is not."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped by reason, with the command that runs it: what stands behind the reason's colon."""
    files: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = str(report.longrepr[-1]).removeprefix("Skipped: ")
        files.setdefault(reason, []).append(report.nodeid.partition("::")[0])
    if files:
        terminalreporter.section("skipped, and what runs it")
    for reason, where in sorted(files.items()):
        why, _, command = reason.partition(": ")
        terminalreporter.line(f"{len(where)} of {' '.join(sorted(set(where)))}: {why}")
        terminalreporter.line(f"    {command or 'needs another machine, or does not apply here'}")


@pytest.fixture(autouse=True)
def _no_profiles() -> None:
    """Forget the codec profiles that other tests fetched: with one at hand, a play has more tracks to choose from."""
    if (memory := sys.modules.get("kvabr.client.memory")) is not None:
        memory._profiles.clear()


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    from tests.seaweed import Seaweed

    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture
def seaweed(seaweed_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    """A real S3 server, and the credentials of one who may do everything in the environment."""
    for name, value in seaweed_server.environment().items():
        monkeypatch.setenv(name, value)
    return seaweed_server


@cache
def _smollm2() -> LoadedModel:
    """Load SmolLM2, once a process; it takes many seconds."""
    from kvabr.engines.transformers.model_loader import load_model

    return load_model("smollm2")


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """SmolLM2 from its package; fails, and says how to install it, where that is missing."""
    return _smollm2()


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Asset:
    """An asset encoded by the command itself, once for all test processes; losses are measured on a short answer."""
    from kvabr.cli.main import main
    from kvabr.engines.transformers import model_loader
    from kvabr.publish import tails
    from kvabr.publish.texts import measuring_texts
    from kvabr.store.locations import open_asset

    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "encoded"
    folder.mkdir(exist_ok=True)
    out = folder / "asset"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            (folder / "text.txt").write_text(measuring_texts()["manual"][:4000])
            words = ["encode", "--text", folder / "text.txt", "--tokens", ASSET_TOKENS, "--continuation", 24]
            _smollm2()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model_loader, "load_model", lambda *_, **__: _smollm2())
                patch.setattr(model_loader, "load_tokenizer", lambda _: ("", _smollm2().tokenizer))
                patch.setattr(tails, "QUESTIONS", tails.QUESTIONS[1:2])
                patch.setattr(tails, "ANSWER_TOKENS", 8)
                assert main([*map(str, words), "--out", str(out), "--json", str(folder / "encode.json")]) == 0
    return open_asset(out)


@pytest.fixture(scope="session")
def asset(encoded: Asset) -> Asset:
    """The encoded asset; tests must not write into it."""
    return encoded
