"""The bound against brute force on small cases, and against every policy."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.replay.clairvoyant import Clairvoyant
from kvabr.replay.link import Capacity
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog
from tests.examples import examples

CATALOG = catalog(3, decode=0.0)


def flat(rate):
    return Capacity(Trace("flat", "test", (0.0,), (rate,), 100.0))


def brute(offer, nbytes, free=()):
    """Return the least loss of any choice of whole groups within a number of bytes; groups in ``free`` cost nothing."""
    best = float("inf")
    needed = [group for group in range(offer.groups) if group not in free]
    for choice in product(offer.tracks, repeat=len(needed)):
        size = sum(track.bytes[group] for group, track in zip(needed, choice, strict=True))
        if size <= nbytes:
            best = min(best, sum(track.loss[group] for group, track in zip(needed, choice, strict=True)))
    return best


@given(st.floats(0.05, 3.5))
def test_bound_is_below_and_near_the_best_whole_group_cache(share):
    nbytes = share * CATALOG.fp16_bytes / 3
    bound = Clairvoyant(CATALOG, None, "hole").bound(flat(nbytes), 1.0)
    best = brute(CATALOG, nbytes)
    if best == float("inf"):
        assert not bound.feasible
        return
    assert bound.feasible
    assert bound.loss <= best + 1e-12
    steps = max(track.loss[group] for track in CATALOG.tracks for group in range(3) if track.name == "AC-5x")
    assert best - bound.loss <= steps + 1e-12


@examples(60)
@given(st.floats(0.02, 3.0), st.integers(0, 3))
def test_hole_bound_is_below_every_choice_of_computed_groups(share, computable):
    nbytes = share * CATALOG.fp16_bytes / 3
    cost = PrefillCost(0.0, 1.0 / (128 * (computable + 0.5)))
    bound = Clairvoyant(CATALOG, cost, "hole").bound(flat(nbytes), 1.0)
    best = min(
        brute(CATALOG, nbytes, free) for count in range(computable + 1) for free in combinations(range(3), count)
    )
    assert bound.loss <= best + 1e-9
    assert bound.feasible or best == float("inf")


@given(st.floats(0.02, 3.0), st.floats(0.05, 3.0))
def test_suffix_bound_matches_the_best_cut(share, whole_s):
    nbytes = share * CATALOG.fp16_bytes / 3
    cost = PrefillCost(0.0, whole_s / (3 * 128))
    bound = Clairvoyant(CATALOG, cost, "suffix").bound(flat(nbytes), 1.0)
    best = brute(CATALOG, nbytes)
    for cut in range(3):
        left = 1.0 - whole_s * (3 - cut) / 3
        if left >= 0:
            best = min(best, brute(CATALOG, nbytes * left, range(cut, 3)) if cut else 0.0)
    assert bound.loss <= best + 1e-9
    assert bound.feasible or best == float("inf")


def test_layers_lower_the_bound():
    layered = catalog(3, decode=0.0, layered=True)
    link = flat(0.08 * CATALOG.fp16_bytes)
    assert not Clairvoyant(CATALOG, None, "hole").bound(link, 1.0).feasible
    assert Clairvoyant(layered, None, "hole").bound(link, 1.0).feasible


def test_decode_time_counts():
    slow = catalog(3, decode=100.0)
    link = flat(0.2 * slow.fp16_bytes)
    assert Clairvoyant(CATALOG, None, "hole").bound(link, 1.0).feasible
    assert not Clairvoyant(slow, None, "hole").bound(link, 1.0).feasible


def test_exact_when_everything_fits():
    bound = Clairvoyant(CATALOG, None, "hole").bound(flat(2.0 * CATALOG.fp16_bytes), 1.0)
    assert bound.loss == pytest.approx(1e-7)
