"""A store over a day: cases that can be added up by hand, days of all mixtures, recorded requests."""

from __future__ import annotations

import json

import pytest

from kvabr.store.eviction import ORDERS
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError
from kvabr_lab.day.requests import MIXES, USUAL, DayShape, day_of_requests
from kvabr_lab.day.stores import (
    CLAIRVOYANT,
    FOLDER,
    SHARED,
    Visit,
    distinct_tokens,
    read_trace,
    replay_store,
    visits,
)

COST = PrefillCost(0.5, 0.001)
ALL = (*ORDERS, CLAIRVOYANT)


def day_of(*lines):
    """Return requests a second apart; each line has the numbers of parts of 100 tokens."""
    return [Visit(float(number), tuple((part, 100) for part in line)) for number, line in enumerate(lines)]


@pytest.mark.parametrize("order", ALL)
@pytest.mark.parametrize("kind", [FOLDER, SHARED])
def test_with_room_for_all_only_what_is_new_is_computed(kind, order):
    day = day_of((1, 2), (1, 3), (1, 2), (1, 2, 4))
    found = replay_store(day, kind, 10_000, order, COST)
    assert (found.tokens, found.new_tokens, found.hit_tokens, found.evicted) == (900, 400, 500, 0)
    assert found.recomputed_tokens == 0
    assert found.computed_s == pytest.approx(0.4)
    assert found.hit_ratio == pytest.approx(5 / 9)


def test_copies_take_room_that_shared_beginnings_do_not():
    """Three assets of 200 tokens with a common half: 600 in a folder, 400 where it is stored once."""
    day = day_of((1, 2), (1, 3), (1, 4))
    assert replay_store(day, SHARED, 400, "lru", COST).evicted == 0
    assert replay_store(day, FOLDER, 400, "lru", COST).evicted == 2


def test_a_copy_of_what_another_continues_goes_first():
    """Room for two turns and one other: LRU drops the other prompt, value the turn that the next one contains."""
    day = day_of((9,), (1,), (1, 2), (9,))
    lru, value = (replay_store(day, FOLDER, 350, order, COST) for order in ("lru", "value"))
    assert (lru.recomputed_tokens, value.recomputed_tokens) == (100, 0)


def test_the_clairvoyant_keeps_what_comes_back():
    day = day_of((1,), (2,), (3,), (1,), (2,))
    assert replay_store(day, SHARED, 220, CLAIRVOYANT, COST).recomputed_tokens == 100
    assert replay_store(day, SHARED, 220, "lru", COST).recomputed_tokens == 200


def test_what_comes_before_is_not_counted():
    day = day_of((1, 2), (1, 2), (1, 2))
    found = replay_store(day, SHARED, 1000, "lru", COST, warm_s=1.0)
    assert (found.tokens, found.hit_tokens) == (400, 400)


@pytest.mark.parametrize("mix", MIXES)
def test_days_of_every_mixture(mix):
    """Every order plays the same day; nobody recomputes less than who knows what comes; sums agree."""
    shape = DayShape(300, kinds=MIXES[mix], tenants=3)
    day = visits(day_of_requests(shape, 1))
    assert day == visits(day_of_requests(shape, 1))
    assert [visit.at_s for visit in day] == sorted(visit.at_s for visit in day)
    total = sum(tokens for visit in day for _, tokens in visit.parts)
    room = distinct_tokens(day) // 10
    found = {order: replay_store(day, SHARED, room, order, COST) for order in ALL}
    assert {one.tokens for one in found.values()} == {total}
    assert {one.new_tokens for one in found.values()} == {distinct_tokens(day)}
    assert all(one.hit_tokens + one.new_tokens + one.recomputed_tokens == total for one in found.values())
    assert found[CLAIRVOYANT].recomputed_tokens < min(found[order].recomputed_tokens for order in ORDERS)


def test_value_is_better_than_lru_in_a_folder():
    """Room for a tenth of a day: at least a tenth less is computed again."""
    day = visits(day_of_requests(DayShape(1500), 200))
    lru, value = (replay_store(day, FOLDER, distinct_tokens(day) // 10, order, COST) for order in ("lru", "value"))
    assert value.recomputed_tokens < 0.9 * lru.recomputed_tokens


def test_tenants_share_nothing_and_documents_may_be_read_once():
    one = day_of_requests(DayShape(400), 5)
    assert one == day_of_requests(DayShape(400, kinds=USUAL, tenants=1), 5)
    many = day_of_requests(DayShape(400, tenants=50), 5)
    assert len({request.parts[0] for request in many}) > 1.3 * len({request.parts[0] for request in one})
    read = [
        request for request in day_of_requests(DayShape(400, kinds=MIXES["documents"]), 5) if request.at_s is not None
    ]
    once = [request for request in read if sum(request.parts[0] == other.parts[0] for other in read) == 1]
    assert 0.4 < len(once) / len(read) < 0.8


def test_recorded_requests(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [(0, [0, 1, 2]), (1500, [0, 1, 2, 3]), (1600, [0, 7])]
    path.write_text(
        "".join(json.dumps({"timestamp": at, "input_length": 9, "hash_ids": ids}) + "\n" for at, ids in rows)
    )
    assert read_trace(path) == [
        Visit(0.0, ((0, 512), (2, 1024))),
        Visit(1.5, ((0, 512), (2, 1024), (3, 512))),
        Visit(1.6, ((0, 512), (7, 512))),
    ]


@pytest.mark.parametrize(
    "text",
    ["{", "[]\n", '{"timestamp": 1}\n', '{"timestamp": "x", "hash_ids": []}\n', '{"timestamp": 0, "hash_ids": 5}\n'],
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError, match="not a trace of requests with timestamp and hash_ids"):
        read_trace(path)
    with pytest.raises(FormatError, match=r"none\.jsonl: not a trace"):
        read_trace(tmp_path / "none.jsonl")


def test_impossible_stores_and_days_are_refused():
    with pytest.raises(UsageError, match="a store for 0 tokens holds nothing"):
        replay_store([], SHARED, 0, "lru", COST)
    with pytest.raises(UsageError, match="must add up to 1"):
        DayShape(kinds=USUAL[:1])
    with pytest.raises(UsageError, match="0 tenants; give 1 to 1000"):
        DayShape(tenants=0)
