"""Decisions, their reasons, and a router's memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvabr.abr.estimators.classic import LastSample
from kvabr.route import CacheSize, LinkMemory, PrefillSite, RouteLink, Router, WorkMeter, decide
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from tests.test_imports import loaded

SLOW, FAST = PrefillCost.from_rate(1000), PrefillCost.from_rate(10_000)
SIZE = CacheSize(1000.0)
LINK = RouteLink(1e7, 0.04)


def route(tokens, *, local=None, remote=None, link=LINK, **options):
    return decide(tokens, local or PrefillSite(SLOW), remote or PrefillSite(FAST), link, SIZE, **options)


def test_short_prompts_stay_and_long_ones_go():
    assert route(20).place == "local"
    long = route(20_000)
    assert long.place == "remote"
    assert long.met is None
    assert "against local prefill 20.00 s (mostly prefill)" in long.reason


def test_queues_and_caches_decide_too():
    assert route(20_000, remote=PrefillSite(FAST, 60.0)).place == "local"
    assert route(20_000, local=PrefillSite(SLOW, cached_tokens=19_900)).place == "local"
    assert route(20_000, remote=PrefillSite(FAST, 60.0, cached_tokens=19_900)).place == "fetch"
    assert route(20_000, link=RouteLink(1e4, 0.04)).place == "local"


def test_nothing_is_known_of_the_link():
    found = route(20_000, link=RouteLink(0.0))
    assert found.place == "local"
    assert "nothing is known of the link" in found.reason
    assert json.loads(json.dumps(found.to_json()))["options"][1]["ttft_s"] is None


def test_a_deadline_is_judged_by_the_lower_bound():
    link = RouteLink(1.2e6, 0.04, bound=0.9e6)
    assert route(1000, link=link).place == "remote"
    sure = route(1000, link=link, deadline_s=1.05)
    assert (sure.place, sure.met) == ("local", True)
    assert "may miss the deadline" in sure.reason


def test_where_nothing_meets_the_deadline_the_soonest_is_chosen_and_said():
    found = route(20_000, deadline_s=0.5)
    assert (found.place, found.met) == ("remote", False)
    assert found.reason.startswith("no place surely meets the deadline of 0.5 s")


def test_a_margin_keeps_what_is_nearly_equal_here():
    assert route(100).place == "remote"
    assert route(100, margin_s=0.1).place == "local"


def test_others_count():
    crowded = PrefillSite(SLOW, pressure=5.0)
    assert route(20, local=crowded).place == "local"
    assert route(50).place == "local"
    found = route(50, local=crowded)
    assert found.place == "remote"
    assert "would make other requests wait longer" in found.reason


@pytest.mark.parametrize(("options", "words"), [({"deadline_s": 0.0}, "deadline"), ({"margin_s": -1.0}, "margin")])
def test_bad_options_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        route(100, **options)


def test_pressure_grows_with_arrivals_and_with_how_busy_it_is():
    idle, busy = WorkMeter(600.0), WorkMeter(600.0)
    for second in range(0, 6000, 10):
        idle.add(1.0, second)
        busy.add(8.0, second)
    assert idle.pressure(6000.0) == pytest.approx(0.1 / 0.9, rel=0.02)
    assert busy.pressure(6000.0) == pytest.approx(0.1 / 0.2, rel=0.1)
    assert busy.pressure(60_000.0) < 1e-3
    assert WorkMeter(600.0).pressure(5.0) == 0.0


def test_a_bad_minute_is_forgotten():
    memory = LinkMemory(LastSample())
    assert memory.rates(1e6, 0.0) == (0.0, 0.0)
    for second in range(1, 601):
        memory.sample(1e7, 1.0, second)
    memory.sample(1e6, 1.0, 601.0)
    soon, later = memory.rates(0.0, 601.0)[0], memory.rates(0.0, 1201.0)[0]
    assert soon == pytest.approx(1e6)
    assert later == pytest.approx(1e7, rel=0.01)
    assert memory.rates(1e9, 601.0)[0] > 5e6
    memory.sample(float("nan"), 1.0, 602.0)
    memory.sample(1.0, 0.0, 602.0)
    assert memory.rates(0.0, 601.0)[0] == soon


def test_a_router_learns_the_link_and_spreads_a_crowd():
    router = Router(SLOW, FAST, SIZE, rtt_s=0.04)
    assert router.route(5000, 0.0).place == "local"
    for second in range(1, 20):
        router.arrived(1e7, 1.0, float(second))
    assert router.route(5000, 20.0).place == "remote"
    first = router.route(200, 21.0, queue_s=(0.0, 1.0))
    assert first.place == "local"
    assert router.route(20_000, 22.0, cached=(0, 19_900), queue_s=(0.0, 90.0), deadline_s=30.0).met
    with pytest.raises(UsageError, match="memory"):
        Router(SLOW, FAST, SIZE, rtt_s=0.04, half_life_s=0.0)


def test_the_guide_works_as_it_is_written(capsys):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "route.md"
    code = guide.read_text().partition("```python\n")[2].partition("```")[0]
    exec(compile(code, str(guide), "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.startswith("remote remote prefill takes")


@pytest.mark.process
def test_a_router_needs_neither_numpy_nor_torch():
    code = "import kvabr.route, sys\nprint({'torch', 'numpy', 'asyncio', 'kvabr.client'} & set(sys.modules))"
    assert loaded(code) == "set()"
