"""Plays over two links, of which one is slow for a moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvabr.data import default_catalog
from kvabr.player.builder import new_session
from kvabr.replay import experiment
from kvabr.replay.experiment import Experiment, ReplayOptions
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
