"""Decode rates: the catalog's or the measured ones, and what decoding says of them. No clock."""

from __future__ import annotations

import math

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.player.builder import new_session
from kvabr.player.decode_queue import DecodeRates, DecodeShare, family
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.types.errors import UsageError
from tests.catalogs import catalog
from tests.replay.worlds import world


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
    share = DecodeShare(rates, lambda: plays)
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
    play = new_session(Ladder(offer), 4.0, policy, HarmonicMean(), decode_rates=rates)
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
    view = new_session(Ladder(catalog()), 4.0, "fixed:Int8", HarmonicMean(), decode_rates=rates).view
    assert view.last_decode_s("AC-5x") == pytest.approx(0.021)
    assert view.decode_s("AC-5x") == pytest.approx(0.001)  # one more of a batch
    with pytest.raises(UsageError, match="AC"):
        DecodeRates(catalog(), {}, {"AC": -1.0})
