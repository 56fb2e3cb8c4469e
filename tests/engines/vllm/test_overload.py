"""More requests at once than link and engine can serve: those are in time that can be together."""

import sys

import pytest

from kvabr.engines.vllm.shares import Demand, divide
from kvabr.player.groups import DecodeRates
from tests.engines.vllm.overload import Asked, at_once, engine_of, feasible, published

COUNT, TOKENS, DEADLINE_S = 24, 64, 2.0


@pytest.fixture(autouse=True)
def _decoding_as_the_catalog_says(monkeypatch):
    """Threads decode in real seconds, which the clock of these plays does not count."""
    monkeypatch.setattr(DecodeRates, "observe", lambda *_: None)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    return published(tmp_path_factory.mktemp("crowd"), COUNT, TOKENS)


@pytest.mark.parametrize(("carried", "computed"), [(48, 6), (6, 6), (6, 12)])
@pytest.mark.parametrize("deadlines", [(DEADLINE_S,), (DEADLINE_S, DEADLINE_S / 2)])
def test_three_of_four_that_could_be_in_time_are(crowd, carried, computed, deadlines):
    """``carried``: caches that the link carries by the deadline, of 24; ``computed``: prompts, of the engine."""
    library, prompts, catalog = crowd
    asked = [Asked(f"r{n}", ids, deadlines[n % len(deadlines)], catalog) for n, ids in enumerate(prompts)]
    rate = carried * min(track.total_bytes for track in catalog.tracks) / DEADLINE_S
    cost = engine_of(computed, TOKENS, DEADLINE_S)
    met = at_once(library, asked, rate, cost)
    assert met >= 0.75 * feasible(asked, rate, cost)
    assert all(one.ttft_s > 0 for one in asked)


def loads(*what, begun=False):
    return [Demand(f"r{n}", 2.0, nbytes, 0.01, computed_s, begun=begun) for n, (nbytes, computed_s) in enumerate(what)]


def divided(some, rate=100.0):
    done = divide(some, rate, now=0.0, ttfb_s=0.0, engine_s=0.0)
    return [[load.request for load in part] for part in (done.played, done.computed, done.late)]


def test_those_are_computed_that_cost_the_engine_least_for_what_they_spare_the_link():
    assert divided(loads((90, 1.0), (90, 0.1), (90, 0.5))) == [["r0", "r2"], ["r1"], []]


def test_what_the_engine_has_no_time_for_is_late_so_that_the_others_are_not():
    played, computed, late = divided(loads(*[(150, 1.5)] * 4))
    assert (len(played), len(computed), len(late)) == (1, 1, 2)


def test_dividing_a_crowd_takes_steps_for_each_of_it_and_not_for_each_pair():
    """vLLM's scheduler waits for it."""
    crowd = [Demand(f"r{n}", 2.0 + n * 1e-3, 40 + n % 7, 0.01, 0.5 + n % 5 * 0.1) for n in range(500)]
    steps = 0

    def count(frame, event, _):
        nonlocal steps
        steps += event == "call"

    sys.setprofile(count)
    try:
        done = divide(crowd, 1000.0, now=0.0, ttfb_s=0.0, engine_s=0.0)
    finally:
        sys.setprofile(None)
    assert min(map(len, (done.played, done.computed, done.late))) > 0
    assert steps < 100 * len(crowd)
