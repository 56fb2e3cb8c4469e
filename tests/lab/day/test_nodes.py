"""A day of agents' sessions on several nodes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError
from kvabr_lab.day.nodes import Fleet, FleetShape
from kvabr_lab.day.sessions import SessionShape, SessionTurn, day_of_sessions, read_sessions
from kvabr_lab.route import CacheSize

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
