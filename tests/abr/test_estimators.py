import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr.estimators import BUILTIN
from kvabr.player.meter import Meter

samples = st.lists(st.tuples(st.floats(0, 1e8), st.floats(1e-4, 2.0)), min_size=1, max_size=60)


@pytest.mark.parametrize("name", BUILTIN)
@given(samples)
def test_estimates_stay_within_what_was_seen_and_bounds_below_estimates(name, heard):
    estimator = BUILTIN[name]()
    estimator.start(4.0)
    now = 0.0
    for nbytes, seconds in heard:
        now += seconds
        estimator.sample(nbytes, seconds, now)
        assert 0 <= estimator.lower_bound() <= estimator.rate() * (1 + 1e-9)
    rates = [nbytes / seconds for nbytes, seconds in heard]
    # Gathering tiny samples may shift the harmonic mean, but never beyond the extremes seen.
    assert min(rates) * (1 - 1e-6) - 20 <= estimator.rate() <= max(rates) * (1 + 1e-6) + 20


@pytest.mark.parametrize("name", BUILTIN)
def test_nothing_heard_is_zero(name):
    estimator = BUILTIN[name]()
    estimator.start(2.0)
    assert estimator.rate() == estimator.lower_bound() == estimator.ttfb() == 0.0


@pytest.mark.parametrize("name", BUILTIN)
def test_a_steady_link_is_estimated_exactly(name):
    estimator = BUILTIN[name]()
    estimator.start(2.0)
    for tick in range(1, 100):
        estimator.sample(5e4, 0.05, tick * 0.05)
    assert estimator.rate() == pytest.approx(1e6)
    assert estimator.lower_bound() == pytest.approx(1e6)


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "last"])
def test_an_unsteady_link_lowers_the_bound(name):
    estimator = BUILTIN[name]()
    estimator.start(2.0)
    for tick in range(1, 100):
        estimator.sample(1e5 if tick % 2 else 2e4, 0.1, tick * 0.1)
    assert estimator.lower_bound() < 0.8 * estimator.rate()


def test_dual_ewma_believes_drops_at_once_and_rises_slowly():
    estimator = BUILTIN["ewma"]()
    estimator.start(4.0)
    for tick in range(40):
        estimator.sample(1e5, 0.1, tick * 0.1)
    estimator.sample(1e4, 0.1, 4.1)
    estimator.sample(1e4, 0.1, 4.2)
    dropped = estimator.rate()
    assert dropped < 0.75e6
    for tick in range(3):
        estimator.sample(1e5, 0.1, 4.3 + tick * 0.1)
    assert estimator.rate() < 0.97e6


def test_time_to_first_byte_is_the_least_of_the_play():
    estimator = BUILTIN["ewma"]()
    for wait in (0.3, 0.05, *[0.4] * 20):
        estimator.first_byte(wait)
    assert estimator.ttfb() == 0.05


def test_meter_sums_over_transfers_and_forgets_slow_start():
    estimator = BUILTIN["ewma"]()
    meter = Meter(estimator, 4.0)
    meter.first_byte(0.04, 0.04)
    now, rate = 0.04, 1e5
    while rate < 3e6:
        now += 0.05
        meter.received(int(rate * 0.05), now)
        meter.settle(now, idle=False)
        rate *= 2
    for _ in range(4):
        now += 0.05
        meter.received(int(3e6 * 0.05), now)
        meter.settle(now, idle=False)
    assert estimator.rate() > 2.2e6


def test_silence_is_news():
    estimator = BUILTIN["ewma"]()
    meter = Meter(estimator, 2.0)
    meter.first_byte(0.02, 0.02)
    for tick in range(1, 20):
        meter.received(50_000, 0.02 + tick * 0.02)
        meter.settle(0.02 + tick * 0.02, idle=False)
    before = estimator.rate()
    for tick in range(20):
        meter.tick(0.4 + tick * 0.04, waiting=True, idle=False)
    assert estimator.rate() < 0.2 * before
    fresh = BUILTIN["ewma"]()
    dead = Meter(fresh, 2.0)
    for tick in range(20):
        dead.tick(tick * 0.04, waiting=True, idle=True)
    assert fresh.rate() == 0.0
