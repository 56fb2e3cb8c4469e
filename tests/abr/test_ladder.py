"""The columns that plays of long prompts begin with are what the same numbers give group by group."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate

import pytest

from kvabr.abr import Ladder, View
from kvabr.abr.policies.anytime import Anytime
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


@pytest.mark.parametrize("seed", range(40))
def test_the_base_comes_in_the_order_of_what_each_group_gains(seed):
    ladder = Ladder(drawn(seed, layered=bool(seed % 2)))
    missing = {(group, track) for group, track in ((3, ladder.names[-1]), (5, "layer-1")) if seed % 3 == 0}
    view, policy = View(ladder, 2.0, unavailable=missing), Anytime()
    policy.start(view)
    gain = policy._gain
    offers = [policy._best(view, group, ladder.cheapest) for group in range(GROUPS)]
    ranks = [0.0 if offer is None else offer.rank for offer in offers]
    assert policy._order == sorted(range(GROUPS), key=lambda group: (ranks[group], -group))
    assert policy._gain == pytest.approx(gain)  # what it works out for each group changes nothing
