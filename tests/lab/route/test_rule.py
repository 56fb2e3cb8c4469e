"""Decisions, their reasons, and a router's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr_lab.route import (
    PROBE_BYTES,
    PROBE_WAIT_S,
    CacheSize,
    PrefillSite,
    RouteLink,
    Router,
    RouteRequest,
    decide,
)
from tests.test_imports import loaded

SLOW, FAST = PrefillCost.from_rate(1000), PrefillCost.from_rate(10_000)
SIZE = CacheSize(1000.0)
LINK = RouteLink(1e7, 0.04)


def route(tokens, *, local=None, remote=None, link=LINK, both=False, **options):
    options["both"] = both
    return decide(tokens, local or PrefillSite(SLOW), remote or PrefillSite(FAST), link, SIZE, **options)


def test_short_prompts_stay_and_long_ones_go():
    assert route(20).place == "local"
    long = route(20_000)
    assert long.place == "remote"
    assert long.met is None
    assert "against local prefill 20.00 s (mostly prefill)" in long.reason


def test_a_deadline_is_judged_by_the_lower_bound():
    link = RouteLink(1.2e6, 0.04, bound=0.9e6)
    assert route(1000, link=link).place == "remote"
    sure = route(1000, link=link, deadline_s=1.05)
    assert (sure.place, sure.met) == ("local", True)
    assert "may miss the deadline" in sure.reason


def test_the_beginning_is_computed_here_while_a_slow_link_brings_the_end():
    found = route(20_000, link=RouteLink(1e6, 0.04), both=True)
    assert found.place == "both"
    assert found.chosen.front_tokens == pytest.approx(10_480, abs=130)
    assert found.ttft_s == pytest.approx(10.55, abs=0.1)
    assert found.reason.startswith(f"remote prefill, its beginning here, {found.chosen.front_tokens} tokens, takes")
    assert found.to_json()["front_tokens"] == found.chosen.front_tokens
    assert route(20_000, link=RouteLink(1e6, 0.04)).place == "local"
    busy = PrefillSite(SLOW, 30.0)
    assert route(20_000, local=busy, link=RouteLink(1e6, 0.04), both=True).place == "remote"
    # A few tokens over a thin link would not be worth a prefill at the other site.
    assert route(20_000, link=RouteLink(1e4, 0.04), both=True).place == "local"


def crowded(**options):
    """Return a router that has seen 60 short prompts, five a second."""
    router = Router(SLOW, FAST, SIZE, rtt_s=0.04, both=False, **options)
    router.arrived(9.9e5, 1.0, 0.0)
    for number in range(60):
        assert router.route(RouteRequest(100), 1 + 0.2 * number).place == "local"
    return router


def test_a_long_prompt_leaves_the_queue_that_short_ones_need():
    assert crowded(considerate=False).route(RouteRequest(20_000), 13.0).place == "local"
    found = crowded().route(RouteRequest(20_000), 13.0)
    assert found.place == "remote"
    assert "what is sooner would make other requests wait" in found.reason
    assert found.chosen.others_s < found.options[0].others_s
    # Others can go elsewhere too: with more workers nobody waits.
    assert crowded(workers=(2, 1)).route(RouteRequest(20_000), 13.0).place == "local"


def test_a_silent_link_is_probed_until_something_is_heard():
    router = Router(SLOW, FAST, SIZE, rtt_s=0.04)
    assert router.probe(10.0) == PROBE_BYTES  # nothing is known yet
    assert router.probe(10.5) == router.probe(11.9) == 0
    assert router.probe(12.0) == PROBE_BYTES  # the first one was lost
    router.arrived(PROBE_BYTES, 0.01, 12.2)
    assert router.probe(14.0) == 0
    assert router.probe(14.2) == PROBE_BYTES
    for second in range(15, 30):
        router.arrived(1e7, 1.0, float(second))
        assert router.probe(second + 0.5) == 0


def test_probes_close_and_open_a_link_over_which_nothing_else_is_sent():
    router = Router(SLOW, FAST, SIZE, rtt_s=0.04, both=False)
    carries = {range(60): 1e7, range(60, 120): 0.0, range(120, 180): 1e7}
    places = []
    for second in range(180):
        if nbytes := router.probe(float(second)):
            rate = next(rate for when, rate in carries.items() if second in when)
            took_s = nbytes / rate if rate else PROBE_WAIT_S
            router.arrived(rate and nbytes, took_s, second + took_s)
        places.append(router.options(RouteRequest(1000), second + 1.0)[1].ttft_s < 1.0)
    assert places[1]
    assert all(places[10:60])
    assert not any(places[75:120])
    assert all(places[135:])


def test_a_router_learns_the_link_and_spreads_a_crowd():
    router = Router(SLOW, FAST, SIZE, rtt_s=0.04, both=False)
    assert router.route(RouteRequest(5000), 0.0).place == "local"
    for second in range(1, 20):
        router.arrived(1e7, 1.0, float(second))
    assert router.route(RouteRequest(5000), 20.0).place == "remote"
    first = router.route(RouteRequest(200, queue_s=(0.0, 1.0)), 21.0)
    assert first.place == "local"
    due = RouteRequest(20_000, cached=(0, 19_900), queue_s=(0.0, 90.0), deadline_s=30.0)
    assert router.route(due, 22.0).met
    with pytest.raises(UsageError, match="the deadline is 0 s"):
        router.route(replace(due, deadline_s=0), 23.0)
    with pytest.raises(UsageError, match="a round trip of inf s"):
        Router(SLOW, FAST, SIZE, rtt_s=float("inf"))
    with pytest.raises(UsageError, match="0 and 1 workers"):
        Router(SLOW, FAST, SIZE, rtt_s=0.0, workers=(0, 1))


@pytest.mark.process
def test_a_router_needs_neither_numpy_nor_torch():
    code = "import kvabr_lab.route, sys\nprint({'torch', 'numpy', 'asyncio', 'kvabr.client'} & set(sys.modules))"
    assert loaded(code) == "set()"
