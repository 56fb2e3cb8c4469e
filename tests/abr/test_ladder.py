"""The columns that plays of long prompts begin with are what the same numbers give group by group."""

import random
from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate

import pytest

from kvabr.abr import Ladder
from tests.catalogs import catalog

GROUPS = 20


def drawn(seed, *, layered):
    """A catalog whose groups differ in everything; many options are useless, equal, or on one line."""
    dice, offer = random.Random(seed), catalog(GROUPS, layered=layered)
    return replace(
        offer,
        tracks=tuple(
            replace(
                track,
                bytes=tuple(dice.randrange(1, 30) for _ in range(GROUPS)),
                loss=tuple(dice.choice([0.0, 0.125, 0.25, 0.5, dice.random()]) for _ in range(GROUPS)),
            )
            for track in offer.tracks
        ),
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_price_of_a_byte_is_that_of_the_step_that_would_be_next(seed):
    ladder = Ladder(drawn(seed, layered=bool(seed % 2)))
    steps = ladder.layered_steps
    spent = list(accumulate(step.bytes for step in steps))
    for spare in range(spent[-1] + 2):
        index = bisect_left(spent, spare)
        assert ladder.price(spare) == pytest.approx(steps[index].worth if index < len(steps) else 0.0)
    assert ladder.price(-1) == float("inf")
