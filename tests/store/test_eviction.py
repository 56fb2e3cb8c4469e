"""What goes first: orders, shared parts, pins, measured reuse."""

from __future__ import annotations

import math
import random

import pytest

from kvabr.store.eviction import ORDERS, Candidate, History, Part, ReuseTable, parts_of, victims
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError


def asset(key, *, size=100, first_s=0.0, last_s=0.0, uses=0, parts=(), pinned_until_s=-math.inf):
    return Candidate(key, size, first_s, last_s, uses, parts, pinned_until_s)


def chain(*keys, size=0, tokens=100):
    return tuple(Part(key, size, tokens, float(tokens)) for key in keys)


def evict(candidates, excess=1 << 60, now=1000.0, **options):
    return [one.key for one in victims(candidates, excess, now, **options)]


def test_least_recently_and_least_often_used():
    made = [
        asset("often", last_s=10.0, uses=9),
        asset("late", last_s=30.0, uses=1),
        asset("early", last_s=20.0, uses=1),
    ]
    assert evict(made, order="lru") == ["often", "early", "late"]
    assert evict(made, order="lfu") == ["early", "late", "often"]


@pytest.mark.parametrize("order", ORDERS)
def test_no_more_goes_than_must_and_pinned_ones_never(order):
    made = [asset(str(number), size=10, last_s=float(number)) for number in range(10)]
    assert evict(made, 0, order=order) == []
    assert evict(made, -5, order=order) == []
    assert evict(made, 25, order=order) == ["0", "1", "2"]
    pinned = [
        asset("held", pinned_until_s=1001.0),
        asset("free", last_s=5.0),
        asset("over", last_s=6.0, pinned_until_s=1000.0),
    ]
    assert evict(pinned, order=order) == ["free", "over"]


def test_an_unknown_order_is_refused():
    with pytest.raises(UsageError, match="'best' is no order of eviction; there are value, lru, lfu"):
        victims([], 1, 0.0, order="best")


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_shared_is_freed_with_its_last_owner(order):
    """The first to go frees only what is its own; the second also what both had."""
    made = [
        asset("a", size=1, last_s=1.0, parts=chain("system", "a1", size=50)),
        asset("b", size=1, last_s=2.0, parts=chain("system", "b1", size=50)),
    ]
    assert len(evict(made, 51, order=order)) == 1
    assert len(evict(made, 52, order=order)) == 2


def test_an_asset_that_another_continues_goes_first():
    """In a folder, it is a copy of what is there already, however recently and often it was used."""
    turn = asset("turn", last_s=990.0, uses=5, parts=chain("s", "t1"))
    made = [turn, asset("next", last_s=900.0, parts=chain("s", "t1", "t2")), asset("other", parts=chain("o"))]
    assert evict(made)[0] == "turn"
    assert evict(made, order="lru")[0] == "other"


def test_a_pinned_owner_keeps_what_it_shares():
    kept = asset("kept", parts=chain("s", "k"), pinned_until_s=math.inf)
    short = asset("short", last_s=999.0, uses=3, parts=chain("s"))
    alone = asset("alone", last_s=1.0, parts=chain("x"))
    assert evict([kept, short, alone]) == ["short", "alone"]


def test_the_last_owner_of_a_popular_beginning_is_worth_it():
    """Forty assets share a beginning: all but one may go, the last one is worth more than a lonely asset."""
    many = [
        asset(f"m{n:02}", first_s=900.0 + n, last_s=900.0 + n, parts=chain("popular", f"tail{n}")) for n in range(40)
    ]
    lonely = asset("lonely", first_s=939.0, last_s=939.0, parts=chain("l1", "l2"))
    gone = evict([*many, lonely], now=941.0)
    assert gone.index("lonely") == 39
    assert gone[-1].startswith("m")


def test_value_counts_cost_and_bytes():
    """Of two that are used alike, the one that takes longer to compute stays; of equal ones, the smaller."""
    dear = asset("dear", parts=(Part("d", 0, 100, 900.0),))
    cheap = asset("cheap", parts=(Part("c", 0, 100, 100.0),))
    assert evict([dear, cheap]) == ["cheap", "dear"]
    small = asset("small", size=10, parts=(Part("d", 0, 100, 100.0),))
    assert evict([small, cheap]) == ["cheap", "small"]
    unknown = asset("unknown", parts=(Part("u", 0, 99),))
    assert evict([dear, cheap, unknown])[0] == "unknown"  # seconds are not compared with tokens
    assert set(evict([dear, cheap, unknown])[1:]) == {"dear", "cheap"}


def test_the_end_of_a_long_prompt_is_dear():
    cost = PrefillCost(0.5, 1e-3, 1e-8)
    keys = [bytes([number]) for number in range(40)]
    parts = parts_of(keys, {keys[20]}, 40 * 128 - 5, 128, seconds=cost)
    assert [part.key for part in parts] == [keys[15], keys[20], keys[31], keys[39]]
    assert [part.tokens for part in parts] == [2048, 5 * 128, 11 * 128, 8 * 128 - 5]
    assert sum(part.seconds for part in parts) == pytest.approx(cost.seconds(0, 40 * 128 - 5) - 0.5)
    assert parts[3].seconds / parts[3].tokens > parts[0].seconds / parts[0].tokens


def table_of(gaps, seed=1, parts=400, uses=6):
    """Return a table that has seen parts whose idle times are drawn by ``gaps``, and the time at its end."""
    dice, table, times = random.Random(seed), ReuseTable(), []
    for number in range(parts):
        at_s = dice.random() * 10_000
        for _ in range(uses):
            times.append((at_s, number))
            if (gap := gaps(number, dice)) is None:
                break
            at_s += gap
    end = max(times)[0]
    for at_s, number in sorted(times):
        table.note([Part(str(number), 0, 1)], at_s)
    table.measure((), end)
    return table, end


def test_reuse_is_measured():
    """Exponential pauses of a minute, after which one in two comes back: about a use in two minutes at first."""
    table, _ = table_of(lambda _, dice: dice.expovariate(1 / 60) if dice.random() < 0.5 else None)
    fresh, idle, old = (table.rate("x", History(0, 0.0, 0.0), age) for age in (5.0, 200.0, 3000.0))
    assert 0.5 / 120 < fresh < 1.5 / 60
    assert idle < 0.5 * fresh
    assert old < 0.1 * fresh


def test_those_used_often_are_told_from_the_others():
    """A tenth is used every minute, the others once: having been used says which is which."""
    table, _ = table_of(lambda number, dice: dice.expovariate(1 / 60) if number % 10 == 0 else None)
    once, often = (table.rate("x", History(uses, 0.0, 60.0 * uses), 60.0 * uses + 60.0) for uses in (0, 4))
    assert often > 4 * once


def test_a_pause_that_all_make_is_waited_for():
    """All come back after two minutes: what is idle for one is worth more than what has not come for ten."""
    table, _ = table_of(lambda _, dice: 110 + 20 * dice.random())
    waiting, missed = (table.rate("x", History(0, 0.0, 0.0), age) for age in (60.0, 600.0))
    assert waiting > 5 * missed


def test_memory_is_bounded():
    table = ReuseTable()
    for number in range(10_000):
        table.note([Part(str(number), 0, 10)], float(number))
        if number % 100 == 0:
            victims([asset(str(number), parts=chain(str(number)))], 1, float(number), reuse=table)
    assert len(table.histories) <= 102


def test_what_was_evicted_is_remembered_when_it_is_stored_again():
    """The second time, a part counts as used; what was stored at the same time does not."""
    table = ReuseTable()
    table.note(chain("back"), 0.0)
    assert evict([asset("back", parts=chain("back"))], now=10.0, reuse=table) == ["back"]
    table.note(chain("back", "new"), 20.0)
    assert (table.histories["back"], table.histories["new"]) == (
        History(1, 0.0, 20.0, 100),
        History(0, 20.0, 20.0, 100),
    )


def test_odd_clocks_do_no_harm():
    """Times of the future, times that stand still, times of other worlds."""
    made = [
        asset("future", first_s=5000.0, last_s=9000.0, uses=2),
        asset("still", first_s=7.0, last_s=7.0, uses=50),
        asset("old", first_s=-1e12),
    ]
    assert sorted(evict(made)) == ["future", "old", "still"]
