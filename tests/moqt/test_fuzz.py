"""A moment of `tools/fuzz` for every target."""

import random

import pytest

from tests.fuzzing import Target, mutate, run, targets

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
