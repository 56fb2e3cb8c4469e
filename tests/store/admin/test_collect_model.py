"""Publishers, collectors and pins in all orders with crashes: no catalog ever lacks a span, no pin is ever lost."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvabr.store.admin.collect import Collector
from kvabr.store.admin.rules import Rules
from kvabr.store.objects.leases import CATALOGS, expire, pin, touch
from kvabr.types.errors import KvabrError, NotFoundError, UsageError
from tests.store.admin.modelbed import (
    MODEL,
    TIMING,
    ShortLayout,
    finish_killed,
    interleave,
    publish,
    run,
    span_of,
    world,
)

GRACE_S, TTL_S = 50.0, 200.0


def collector(made, **rules):
    rules = Rules(**{"grace_s": GRACE_S, "ttl_s": TTL_S, "keep_measured": False, **rules})
    return Collector(made, ShortLayout(), rules, timing=TIMING, runtime=made.runtime)


def collect(made, **rules):
    return collector(made, **rules).run()


async def pinned(made, catalog):
    try:
        await pin(made, catalog, 10_000.0, TIMING, made.runtime)
    except NotFoundError:
        return None
    return catalog


def check(made, processes=(), pins=()):
    """What must hold at any moment, and after the next collection."""
    finish_killed(made)
    assert not made.dangling()
    assert made.has_offer() or not made.keys(CATALOGS)
    for each in processes:  # what they published, pinned or renewed
        if isinstance(each.result, str):
            assert f"{CATALOGS}{each.result}" in made.objects
    for each in processes:
        assert each.error is None or isinstance(each.error, KvabrError), each.error
    settle(made)
    assert not made.dangling()
    for number in pins:
        if (catalog := processes[number].result) is not None:
            assert f"{CATALOGS}{catalog}" in made.objects, "a pin was lost later"
    left = [key for key in made.keys("") if key.startswith(("x/sweep/", "l/i/", "l/e/", "l/gc"))]
    assert not left
    named = {span for key in made.keys(CATALOGS) for span in made.value(key)["spans"]}
    assert set(made.keys("s/")) == named
    assert made.has_offer() == bool(named)


def settle(made):
    """Let all graces pass, and collect until nothing is left to do."""
    for _ in range(2):
        made.now_s += 2000.0
        run(collect(made, ttl_s=math.inf))


def race(works, assets, switches, kills=(), pins=()):
    made = world(*assets)
    check(made, interleave([work(made) for work in works], switches, kills), pins)


def length(work, assets):
    made = world(*assets)
    processes = interleave([work(made)], ())
    assert processes[0].error is None
    return processes[0].steps


PUBLISH_ORPHAN = (lambda made: publish(made, "new", ["orphan", "fresh"]), collect)
PUBLISH_AGAIN = (lambda made: publish(made, "old", ["first", "second"]), collect)
PIN = (lambda made: pinned(made, "old"), collect)
ASSETS = (("old", ["first", "second"]), (None, ["orphan"]))


@pytest.mark.slow
@pytest.mark.parametrize(("works", "pins"), [(PUBLISH_ORPHAN, ()), (PUBLISH_AGAIN, ()), (PIN, (0,))])
@pytest.mark.parametrize("order", [1, -1])
def test_two_processes_that_stop_once_each_anywhere(works, pins, order):
    """One begins, the other runs from there to any point, the first goes on to its end: every pair of points."""
    works = works[::order]
    pins = [number if order == 1 else 1 - number for number in pins]
    lengths = [length(work, ASSETS) for work in works]
    count = 0
    for begin, stop in itertools.product(range(lengths[0] + 1), range(1, lengths[1] + 1)):
        race(works, ASSETS, (begin, begin + stop), pins=pins)
        count += 1
    assert count > 200


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_an_offer_that_goes_comes_back_at_any_moment(order):
    """The last asset of an offer is collected while another one is published."""
    works = (lambda made: publish(made, "new", ["fresh"]), lambda made: collect(made, grace_s=0.0))[::order]
    lengths = [length(work, ()) for work in works]
    for begin, stop in itertools.product(range(lengths[0] + 1), range(1, lengths[1] + 1)):
        race(works, (), (begin, begin + stop))


def test_an_offer_that_nothing_uses_leaves_its_number():
    made = world()
    for turn in range(1, 4):
        assert run(collect(made)).offers == 1
        assert made.value("o/0") == {"turn": turn}
        assert made.keys("o/") == ["o/0"]
        assert run(collect(made)).offers == 0
        assert not made.has_offer()
        assert run(publish(made, "new", ["fresh"])) == "new"
        assert made.has_offer()
        assert made.keys("o/") == ["o/0", f"o/0.{turn}"]
        del made.objects[f"{CATALOGS}new"]
        del made.objects[span_of("fresh")]
        made.now_s += 2000.0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("works", [PUBLISH_ORPHAN, PUBLISH_AGAIN])
def test_one_of_two_is_killed_anywhere(works, victim):
    lengths = [length(work, ASSETS) for work in works]
    survivor = 1 - victim
    for killed_at in range(1, lengths[victim]):
        for begin in {0, lengths[survivor] // 3, lengths[survivor] // 2}:
            order = works if survivor == 0 else works[::-1]
            race(order, ASSETS, (begin, begin + killed_at), kills=[(1, killed_at)])


def test_the_checker_finds_what_publishers_without_a_guard_do():
    """Without intents, a collector that has looked deletes what is adopted a moment later."""
    works = (collect, lambda made: publish(made, "new", ["orphan", "fresh"], guarded=False))
    bad = 0
    for begin in range(length(works[0], ASSETS)):
        made = world(*ASSETS)
        interleave([work(made) for work in works], (begin,))
        bad += bool(made.dangling())
    assert bad > 0


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_processes_in_any_order_with_crashes(data):
    switches = data.draw(st.lists(st.integers(1, 400), max_size=30))
    kills = data.draw(st.dictionaries(st.integers(0, 6), st.integers(0, 60), max_size=3))
    made = world(*ASSETS, ("other", ["first", "third"]))
    works = [
        publish(made, "new", ["orphan", "fresh"]),
        collect(made),
        publish(made, "old", ["first", "second"]),
        collect(made, ttl_s=math.inf),
        pinned(made, "other"),
        publish(made, "newer", ["third", "orphan"]),
        touch(made, "old"),
    ]
    processes = interleave(works, switches, kills)
    check(made, processes, pins=[4])


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 60), max_size=20), st.dictionaries(st.integers(0, 3), st.integers(0, 60), max_size=2))
def test_offers_come_and_go(switches, kills):
    made = world()
    works = [
        publish(made, "new", ["fresh"]),
        collect(made, grace_s=0.0, ttl_s=0.0),
        publish(made, "newer", ["other"]),
        collect(made, grace_s=0.0, ttl_s=0.0),
    ]
    processes = interleave(works, switches, kills)
    finish_killed(made)
    assert made.has_offer() or not made.keys(CATALOGS)
    assert all(each.error is None or isinstance(each.error, KvabrError) for each in processes)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 120), max_size=8), st.dictionaries(st.integers(0, 2), st.integers(0, 60), max_size=1))
def test_nothing_of_an_expired_model_is_left(switches, kills):
    made = world(*ASSETS)

    async def expiry():
        before_s = await expire(made, MODEL)
        await collect(made, ttl_s=math.inf)
        return before_s

    works = [publish(made, "new", ["orphan", "fresh"]), expiry(), publish(made, "old", ["first", "second"])]
    processes = interleave(works, switches, kills)
    finish_killed(made)
    assert not made.dangling()
    before_s = processes[1].result
    settle(made)
    assert not made.dangling()
    if before_s is not None:
        old = [key for key in made.keys("") if key[:2] in ("a/", "s/") and made.objects[key][1] < before_s]
        assert not old


def test_two_collectors_share_the_work():
    made = world(*ASSETS)
    processes = interleave([collect(made), collect(made)], (30,))
    errors = [each.error for each in processes if each.error is not None]
    assert all(isinstance(error, UsageError) and "another collector" in str(error) for error in errors)
    assert len(errors) == 1
    check(made)


def test_what_was_evicted_is_kept_for_a_grace():
    """Plays that read its spans go on."""
    made = world(("old", ["first", "second"]))
    done = run(collect(made))
    assert [(each.holding.name, each.reason) for each in done.evicted] == [("old", "unused")]
    assert (done.spans, done.waiting) == (0, 2)
    assert made.keys("s/") == [span_of("first"), span_of("second")]
    made.now_s += GRACE_S
    done = run(collect(made))
    assert (done.spans, done.pointers, done.profiles, done.waiting) == (2, 4, 1, 0)
    assert not made.keys("s/")


def test_a_catalog_that_lacks_a_span_goes():
    made = world(("old", ["first", "second"]))
    del made.objects[span_of("second")]
    done = run(collect(made, ttl_s=math.inf))
    assert [(each.holding.name, each.reason) for each in done.evicted] == [("old", "broken")]


def test_no_span_goes_while_a_catalog_cannot_be_read():
    """It may be of a newer version of kvabr, and name any of them."""
    made = world(("old", ["first"]), (None, ["orphan"]))
    made.objects[f"{CATALOGS}strange"] = b"?", made.now_s - 500.0
    done = run(collect(made, ttl_s=math.inf))
    assert (done.swept, done.spans, list(done.damaged)) == (False, 0, [f"{CATALOGS}strange"])
    assert span_of("orphan") in made.objects


def test_a_dry_run_changes_nothing():
    made = world(*ASSETS)
    before = dict(made.objects)
    dry = run(
        Collector(made, ShortLayout(), Rules(GRACE_S, TTL_S), timing=TIMING, runtime=made.runtime, dry_run=True).run()
    )
    assert made.objects == before
    done = run(collect(made))
    assert (dry.spans, dry.waiting, len(dry.evicted)) == (done.spans, done.waiting, len(done.evicted)) == (1, 2, 1)


def test_a_pointer_to_another_span_with_the_same_group_stays():
    made = world(("old", ["first"]), (None, ["orphan"]))
    shared = "i/offer/orphan.0"
    made.add(shared, {"span": span_of("first")}, 500.0)
    value = made.value("a/old")
    made.add("a/old", {**value, "spans": [span_of("first")]}, 10.0)
    layout = ShortLayout()
    plain = layout.manifest
    layout.manifest = lambda key, data: _with(plain(key, data), shared)
    run(Collector(made, layout, Rules(GRACE_S), timing=TIMING, runtime=made.runtime).run())
    assert shared in made.objects
    assert "i/offer/orphan.1" not in made.objects


def _with(manifest, pointer):
    from dataclasses import replace

    return replace(manifest, pointers=(*manifest.pointers, pointer))
