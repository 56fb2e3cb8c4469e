"""What a profile says of its texts: parts of them are recognised, others are not, and damage is refused."""

from __future__ import annotations

import base64
import random
from dataclasses import replace

import pytest

from kvabr.codec.calibration_fingerprint import MOST_MARKS, RUN, WINDOW, Seen, marks_of
from kvabr.codec.profile import Profile
from kvabr.types.errors import FormatError
from tests import kvdata

DICE = random.Random(5)
TEXT = DICE.choices(range(40_000), k=5000)
OTHER = DICE.choices(range(40_000), k=5000)


@pytest.fixture(scope="module")
def seen():
    return Seen.of({"one": "what it says", "two": "what else"}, [("one", TEXT[:1000]), ("one", TEXT[2000:3000])])


def test_contexts_are_recognised_wherever_they_begin(seen):
    assert seen.share(TEXT[:1000]) == 1.0
    assert seen.share(TEXT[1000:2000]) == seen.share(OTHER) == 0.0
    assert 0.4 < seen.share(TEXT[500:1500]) < 0.6
    assert 0.4 < seen.share([*OTHER[:500], *TEXT[2100:2600]]) < 0.6


def test_any_run_that_is_long_enough_leaves_a_mark(seen):
    for start in range(2000, 2800, 37):
        assert seen.share([*OTHER[:300], *TEXT[start : start + RUN + WINDOW - 1], *OTHER[300:600]]) > 0


def test_marks_are_the_same_on_every_machine():
    assert [int(mark) for mark in marks_of(list(range(40)))] == [598692272594970376]


def test_a_profile_keeps_it(seen):
    profile = kvdata.profile(kvdata.spec(4, 2, 32))
    made = replace(profile, seen=seen)
    read = Profile.from_bytes(made.to_bytes())
    assert read.digest == made.digest != profile.digest
    assert read.seen is not None
    assert read.seen.to_json() == seen.to_json()
    assert read.seen.share(TEXT[:1000]) == 1.0
    assert Profile.from_bytes(profile.to_bytes()).seen is None


@pytest.mark.parametrize(
    "change",
    [
        *({"texts": bad} for bad in (3, [["a"]], [["a", "00", 1]], [["a" * 100, "00" * 32, 1]])),
        *({"texts": bad} for bad in ([["a", "00" * 32, -1]], [["a", "00" * 32, 1]] * 300)),
        *({"marks": base64.b64encode(bad).decode()} for bad in (b"1234567", bytes(8 * (MOST_MARKS + 1)))),
        *({"marks": bad} for bad in ("!", 7)),
    ],
)
def test_damage_is_refused(seen, change):
    with pytest.raises(FormatError, match="profile"):
        Seen.from_json(seen.to_json() | change)
    with pytest.raises(FormatError, match="profile"):
        Seen.from_json([])
