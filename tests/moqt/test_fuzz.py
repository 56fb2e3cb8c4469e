"""A moment of `tools/fuzz` for every target."""

import random

import pytest

from kvabr.moqt import session as session_module
from kvabr.moqt.wire import DRAFTS
from tests.fuzzing import Target, held, mutate, run, targets
from tests.moqt.counting import CountingBuffer
from tests.moqt.raw import Raw

TARGETS = targets()
SLOW = ("server-18", "server-16", "client-18", "client-16")


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input(name):
    rounds = 120 if name in SLOW else 250
    assert run(TARGETS[name], seed=1, rounds=rounds) == rounds


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_taken(name):
    """Else the fuzzing would never get past the first check."""
    target = TARGETS[name]
    for data in target.corpus():
        target.take(data, random.Random(1))


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
    raw.receive(2 if draft.streams else 0, noise)
    assert raw.code is not None
    assert len(parsed) <= 1
    touched = buffer.touched
    assert touched < 2 * len(noise)
    for stream in range(1000):
        raw.receive(stream, noise)
    assert len(parsed) <= 1
    assert buffer.touched == touched
    assert held(raw.session) <= len(noise)


def test_a_target_that_fails_is_found():
    def take(data: bytes, _: random.Random) -> None:
        if len(data) > 3:
            raise KeyError(data)

    with pytest.raises(AssertionError, match=r"seed 7, round \d+: KeyError"):
        run(Target(take, lambda: [b"abc"]), seed=7, rounds=500)


def test_the_same_seed_gives_the_same_inputs():
    seen: list[list[bytes]] = [[], []]
    for inputs in seen:
        run(Target(lambda data, _, inputs=inputs: inputs.append(data), lambda: [b"some bytes"]), seed=3, rounds=50)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 20
    assert mutate(b"", [b""], random.Random(2)) is not None
