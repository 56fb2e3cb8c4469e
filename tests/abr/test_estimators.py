import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr.estimators import LOW_SHARE, Prior
from kvabr.abr.plugins import estimators
from kvabr.player.sources import ThroughputSampler

samples = st.lists(st.tuples(st.floats(0, 1e8), st.floats(1e-4, 2.0)), min_size=1, max_size=60)


ESTIMATORS = estimators()  # those of the laboratory, too


@pytest.mark.parametrize("name", ESTIMATORS)
@given(samples)
def test_estimates_stay_within_what_was_seen_and_bounds_below_estimates(name, heard):
    estimator = ESTIMATORS[name]()
    estimator.start(4.0)
    now = 0.0
    for nbytes, seconds in heard:
        now += seconds
        estimator.sample(nbytes, seconds, now)
        assert 0 <= estimator.lower_bound() <= estimator.rate() * (1 + 1e-9)
    rates = [nbytes / seconds for nbytes, seconds in heard]
    # Merging tiny samples may shift the harmonic mean, but never beyond the extremes seen.
    assert min(rates) * (1 - 1e-6) - 20 <= estimator.rate() <= max(rates) * (1 + 1e-6) + 20


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_heard_is_zero(name):
    estimator = ESTIMATORS[name]()
    estimator.start(2.0)
    assert estimator.rate() == estimator.lower_bound() == estimator.ttfb() == 0.0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_steady_link_is_estimated_exactly(name):
    estimator = ESTIMATORS[name]()
    estimator.start(2.0)
    for tick in range(1, 100):
        estimator.sample(5e4, 0.05, tick * 0.05)
    assert estimator.rate() == pytest.approx(1e6)
    # One that learns its bound expects worse than it has seen, but not much.
    assert estimator.lower_bound() == pytest.approx(LOW_SHARE * 1e6 if name == "tracking" else 1e6)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "last"])
def test_an_unsteady_link_lowers_the_bound(name):
    estimator = ESTIMATORS[name]()
    estimator.start(2.0)
    for tick in range(1, 100):
        estimator.sample(1e5 if tick % 2 else 2e4, 0.1, tick * 0.1)
    assert estimator.lower_bound() < min(6e5, 0.95 * estimator.rate())


def test_silence_is_news():
    estimator = ESTIMATORS["ewma"]()
    meter = ThroughputSampler(estimator, 2.0)
    meter.first_byte(0.02, 0.02)
    for tick in range(1, 20):
        meter.received(50_000, 0.02 + tick * 0.02)
        meter.settle(0.02 + tick * 0.02, idle=False)
    before = estimator.rate()
    for tick in range(20):
        meter.tick(0.4 + tick * 0.04, waiting=True, idle=False)
    assert estimator.rate() < 0.2 * before
    fresh = ESTIMATORS["ewma"]()
    dead = ThroughputSampler(fresh, 2.0)
    for tick in range(20):
        dead.tick(tick * 0.04, waiting=True, idle=True)
    assert fresh.rate() == 0.0


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(
    ("nbytes", "seconds", "now"),
    [
        (1e9, 0.0, 2.5), (1e9, -0.1, 2.5), (-1.0, 0.1, 2.5), (math.nan, 0.1, 2.5), (math.inf, 0.1, 2.5),
        (1e9, math.nan, 2.5), (1e9, math.inf, 2.5), (1e9, 1e-300, 2.5), (1e9, 0.1, 1.0), (1e9, 0.1, math.nan),
        (1e9, 0.1, math.inf),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_change_nothing(name, nbytes, seconds, now):
    estimator, clean = ESTIMATORS[name](), ESTIMATORS[name]()
    for one in (estimator, clean):
        one.start(2.0)
        for tick in range(1, 41):
            one.sample(4e4 + 1e4 * (tick % 3), 0.05, tick * 0.05)
    estimator.sample(nbytes, seconds, now)
    for one in (estimator, clean):  # and no trace of it is left
        one.sample(5e4, 0.05, 2.6)
    assert (estimator.rate(), estimator.lower_bound()) == (clean.rate(), clean.lower_bound())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_first_byte_that_cannot_be_is_ignored(name):
    estimator = ESTIMATORS[name]()
    for wait in (math.nan, -1.0, math.inf, 0.05):
        estimator.first_byte(wait)
    assert estimator.ttfb() == 0.05


def fed(estimator, rates, each_s=0.02, begin_s=0.0):
    """Feed samples of equal duration; return their end times."""
    now = begin_s
    for rate in rates:
        now += each_s
        estimator.sample(rate * each_s, each_s, now)
    return now


def test_tracking_notices_a_drop_within_a_few_samples():
    estimator, ewma = ESTIMATORS["tracking"](), ESTIMATORS["ewma"]()
    dice = random.Random(2)
    steady = [1e6 * dice.uniform(0.8, 1.2) for _ in range(100)]
    for one in (estimator, ewma):
        one.start(4.0)
        now = fed(one, steady)
    assert estimator.changes == 0
    for one in (estimator, ewma):
        fed(one, [1e5] * 8, begin_s=now)
    assert estimator.changes == 1
    assert estimator.rate() == pytest.approx(1e5, rel=0.05)
    assert ewma.rate() > 4e5


@pytest.mark.parametrize("walk", [0.0, 0.05])
def test_the_bound_of_tracking_holds_nine_times_of_ten(walk):
    """Return how often noisy random-walk links carry less than the bound in the rest of the play."""
    below = seen = 0
    for seed in range(60):
        dice = random.Random(seed)
        rate, rates = 1e6, []
        for tick in range(200):
            if tick % 10 == 0:
                rate *= math.exp(dice.gauss(0.0, walk))
            rates.append(rate * dice.uniform(0.7, 1.3))
        estimator = ESTIMATORS["tracking"]()
        estimator.start(4.0)
        now = 0.0
        for tick, each in enumerate(rates[:180]):
            now = fed(estimator, [each], begin_s=now)
            if tick >= 10 and tick % 5 == 0:
                rest = rates[tick + 1 :]
                below += sum(rest) / len(rest) < estimator.lower_bound()
                seen += 1
    assert below / seen <= 0.12


def test_a_prior_counts_until_samples_do():
    estimator = ESTIMATORS["tracking"]()
    estimator.prime(Prior(2e6, 0.03))
    estimator.start(4.0)
    assert estimator.rate() == pytest.approx(2e6)
    assert 0 < estimator.lower_bound() < 2e6
    assert estimator.ttfb() == 0.03
    fed(estimator, [5e4])  # possibly slow start
    assert estimator.rate() == pytest.approx(2e6)
    fed(estimator, [1e6] * 60, begin_s=0.02)
    assert estimator.rate() == pytest.approx(1e6, rel=0.05)
    estimator.first_byte(0.2)
    assert estimator.ttfb() == 0.2


@pytest.mark.parametrize("rate", [0.0, 1e-9, 1e12])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_absurd_prior_does_not_last(name, rate):
    estimator = ESTIMATORS[name]()
    estimator.prime(Prior(rate, 0.0, 1.0))
    estimator.start(4.0)
    fed(estimator, [1e6] * 190)
    assert estimator.rate() == pytest.approx(1e6, rel=0.02)
