"""Rates from bytes that come in lumps: what the meter of real transports makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr.estimators import HarmonicMean
from kvabr.player.throughput_sampler import ChunkedThroughputSampler, ThroughputSampler
from kvabr.types.errors import PolicyError


class Kept(HarmonicMean):
    def __init__(self):
        super().__init__()
        self.samples = []

    def sample(self, nbytes, seconds, now):
        self.samples.append((nbytes, seconds))
        super().sample(nbytes, seconds, now)


def carried(meter, rate, lumps, *, begin=0.1, tick=0.04, waited=0.1):
    """Lumps that a link of ``rate`` brings one after the other, told of when they are complete; ticks in between."""
    now, next_tick = begin + lumps[0] / rate, begin + tick
    meter.first_byte(waited, now)
    for index, lump in enumerate(lumps):
        if index:
            now += lump / rate
        while next_tick < now:
            meter.tick(next_tick, waiting=True, idle=False)
            next_tick += tick
        meter.received(lump, now)
    meter.settle(now, idle=True)
    return now


@given(st.floats(1e6, 1e9), st.lists(st.integers(100, 65536), min_size=30, max_size=60))
def test_every_sample_is_the_rate_of_the_link_or_a_bound_from_below(rate, lumps):
    kept = Kept()
    carried(ChunkedThroughputSampler(kept, 2.0), rate, lumps)
    measured = [nbytes / seconds for nbytes, seconds in kept.samples]
    assert measured
    if sum(lumps[1:]) / rate > 0.2:
        assert measured == [pytest.approx(rate, rel=1e-6)] * len(measured)
    assert all(value <= rate * (1 + 1e-6) for value in measured)


@pytest.mark.parametrize("rtt_s", [0.02, 0.08])
def test_slow_start_goes_on_behind_a_first_sample_of_a_moment(rtt_s):
    meter = ThroughputSampler(HarmonicMean(), 1.0)
    meter.first_byte(rtt_s, 0.1)
    rate, now = 1e6, 0.1
    for _ in range(4):  # a window in each round trip
        for _ in range(8):
            now += rtt_s / 8
            meter.received(int(rate * rtt_s / 8), now)
            meter.settle(now, idle=False)
        assert meter.growing
        rate *= 1.8
    for _ in range(24):  # the link is full
        now += rtt_s / 8
        meter.received(int(rate * rtt_s / 8), now)
        meter.settle(now, idle=False)
    assert not meter.growing
    assert meter.estimates()[0] == pytest.approx(rate, rel=0.3)


def test_what_came_at_once_is_a_bound_from_below():
    kept = Kept()
    meter = ChunkedThroughputSampler(kept, 2.0)
    carried(meter, 1e12, [64_000], waited=0.02)
    assert kept.samples == [(64_000, pytest.approx(0.02))]
    carried(meter, 1e12, [640], begin=0.3, waited=0.02)  # less than a packet says nothing
    carried(meter, 1e12, [32_000], begin=0.4, waited=0.02)  # and a lower bound nothing new
    assert len(kept.samples) == 1
    carried(meter, 1e12, [128_000], begin=0.5, waited=0.02)
    assert kept.samples[1] == (128_000, pytest.approx(0.02))


def test_a_link_that_stands_still_in_the_middle_of_a_transfer_is_news():
    kept = Kept()
    meter = ChunkedThroughputSampler(kept, 2.0)
    carried(meter, 1e6, [20_000] * 10)
    before = kept.rate()
    meter.first_byte(0.02, 1.0)
    meter.received(1000, 1.0)
    for step in range(1, 20):
        meter.tick(1.0 + 0.04 * step, waiting=True, idle=False)
    assert kept.rate() < before / 4
    assert sum(seconds for nbytes, seconds in kept.samples if not nbytes) > 0.5


def test_a_first_byte_and_a_wait_at_the_same_time_are_no_sample():
    kept = Kept()
    meter = ThroughputSampler(kept, 2.0)
    meter.first_byte(0.1, 1.0)
    meter.received(1200, 1.0)
    meter.waited(1.0)
    assert kept.samples == []
    meter.received(50_000, 1.5)
    meter.settle(1.5, idle=True)
    assert [seconds for _, seconds in kept.samples] == [0.5]


def test_time_in_which_nothing_is_asked_is_no_silence():
    """As of a source that others are preferred to: what is asked of it then has only begun to be waited for."""
    asked = HarmonicMean()
    sampler = ThroughputSampler(asked, 4.0)
    sampler.first_byte(0.02, 0.02)
    sampler.received(80_000, 0.1)
    sampler.settle(0.1, idle=True)
    before = sampler.estimates()
    for step in range(20):
        sampler.tick(0.1 + 0.08 * step, waiting=False, idle=True)
    sampler.tick(1.7, waiting=True, idle=True)
    assert sampler.estimates() == before
    sampler.tick(3.5, waiting=True, idle=True)
    assert sampler.estimates()[0] < before[0]


@pytest.mark.parametrize("wrong", [lambda: None, lambda: "20 ms", lambda: 1 / 0])
def test_an_estimator_whose_first_byte_is_nonsense_is_named(wrong):
    class Odd(HarmonicMean):
        def ttfb(self):
            return wrong()

    meter = ThroughputSampler(Odd(), 1.0)
    meter.first_byte(0.02, 0.1)
    meter.received(80_000, 0.15)
    with pytest.raises(PolicyError, match=r"estimator harmonic .*test_throughput_sampler\.py"):
        meter.settle(0.15, idle=False)
