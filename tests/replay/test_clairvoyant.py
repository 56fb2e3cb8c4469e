"""What the bound depends on; `test_exhaustive` compares it with whole schedules."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.replay.clairvoyant import Clairvoyant
from kvabr.replay.link import Capacity
from kvabr.replay.trace import Trace
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from tests.catalogs import catalog
from tests.counting import lines
from tests.examples import examples

CATALOG = catalog(3, decode=0.0)
FREE = {"time_price": 0.0, "gpu_price": 0.0}


def flat(rate):
    return Capacity(Trace("flat", "test", (0.0,), (rate,), 100.0))


PRICES = {"time_price": 0.01, "gpu_price": 0.01}
ENGINES = ((None, "hole"), (PrefillCost(0.001, 1 / 200), "hole"), (PrefillCost(0.001, 1 / 200), "suffix"))


@examples(40)
@given(st.floats(0.05, 20.0), st.floats(1.0, 4.0), st.sampled_from(ENGINES), st.booleans())
def test_more_of_a_resource_never_costs_more_and_a_higher_price_never_less(share, more, engine, layered):
    offer = catalog(4, decode=20.0, layered=layered, short=40)
    one, two = (Clairvoyant(offer, *engine, decoders=decoders) for decoders in (1, 2))
    link, wider = flat(share * offer.fp16_bytes), flat(more * share * offer.fp16_bytes)
    found = one.best(link, 1.0, **PRICES)
    near = 1.01 * found.objective + 1e-6  # a bound is not computed exactly
    assert one.best(wider, 1.0, **PRICES).objective <= near
    assert two.best(link, 1.0, **PRICES).objective <= near
    assert one.best(link, 2.0, **PRICES).objective <= near
    for prices in ({"time_price": 0.01 * more, "gpu_price": 0.01}, {"time_price": 0.01, "gpu_price": 0.01 * more}):
        assert found.objective <= 1.01 * one.best(link, 1.0, **prices).objective + 1e-6


def test_the_end_is_where_the_next_step_is_not_worth_its_time():
    """On a fast link all tracks come within milliseconds; a price of time decides which of them is worth its bytes."""
    link = flat(20.0 * CATALOG.fp16_bytes)
    clairvoyant = Clairvoyant(CATALOG, None, "hole")
    ends = [clairvoyant.best(link, 1.0, time_price=price, gpu_price=0.0).end_s for price in (0.0, 1e-5, 1e-2, 1.0, 1e3)]
    assert ends[0] == 1.0
    assert ends == sorted(ends, reverse=True)
    assert ends[1] == pytest.approx(0.05, rel=0.1)  # everything
    least = min(sum(track.bytes) for track in CATALOG.tracks) / (20.0 * CATALOG.fp16_bytes)
    assert ends[-1] == pytest.approx(least, rel=0.01)


def test_a_round_trip_and_a_lookup_count():
    link = flat(20.0 * CATALOG.fp16_bytes)
    clairvoyant = Clairvoyant(CATALOG, None, "hole")
    prices = {"time_price": 1.0, "gpu_price": 0.0}
    at_once = clairvoyant.best(link, 1.0, **prices)
    later = clairvoyant.best(link, 1.0, **prices, first_byte_s=0.3)
    assert later.objective == pytest.approx(at_once.objective + 0.3, rel=0.01)
    begun = clairvoyant.best(link, 1.0, **prices, begun_s=0.3)
    assert begun.objective == pytest.approx(at_once.objective + 0.3, rel=0.01)
    assert begun.end_s == pytest.approx(at_once.end_s + 0.3, rel=0.01)
    assert not clairvoyant.best(link, 1.0, **prices, begun_s=1.0).feasible


def test_where_the_cheapest_cache_is_as_bad_as_a_miss_a_late_end_counts():
    """A schedule may then be late for a better cache: the bound must not be above it."""
    bad = replace(CATALOG, tracks=tuple(
        replace(track, loss=(2.0,) * 3) if track.name == "AC-5x" else replace(track, loss=(0.0,) * 3)
        for track in CATALOG.tracks if track.name in {"AC-5x", "FP16"}
    ))  # fmt: skip
    late_s = 1.1
    bound = Clairvoyant(bad, None, "hole").best(flat(bad.track("FP16").total_bytes / late_s), 1.0, **PRICES)
    assert bound.feasible
    assert MISS_PENALTY < bound.objective <= MISS_PENALTY + 0.1 + 0.01 * late_s + 1e-6
    assert bound.objective < bound.least_loss
    assert bound.end_s == pytest.approx(late_s, rel=0.01)


@pytest.mark.parametrize("mode", ["hole", "suffix"])
def test_the_work_per_group_does_not_grow_with_the_prompt(mode):
    def work(groups):
        offer = catalog(groups, layered=True)
        link, cost = flat(0.3 * offer.fp16_bytes / 2.0), PrefillCost.from_rate(offer.tokens / 1.5)
        return lines(lambda: Clairvoyant(offer, cost, mode).best(link, 2.0, time_price=1e-3, gpu_price=1e-3)) / groups

    work(8)  # whatever is loaded once is now
    assert work(1024) <= 1.6 * work(64)
