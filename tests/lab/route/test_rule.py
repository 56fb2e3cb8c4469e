"""Decisions, their reasons, and a router's memory."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvabr.abr import Ladder, View
from kvabr.abr.time_planner import TimePlanner
from kvabr.replay.engines import ENGINES
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr_lab.route import (
    PROBE_WAIT_S,
    CacheSize,
    PrefillSite,
    RouteLink,
    Router,
    RouteRequest,
    decide,
    forecasts,
    remote_lengths,
)
from tests.catalogs import catalog
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
    assert "a faster site would make other requests wait" in found.reason
    assert found.chosen.others_s < found.options[0].others_s
    # Others can go elsewhere too: with more workers nobody waits.
    assert crowded(workers=(2, 1)).route(RouteRequest(20_000), 13.0).place == "local"


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
    with pytest.raises(UsageError, match="the deadline must be a positive"):
        router.route(replace(due, deadline_s=0), 23.0)
    with pytest.raises(UsageError, match="the round trip must be 0 or more seconds and finite, got inf"):
        Router(SLOW, FAST, SIZE, rtt_s=float("inf"))
    with pytest.raises(UsageError, match="got 0 and 1"):
        Router(SLOW, FAST, SIZE, rtt_s=0.0, workers=(0, 1))


@pytest.mark.process
def test_a_router_needs_neither_numpy_nor_torch():
    code = "import kvabr_lab.route, sys\nprint({'torch', 'numpy', 'asyncio', 'kvabr.client'} & set(sys.modules))"
    assert loaded(code) == "set()"


SLOW_LINK = PrefillCost(0.05, 1 / 1000, 1e-8)
FAST_LINK = PrefillCost(0.02, 1 / 8000, 2e-9)
BYTES = CacheSize(10_000.0)


def by_place(tokens, local=None, remote=None, link=None, size=BYTES):
    found = forecasts(
        tokens, local or PrefillSite(SLOW_LINK), remote or PrefillSite(FAST_LINK), link or RouteLink(5e6, 0.04), size
    )
    return {one.place: one for one in found}


ENGINES_TO_SPLIT = [
    *(ENGINES[name] for name in ("h200-8b", "h200-70b", "cpu-smollm2")),
    PrefillCost.from_rate(3000.0),
    PrefillCost(0.02, 1e-6, floor_s=0.03),
]


@pytest.mark.parametrize("decode_s", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("cost", ENGINES_TO_SPLIT)
@pytest.mark.parametrize("groups", [32, 256])
def test_a_split_prompt_takes_what_the_rule_of_players_expects(groups, cost, decode_s):
    """One track, all of it in place elsewhere, idle engines: the forecast is the rule's, and the first token's step."""
    made = catalog(groups)
    track = replace(made.track("Int4"), decode_s=decode_s, loss=(1e-9,) * groups)
    offer = replace(made, tracks=(track,))
    size = CacheSize(track.total_bytes / offer.tokens, decode_s=decode_s / 128)
    stops = np.arange(groups + 1)
    computed_s = cost.seconds_many(0, np.array([offer.tokens_before(stop) for stop in stops]))
    step_s = np.where(stops < groups, cost.seconds(offer.tokens - 1, 1), 0.0)
    there = PrefillSite(PrefillCost(0.0, 1e-12), cached_tokens=offer.tokens)
    for share, rtt_s in product((0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (0.001, 0.02, 0.1)):
        rate = share * track.total_bytes / computed_s[-1]
        view = View(Ladder(offer), 1e6, cost=cost, gpu_price=0.0, time_price=1.0)
        view.rate, view.ttfb_s = rate, rtt_s
        rule = TimePlanner(view).divide(view, [rate], np.zeros_like(stops), stops, computed_s, np.zeros(groups + 1))[0]
        found = by_place(offer.tokens, PrefillSite(cost), there, RouteLink(rate, rtt_s), size)
        # To fetch a prefix is another thing: its rest is computed behind it.
        least = min(one.ttft_s for place, one in found.items() if place != "fetch")
        assert least == pytest.approx((rule.objective + step_s).min(), rel=0.03)


def test_local_prefill_waits_and_computes_what_is_not_cached():
    local = PrefillSite(SLOW_LINK, queue_s=2.0, cached_tokens=1000)
    one = by_place(4000, local)["local"]
    # 896 tokens are whole groups.
    assert one.ttft_s == pytest.approx(2.0 + SLOW_LINK.seconds(896, 3104))
    assert one.bytes == 0
    assert one.limit == "prefill"


def test_what_is_cached_there_is_sent_while_the_request_queues():
    remote = PrefillSite(FAST_LINK, queue_s=10.0, cached_tokens=6400)
    one = by_place(12_800, remote=remote, link=RouteLink(1e7, 0.0))["remote"]
    # 6.4 s for the first half are over when its prefill begins.
    assert one.ttft_s == pytest.approx(10.0 + FAST_LINK.seconds(6400, 128) + 6.4 + SLOW_LINK.seconds(12_799, 1))


def test_a_prefix_there_can_be_fetched_for_a_prefill_here():
    found = by_place(12_800, remote=PrefillSite(FAST_LINK, queue_s=60.0, cached_tokens=12_000))
    one = found["fetch"]
    # 11,904 tokens are whole groups.
    assert one.ttft_s == pytest.approx(0.02 + 119.04 / 5 + 0.02 + SLOW_LINK.seconds(11_904, 896))
    assert "fetch" not in by_place(12_800, PrefillSite(SLOW_LINK, cached_tokens=12_000))


@pytest.mark.parametrize(
    ("coming", "own", "ends"),
    [
        ((), ((1.0, 50.0),), 8.0),
        (((0.0, 10.0, 50.0),), ((0.0, 20.0),), 10.0),
        (((0.0, 10.0, 50.0),), ((0.0, 100.0),), 18.0),
        (((4.0, 4.0, 30.0),), ((0.0, 5.0),), 3.5),
        (((4.0, 4.0, 30.0),), ((0.0, 30.0),), 9.0),
        (((2.0, 4.0, 40.0),), ((6.0, 10.0),), 8.0),
    ],
)
def test_what_comes_later_takes_its_share_when_it_comes(coming, own, ends):
    assert RouteLink(10.0, backlog_bytes=30.0, coming=coming).through(*own) == pytest.approx(ends)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("remote", "size", "queues"),
    [
        (FAST_LINK, BYTES, (0.0, 0.0)),
        (FAST_LINK, CacheSize(10_000.0, 3e6, decode_s=2e-5), (0.0, 0.0)),
        (FAST_LINK, CacheSize(10_000.0, 3e6, decode_s=2e-3), (1.0, 0.3)),
        (PrefillCost(0.5, 1 / 3000, 4e-8), BYTES, (0.2, 0.0)),  # slower for very long prompts
        (PrefillCost.from_rate(1100), BYTES, (0.0, 2.0)),
    ],
)
def test_the_closed_form_agrees_with_the_forecasts(remote, size, queues, live):
    for rate in (3e5, 3e6, 1.2e7, 3e7, 1e9):
        for cached in (0, 1280):
            link = RouteLink(rate, 0.04, 1e5, live)
            sites = (PrefillSite(SLOW_LINK, queues[0], cached), PrefillSite(remote, queues[1], cached))
            intervals = remote_lengths(*sites, link, size)
            for groups in (1, 2, 3, 5, 8, 13, 21, 40, 80, 200, 500, 1000):
                fresh = 128 * groups
                local, other = forecasts(fresh + cached, *sites, link, size)[:2]
                inside = any(low < fresh < high for low, high in intervals)
                assert inside == (other.ttft_s < local.ttft_s), (rate, fresh, intervals)


def test_the_least_bytes_of_a_catalog_keep_the_floor():
    layered = catalog(16, layered=True)
    sizes = [CacheSize.of_catalog(layered, floor) for floor in (1.0, 0.05, 0.01, 0.001)]
    for size, floor in zip(sizes, (1.0, 0.05, 0.01, 0.001), strict=True):
        assert size.loss <= floor
    assert [size.per_token for size in sizes] == sorted(size.per_token for size in sizes)
    base = next(track for track in layered.tracks if track.name == "base")
    assert sizes[0].per_token == pytest.approx(base.total_bytes / layered.tokens)
    assert sizes[0].decode_s == pytest.approx(0.002 / 128)
    assert CacheSize.of_catalog(layered, 1.0, decoders=4).decode_s == pytest.approx(0.0005 / 128)
    assert sizes[0].scaled(2).per_token == 2 * sizes[0].per_token
    with pytest.raises(UsageError, match="no tracks of this asset lose at most 1e-09"):
        CacheSize.of_catalog(layered, 1e-9)
