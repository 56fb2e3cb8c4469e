"""Plays over two links, of which one is slow for a moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvabr.abr.estimators import HarmonicMean
from kvabr.data import default_catalog, traces_folder
from kvabr.player.builder import new_session
from kvabr.player.throughput_sampler import SourceSamplers
from kvabr.replay import experiment
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.readers import read
from kvabr.replay.trace import Trace
from kvabr.types.events import RequestCancelled, RequestSent


@pytest.mark.parametrize(("slow", "until_s"), [(1e3, 0.3), (2e4, 0.3), (5e4, 0.3)])
def test_a_source_that_was_slow_for_a_moment_is_tried_again(slow, until_s):
    steady = Trace("steady", "made", (0.0,), (3e6,), 60.0)
    other = Trace("other", "made", (0.0, 0.1, until_s), (1e6, slow, 4e6), 60.0)
    options = ReplayOptions(4.0, 0.02, links=(other,), slow_start=False)
    outcome = Experiment(default_catalog(), options).play(steady, 0.0, "anytime", log=True)
    asked = [0, 0]
    for event in outcome.log:
        if isinstance(event, RequestSent) and event.t > 1.0:
            asked[event.source] += event.bytes
    assert asked[1] > asked[0] / 2 > 0  # nothing, if it is left alone
    assert outcome.run["objective"] < 1.35 * outcome.run["clairvoyant_objective"]  # 2.0 and 2.1 then


@pytest.mark.parametrize(("rates", "growing"), [((1e6, 8e6), True), ((8e6, 1e6), False)])
def test_slow_start_of_a_source_that_brings_little_is_not_that_of_the_play(rates, growing):
    """The first source brings the same all the time, the second twice as much in each sample."""
    samplers = SourceSamplers([HarmonicMean(), HarmonicMean()], 4.0, chunked=False)
    for source in range(2):
        samplers[source].first_byte(0.02, 0.02)
    for step in range(1, 5):
        samplers[0].received(int(0.02 * rates[0]), 0.02 + 0.02 * step)
        samplers[1].received(int(0.02 * rates[1] / 2 ** (4 - step)), 0.02 + 0.02 * step)
        for source in range(2):
            samplers[source].settle(0.02 + 0.02 * step, idle=False)
    assert [samplers[source].growing for source in range(2)] == [False, True]
    assert samplers.growing == growing


def test_a_silent_source_is_tried_with_upgrades_too():
    """Both break off, the second for good; a policy asks for no upgrades where the links seem to be dead."""
    (drive,) = read(traces_folder() / "mmwave-drive.csv")
    turned = replace(drive, name="turned", rates=(*drive.rates[866:], *drive.rates[:866]))
    options = ReplayOptions(4.0, 0.02, 0.3, links=(turned,))
    outcome = Experiment(default_catalog(), options).play(drive, 76.6036, "anytime", log=True)
    assert any(isinstance(event, RequestSent) and event.source == 0 and event.t > 3.0 for event in outcome.log)
    assert (
        outcome.run["objective"] < 2 * outcome.run["clairvoyant_objective"]
    )  # 4.4 if nothing is asked of it, 2.3 if one group


@pytest.mark.parametrize("offers", [[None, {"AC-L1", "FP16"}], None], ids=["few tracks", "three sources"])
def test_silent_sources_are_not_tried_without_end(monkeypatch, offers):
    """With what one does not have, or with what another is tried with already."""
    if offers:
        first = Trace("first", "made", (0.0, 0.12, 0.45), (8e6, 2e5, 1e3), 60.0)
        others = (Trace("second", "made", (0.0, 0.25), (3e6, 0.0), 60.0),)
    else:
        first = Trace("first", "made", (0.0, 0.6, 0.9), (3e6, 1e3, 0.0), 60.0)
        second = Trace("second", "made", (0.0, 0.06), (8e6, 0.0), 60.0)
        others = (second, replace(second, name="third", times=(0.0, 0.1)))

    def with_offers(*arguments, **options):
        return new_session(*arguments, **options | {"offers": offers or options["offers"]})

    monkeypatch.setattr(experiment, "new_session", with_offers)
    options = ReplayOptions(4.0, 0.02, 0.3 if offers else None, links=others)
    outcome = Experiment(default_catalog(), options).play(first, 0.0, "anytime", log=True)
    why = Counter(event.reason for event in outcome.log if isinstance(event, RequestCancelled))
    assert why["a silent source is tried again"] < 8
