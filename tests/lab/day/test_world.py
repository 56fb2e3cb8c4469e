"""Two sites and a link, on cases that can be added up by hand; requests; the oracle against enumeration."""

import json
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.cli.main import main
from kvabr.replay.link import FIRST_BYTE_S
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError
from kvabr_lab.day.compare import ORACLE, compare
from kvabr_lab.day.informed import KNOWLEDGE, other_days, play_informed
from kvabr_lab.day.nodes import Fleet, FleetShape
from kvabr_lab.day.oracle import replay_choices, search
from kvabr_lab.day.requests import TOKEN_S, DayRequest, DayShape, day_of_requests
from kvabr_lab.day.rules import PRFAAS_TOKENS, play_day, rule_of
from kvabr_lab.day.sessions import SessionShape, SessionTurn, day_of_sessions, read_sessions
from kvabr_lab.day.synth import KINDS, Shape, synthesise
from kvabr_lab.day.world import Choice, Day, SiteShape, World, WorldShape
from kvabr_lab.route import BOTH, FETCH, LOCAL, REMOTE, CacheSize, PrefillSite, RouteLink, forecasts

SLOW, FAST = PrefillCost.from_rate(1000), PrefillCost.from_rate(8000)
RATE = 4e6


def link(rate=RATE):
    return Trace("flat", "flat", (0.0,), (rate,), 1e6)


def shape(**changes):
    made = WorldShape(SiteShape(SLOW), SiteShape(FAST), CacheSize(1000.0), link(), 0.04, scatter=0.0)
    return replace(made, **changes)


def request(number, at_s, tokens, *, parts=None, following=None, pause_s=0.0):
    parts = parts or ((1000 + number, tokens),)
    return DayRequest(number, at_s, pause_s, following, parts, (5000 + number, 50), (0.0, 0.0), tokens)


def played(requests, places, world):
    choices = [place if isinstance(place, Choice) else Choice(place) for place in places]
    return replay_choices(requests, choices, world)


def times(requests, places, world):
    return [outcome.ttft_s for outcome in played(requests, places, world)]


def test_prefills_queue_at_their_site():
    day = [request(0, 0.0, 4000), request(1, 1.0, 1000), request(2, 1.5, 1000)]
    assert times(day, [LOCAL] * 3, shape()) == pytest.approx([4.0, 4.0, 4.5])
    two = shape(local=SiteShape(SLOW, workers=2))
    assert times(day, [LOCAL] * 3, two) == pytest.approx([4.0, 1.0, 1.5])


@pytest.mark.parametrize("rate", [4e5, 4e6, 4e7])
@pytest.mark.parametrize("live", [True, False])
def test_a_request_alone_takes_what_is_forecast(rate, live):
    world = shape(trace=link(rate), live=live)
    rtt_s = 0.04 + FIRST_BYTE_S
    for tokens in (100, 1280, 12_800, 100_000):
        local, remote = forecasts(
            tokens, PrefillSite(SLOW), PrefillSite(FAST), RouteLink(rate * 0.948, rtt_s, live=live), world.cache
        )[:2]
        one = [request(0, 0.0, tokens)]
        assert times(one, [LOCAL], world) == pytest.approx([local.ttft_s])
        # Sent in pieces, not group by group.
        assert times(one, [REMOTE], world) == pytest.approx([remote.ttft_s], rel=0.04)
        assert times(one, [REMOTE], replace(world, pieces=1 << 20)) == pytest.approx([remote.ttft_s], rel=0.01)


def test_the_beginning_is_computed_here_while_the_end_comes():
    # 1,000 tokens a second here; the link carries 2,000 a second.
    world = shape(trace=link(2e6 / 0.948))
    one = [request(0, 0.0, 12_800)]
    found = {}
    for front in (0, 2560, 4224, 8320):
        (outcome,) = played(one, [Choice(BOTH, front)], world)
        found[front] = outcome.ttft_s
        assert outcome.local_s == pytest.approx(outcome.ttft_s - 0.001 if front else 0.0)
        assert outcome.place == (BOTH if front else REMOTE)
    assert found[0] == pytest.approx(times(one, [REMOTE], world)[0]) == pytest.approx(6.5, rel=0.03)
    # Together they make 3,000 tokens a second, from when the first behind the front is there.
    assert min(found.values()) > 12.8 / 3
    assert found[4224] == pytest.approx((12.8 + 2 * 0.55) / 3, rel=0.05)
    assert max(found[2560], found[8320]) < 5.3
    (forecast,) = [
        each
        for each in forecasts(12_800, PrefillSite(SLOW), PrefillSite(FAST), RouteLink(2e6, 0.044), world.cache)
        if each.place == BOTH
    ]
    assert forecast.ttft_s == pytest.approx(times(one, [Choice(BOTH, forecast.front_tokens)], world)[0], rel=0.03)


def test_the_sites_meet_elsewhere_than_planned_if_the_link_fails_or_is_fast():
    one = [request(0, 0.0, 12_800)]
    outage = Trace("gone", "gone", (0.0, 1.0, 1000.0), (2e6, 0.0, 2e6), 2000.0)
    (failed,) = played(one, [Choice(BOTH, 4224)], shape(trace=outage))
    # What came in the first second need not be computed; with the rest, so is the first token.
    assert 11.0 < failed.ttft_s < 12.8
    assert failed.local_s == failed.ttft_s
    assert played(one, [REMOTE], shape(trace=outage))[0].ttft_s > 1000
    (fast,) = played(one, [Choice(BOTH, 8320)], shape(trace=link(1e8)))
    assert fast.ttft_s == pytest.approx(12_800 / 8000, rel=0.1)
    assert fast.local_s < 2
    slow = replace(SLOW, constant_s=0.5)
    (late,) = played(one, [Choice(BOTH, 4224)], shape(trace=outage, local=SiteShape(slow)))
    assert late.ttft_s == pytest.approx(failed.ttft_s + 0.5)
    # A worker that has something else to do keeps out of it: then all is sent.
    far = [request(0, 0.0, 50_000), request(1, 0.0, 12_800)]
    assert played(far, [LOCAL, Choice(BOTH, 4224)], shape())[1].place == REMOTE


def test_what_is_cached_is_neither_computed_nor_sent():
    shared = (7, 6400)
    day = [
        request(0, 0.0, 6500, parts=(shared, (8, 100))),
        request(1, 100.0, 6528, parts=(shared, (9, 128))),
    ]
    cold, warm = played(day, [LOCAL, LOCAL], shape())
    assert (cold.local_s, warm.local_s) == pytest.approx((6.5, 0.128))
    far = played(day, [REMOTE, REMOTE], shape())[1]
    assert far.remote_s == pytest.approx(128 / 8000)
    assert far.bytes == 128_000
    fetched = played(day, [REMOTE, FETCH], shape(local=SiteShape(SLOW, cache_tokens=0)))[1]
    assert fetched.place == FETCH
    assert fetched.bytes == 6_400_000
    assert fetched.local_s == pytest.approx(0.128)


def test_a_turn_comes_after_the_answer_to_the_one_before():
    day = Day([request(0, 3.0, 1000, following=1), request(1, None, 2000, pause_s=7.0)], World(shape()))
    assert day.next() == (day._requests[0], 3.0)
    assert day.serve(Choice(LOCAL)).ttft_s == pytest.approx(1.0)
    assert day.next()[1] == pytest.approx(3.0 + 1.0 + 50 * TOKEN_S + 7.0)
    day.serve(Choice(LOCAL))
    assert day.next() is None
    with pytest.raises(UsageError, match="the day is over"):
        day.serve(Choice(LOCAL))


def small_day(seed):
    requests = day_of_requests(DayShape(100, 60.0), seed)[:5]
    last = requests[-1]
    return (*requests[:-1], replace(last, following=None))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_oracle_finds_nearly_the_best_of_all_assignments(seed):
    requests, world = small_day(seed), shape()
    options = [(*map(Choice, (LOCAL, REMOTE, FETCH)), Choice(BOTH, one.tokens // 3)) for one in requests]
    best = min(fmean(times(requests, choices, world)) for choices in product(*options))
    found = search(requests, [Choice(LOCAL)] * len(requests), world, sweeps=4)
    assert fmean(one.ttft_s for one in found) <= 1.02 * best


def test_rules_do_what_they_say():
    world = shape()
    day = [request(0, 0.0, PRFAAS_TOKENS), request(1, 1000.0, PRFAAS_TOKENS + 1)]

    def places(name):
        return [outcome.place for outcome in play_day(day, world, rule_of(name, world))]

    assert places("local") == [LOCAL, LOCAL]
    assert places("remote") == [REMOTE, REMOTE]
    assert places("prfaas") == [LOCAL, REMOTE]
    assert places(f"threshold:{PRFAAS_TOKENS - 1}") == [REMOTE, REMOTE]
    assert places("break-even") == places("whole") == [REMOTE, REMOTE]
    assert places("selfish") == places("kvabr") == places("knows-link") == places("knows-present") == [BOTH, BOTH]
    thin = shape(trace=link(1e5))
    assert [one.place for one in play_day(day, thin, rule_of("break-even", thin))] == [LOCAL, LOCAL]
    for name in ("nearest", "threshold:many"):
        with pytest.raises(UsageError, match=name):
            rule_of(name, world)


def test_a_rule_that_knows_what_can_be_known_plays_futures():
    day = DayShape(40, 60.0)
    world = shape(trace=Trace("two", "two", (0.0, 10.0), (4e6, 1e6), 40.0))
    others = other_days(day, world, 1, 3)
    assert len(others) == 3
    assert others == other_days(day, world, 1, 3) != other_days(day, world, 2, 3)
    for arrivals in others:
        assert [at for at, _ in arrivals] == sorted(at for at, _ in arrivals)
    requests = day_of_requests(day, 1)
    found = play_informed(requests, world, day, 1, futures=3)
    assert len(found) == len(requests)
    most = max(
        fmean(one.ttft_s for one in play_day(requests, world, rule_of(name, world))) for name in ("local", "remote")
    )
    assert fmean(one.ttft_s for one in found) < most
    results = {one.rule: one for one in compare(requests, world, deadline_s=5.0, played={"informed": found}, sweeps=1)}
    assert results["informed"].mean_s == pytest.approx(fmean(one.ttft_s for one in found))
    assert results[ORACLE].mean_s <= min(one.mean_s for one in results.values())
    told = play_informed(requests, world, day, 1, knows=KNOWLEDGE)
    assert fmean(one.ttft_s for one in told) < results["kvabr"].mean_s
    told = play_informed(requests, world, day, 1, futures=2, knows=("requests",))
    assert fmean(one.ttft_s for one in told) < most
    with pytest.raises(UsageError, match="unknown kind of knowledge luck; choose from requests, link, times"):
        play_informed(requests, world, day, 1, knows=("luck",))
    mine = results["kvabr"]
    assert mine.elsewhere_s <= 10 * mine.mean_s
    assert results[ORACLE].elsewhere_s == 0


COST = PrefillCost(0.0, 1e-3, 0.0)
"""A second for a thousand tokens."""
SHAPE = FleetShape(COST, CacheSize(100.0, group_tokens=100), 1e6, nodes=2, engine_tokens=0, rtt_s=0.0, publish_s=0.0)
FIRST = SessionTurn(0, 0, ((1, 1000),), (2, 0), at_s=0.0)
SECOND = SessionTurn(0, 0, ((1, 1000), (3, 50)), (4, 0), after=0, gap_s=10.0)


def play(turns, **how):
    return Fleet(turns, replace(SHAPE, **how)).run()


@pytest.mark.parametrize(
    ("how", "ttft_s", "nbytes"),
    [
        ({"engine_tokens": 2000}, 0.05, 0),  # the engine has it
        ({}, 0.1 + 0.05, 1e5),  # it comes over the link
        ({"rate": 1e4}, 1.05, 0),  # which is slower than computing it
        ({"rate": 1e4, "hints": "keep"}, 0.05, 1e5),  # unless it came before
        ({"rate": 1e4, "hints": "keep", "store_tokens": 500}, 1.05, 1e5),  # half of it made room for the other
        ({"rate": 1e4, "hints": "prefetch", "router": "any"}, 0.05, 1e5),
    ],
)
def test_a_second_turn_takes_what_is_left_to_do(how, ttft_s, nbytes):
    made = play([FIRST, SECOND], **how)
    assert made.ttft_s == [pytest.approx(ttft_s)]
    assert made.link_bytes == nbytes


def test_what_is_kept_is_there_when_others_have_come_meanwhile_and_what_was_of_no_use_is_told():
    others = [SessionTurn(n, n, ((10 * n, 900),), (10 * n + 1, 0), at_s=2.0 * n) for n in (1, 2, 3)]
    turns = [FIRST, SECOND, *others]
    small = {"store_tokens": 4000, "hints": "keep", "nodes": 1, "rate": 1e6}
    for tokens, lost in ((4000, 0), (2500, 10)):  # half of a store is kept, of those asked for last
        made = play([FIRST, replace(SECOND, gap_s=20.0), *others], **small | {"store_tokens": tokens})
        assert made.ttft_s == [pytest.approx(lost / 100 + 0.05)]
        assert (made.again, made.unused_bytes) == (lost, lost * 1e4 + 27e4)
    alone = play(turns[:2], **small)
    assert (alone.groups, alone.again, alone.unused_bytes, alone.hints, alone.vain) == (10, 0, 0.0, 1, 0)


def test_a_day_is_the_same_again_and_prompts_grow_and_fork():
    turns = day_of_sessions(SessionShape(40, 3600.0), 7)
    assert turns == day_of_sessions(SessionShape(40, 3600.0), 7) != day_of_sessions(SessionShape(40, 3600.0), 8)
    forks = 0
    for turn in turns:
        assert turn.tokens <= 131_072
        if turn.after is not None:
            before = turns[turn.after]
            assert turn.parts[: len(before.parts) + 1] == (*before.parts, before.answer)
            forks += turn.session != before.session
    assert forks > 3
    assert sum(turn.at_s is not None for turn in turns) == 40


def test_sessions_of_a_recorded_trace(tmp_path):
    rows = [(0, [1, 2, 3]), (1000, [1, 9]), (2000, [1, 2, 3, 4, 5]), (3000, [1, 2, 3, 4, 6, 7])]
    rows += [(4000 + n, [1, 100 + n, 200 + n]) for n in range(30)]  # many begin with block 1
    trace = tmp_path / "trace.jsonl"
    lines = [json.dumps({"timestamp": at, "output_length": 5, "hash_ids": blocks}) for at, blocks in rows]
    trace.write_text("\n".join(lines))
    turns = read_sessions(trace)
    assert [turn.session for turn in turns[:4]] == [0, 1, 0, 0]
    assert len({turn.session for turn in turns}) == 32
    assert turns[2].tokens == 5 * 512
    assert len(play(turns, nodes=1, engine_tokens=10**6).ttft_s) == 2
    trace.write_text("{}")
    with pytest.raises(FormatError, match="not a trace of requests"):
        read_sessions(trace)


ROOT = Path(__file__).resolve().parents[3]
MBIT = 125_000.0


@given(
    kind=st.sampled_from(KINDS),
    mean=st.floats(0.5, 1e5),
    duration=st.floats(20, 400),
    step=st.sampled_from([0.1, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_mean_and_duration_are_met(kind, mean, duration, step, seed):
    shape = Shape(outage_every_s=5.0, outage_s=1.0)
    trace = synthesise(kind, mean_mbps=mean, duration_s=duration, step_s=step, seed=seed, shape=shape)
    assert trace.duration_s == duration
    assert trace.mean_rate / MBIT == pytest.approx(mean, abs=5e-4)  # half of what rates are rounded to
    assert all(rate % 125 == 0 for rate in trace.rates)


@pytest.mark.parametrize("path", sorted((ROOT / "traces").glob("*.csv")), ids=lambda path: path.stem)
def test_the_project_s_traces_are_what_their_headers_say(path, tmp_path):
    data, out = path.read_bytes(), tmp_path / path.name
    note = data.decode().split("# note: ", 1)[1].partition("\n")[0]
    words = shlex.split(note)
    assert words[:3] == ["kvabr", "traces", "synth"]
    assert main([*words[1:], "--out", str(out)]) == 0
    assert out.read_bytes() == data
    assert len(data) < 60_000
    assert f"`{path.name}`" in (ROOT / "traces" / "README.md").read_text(encoding="utf-8")
