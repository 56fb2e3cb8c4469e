"""A moment of `tools/fuzz` for every target, and all inputs of the corpora."""

import random
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from kvabr.moqt import session as session_module
from kvabr.moqt.wire import DRAFTS
from tests.fuzz import corpora, sanitized
from tests.fuzz.campaign import NATIVE
from tests.fuzz.mutation import run
from tests.fuzz.registry import TARGETS
from tests.fuzz.sessions import held
from tests.fuzz.target import Target, TooSlowError, in_time
from tests.moqt.counting import CountingBuffer
from tests.moqt.raw import Raw
from tests.scripts import run_tool

ROUNDS = {"sessions": 400, "groups": 300, "traces": 150, "buckets": 150, "listings": 200, "stored": 400}
MAX_MEMORY = 96 << 20
"""Bytes that Python may take for one input of a few kilobytes; reading a file takes its bound, 64 MB, for a moment."""


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input(name):
    rounds = ROUNDS.get(name, 800)
    fed = run(TARGETS[name], seed=1, rounds=rounds)
    assert fed.inputs == rounds
    assert 0 < fed.accepted < rounds


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: apt-get install gcc")
@pytest.mark.parametrize("name", NATIVE)
def test_a_native_harness_fits_the_code(name):
    file = Path(__file__).parent / "native" / f"{name}.c"
    subprocess.run(["cc", "-fsyntax-only", "-Wall", "-Werror", f"-I{sanitized.ROOM}", file], check=True)  # noqa: S603, S607


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name):
    """All code that guided runs have reached is reached again, by input that is taken as it should be."""
    target = TARGETS[name]
    for data in corpora.read(name).inputs:
        with in_time():
            target.take(data)


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_accepted(name):
    """Else the fuzzing would never get past the first check. They take little memory."""
    target = TARGETS[name]
    for data in target.valid():
        assert target.take(data), data
        assert len(data) <= target.most_bytes
    tracemalloc.start()
    try:
        for data in target.valid():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            target.take(data)
            assert tracemalloc.get_traced_memory()[1] - before < MAX_MEMORY
    finally:
        tracemalloc.stop()


def test_corpora_are_small():
    sizes = {path.stem: path.stat().st_size for path in corpora.FOLDER.glob("*.txt")}
    assert sum(sizes.values()) < 1 << 20
    assert set(sizes) <= {*TARGETS, *NATIVE}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_cheap_to_refuse(draft, seed, monkeypatch):
    """Counted: one message is parsed, no byte is copied more than twice, and nothing is done for what follows."""
    parsed = []
    decode = session_module.decode
    monkeypatch.setattr(session_module, "decode", lambda *each, **more: parsed.append(each) or decode(*each, **more))
    raw = Raw(draft, client=False)
    parsed.clear()
    buffer = raw.session._control_parser._buffer = CountingBuffer()
    noise = random.Random(seed).randbytes(1 << 18)
    raw.receive(2, noise)
    assert raw.code is not None
    assert len(parsed) <= 1
    touched = buffer.touched
    assert touched < 2 * len(noise)
    for stream in range(1000):
        raw.receive(stream, noise)
    assert len(parsed) <= 1
    assert buffer.touched == touched
    assert held(raw.session) <= len(noise)


def picky(data: bytes) -> bool:
    if len(data) > 3:
        raise KeyError(data)
    return True


def test_a_target_that_fails_is_found():
    with pytest.raises(AssertionError, match=r"seed 7, round \d+: KeyError"):
        run(Target(picky, lambda: [b"abc"]), seed=7, rounds=500)


def test_what_takes_too_long_is_stopped():
    def forever() -> None:
        while True:
            pass

    with pytest.raises(TooSlowError), in_time(0.01):
        forever()
    with in_time():
        pass


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--list",), 0, "catalogs"),
        (("names", "--seconds", "0.1"), 0, "accepted"),
        (("nothing",), 2, "unknown target nothing; choose from messages"),
        (("coder",), 2, "with --guided"),
    ],
)
def test_the_command(arguments, status, says):
    done = run_tool("fuzz", *arguments)
    assert done.returncode == status
    assert says in done.stdout + done.stderr
