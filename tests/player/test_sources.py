"""Rates from bytes that come in lumps: what the meter of real transports makes of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean, Prior, Tracking
from kvabr.player.groups import DecodeRates, SharedDecodeRate, family
from kvabr.player.session import Session
from kvabr.player.sources import ChunkedThroughputSampler, ThroughputSampler
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.types.errors import PolicyError, UsageError
from tests.catalogs import catalog
from tests.replay.worlds import world


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


@pytest.mark.parametrize(("factor", "grows"), [(1.1, False), (2.0, True)])
def test_a_told_rate_that_is_exceeded_a_little_is_not_slow_start(factor, grows):
    told = Tracking()
    told.prime(Prior(1e6, 0.02))
    meter = ThroughputSampler(told, 4.0)
    meter.first_byte(0.02, 0.0)
    meter.received(int(factor * 1e6 * 0.05), 0.05)
    meter.settle(0.05, idle=False)
    assert meter.growing is grows


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
    with pytest.raises(PolicyError, match=r"estimator harmonic .*test_sources\.py"):
        meter.settle(0.15, idle=False)


@pytest.mark.parametrize("seconds", [0.0, -0.3, math.nan, math.inf])
def test_a_measurement_that_cannot_be_is_refused_and_a_clock_that_jumps_ignored(seconds):
    with pytest.raises(UsageError):
        DecodeRates(catalog(), {"Int8": seconds})
    rates = DecodeRates(catalog())
    for _ in range(9):
        rates.observe("Int8", 1.0, seconds)
    assert rates.seconds("Int8") == 0.002


def test_two_groups_correct_a_family_and_others_until_they_are_seen():
    rates = DecodeRates(catalog(layered=True))
    rates.observe("AC-5x", 1.0, 8 * 0.004)
    assert rates.correction("AC-5x") == pytest.approx(8**0.5)  # one group may have been held up
    rates.observe("AC-5x", 0.5, 4 * 0.004)
    assert rates.seconds("AC-5x") == pytest.approx(8 * 0.004)
    assert rates.seconds("Int8") == pytest.approx(8 * 0.002)
    rates.observe("Int8", 1.0, 0.002)
    assert rates.seconds("Int8") == 0.002
    assert family("AC-5x") == family("AC-L0") != family("Int8")


def test_plays_that_decode_at_once_have_equal_parts_of_the_decoders():
    rates, plays = DecodeRates(catalog(), latencies={"Int8": 0.01}), 3
    share = SharedDecodeRate(rates, lambda: plays)
    assert share.seconds("Int8") == pytest.approx(3 * 0.002)
    assert share.latency("Int8") == 0.01
    share.observe("Int8", 1.0, 0.002)  # what a thread was at it is not longer for that
    plays = 1
    assert share.seconds("Int8") == rates.seconds("Int8") == 0.002


def test_a_correction_is_bounded():
    rates = DecodeRates(catalog())
    for _ in range(9):
        rates.observe("Int8", 1.0, 1e9)
        rates.observe("Int4", 1.0, 1e-15)
    assert rates.correction("Int8") == pytest.approx(1024)
    assert rates.correction("Int4") == pytest.approx(1 / 1024)


def test_a_rate_of_zero_in_a_catalog_means_unknown():
    rates = DecodeRates(catalog(decode=0.0))
    assert rates.seconds("Int8") == 0.0
    rates.observe("Int8", 0.5, 0.003)
    assert rates.seconds("Int8") == pytest.approx(0.006)
    assert DecodeRates(catalog(decode=0.0), {"Int8": 0.005}).seconds("Int8") == 0.005


def slow_play(policy, scale, rates, offer):
    """A play on a machine that decodes ``scale`` times slower than the catalog says."""
    play = Session(Ladder(offer), 4.0, policy, HarmonicMean(), decode_rates=rates)
    assert play.view.decode_s("Int8") == offer.track("Int8").decode_s
    link = Capacity(world("flat", [1e6]), 0.0, 0.05, slow_start=False)
    return play, Simulator(play, offer, link, rtt_s=0.05, decode_scale=scale).run()


@pytest.mark.parametrize("policy", ["fixed:Int8", "anytime"])
@pytest.mark.parametrize("scale", [8.0, 1.0, 0.25])
def test_a_play_learns_how_slow_its_machine_is(policy, scale):
    offer = catalog(8, layered=True)
    rates = DecodeRates(offer)
    play, record = slow_play(policy, scale, rates, offer)
    track = record.groups[-1].track
    assert rates.correction(track) == pytest.approx(scale)
    assert play.view.decode_s(track) == pytest.approx(scale * offer.track(track).decode_s)
    again, _ = slow_play(policy, scale, DecodeRates(offer), offer)
    assert again.record == record


def test_a_batch_takes_a_latency_and_a_time_per_group():
    rates = DecodeRates(catalog(layered=True), {"AC-5x": 0.001}, {"AC": 0.02})
    assert rates.latency("AC-5x") == rates.latency("AC-L0") == 0.02
    assert rates.latency("Int8") == 0.0
    rates.observe("AC-5x", 1.0, 0.001)
    assert rates.seconds("AC-5x") == pytest.approx(0.001)
    view = Session(Ladder(catalog()), 4.0, "fixed:Int8", HarmonicMean(), decode_rates=rates).view
    assert view.last_decode_s("AC-5x") == pytest.approx(0.021)
    assert view.decode_s("AC-5x") == pytest.approx(0.001)  # one more of a batch
    with pytest.raises(UsageError, match="AC"):
        DecodeRates(catalog(), {}, {"AC": -1.0})
