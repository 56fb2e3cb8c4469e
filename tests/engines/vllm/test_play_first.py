"""Play first, promise later, without vLLM: a real origin over QUIC, and requests that change their mind."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import pytest

from kvabr.types.errors import PlayError
from tests.client.served import LIMIT_S
from tests.engines.vllm.halves import Bench, exact, near, request
from tests.toymodel import SPEC

pytestmark = pytest.mark.process


def test_an_aborted_request_that_waits_ends_its_play(served):
    bench = Bench(served)
    try:
        asked = request()
        while not bench.worker._plays:
            assert bench.scheduler.matched(asked, 0) == (None, False)
            bench.worker.begin(bench.scheduler.step({}, None))
        (playing,) = bench.worker._plays.values()
        assert not bench.scheduler.finished(asked, [[]])
        assert bench.scheduler._promises.held_bytes == 0
        bench.step()
        assert bench.worker._plays == {}
        with contextlib.suppress(PlayError):
            playing.handle.result(LIMIT_S)
        assert bench.worker.placed() == []
        counted = bench.worker.counts.take()
        assert counted.get("plays_aborted", 0) + counted.get("plays_unused", 0) == 1
    finally:
        bench.close()


def test_a_cache_in_place_whose_request_is_aborted_is_dropped(served):
    bench = Bench(served)
    try:
        asked = request()
        assert bench.matched(asked) == (64, False)
        assert bench.matched(asked) == (64, False)  # vLLM had no blocks for it
        assert not bench.scheduler.finished(asked, [[]])
        bench.step()
        assert bench.worker._plays == {}
        assert bench.worker.counts.take()["plays_unused"] == 1
    finally:
        bench.close()


def test_what_vllm_has_changes_while_it_plays(served):
    bench = Bench(served)
    try:
        asked, numbers = request(), list(range(10, 30))
        assert bench.matched(asked, 24) == (40, False)
        assert bench.matched(asked, 40) == (24, False)  # more
        assert bench.matched(asked, 8) == (56, False)  # less: played again
        assert bench.worker.counts.take()["plays_unused"] == 1
        bench.scheduler.allocated(asked, [numbers], 56)
        bench.step()
        assert near(bench.blocks(numbers[1:8]), exact(8, 64))
        assert bool(bench.caches[0][numbers[:1]].isnan().all())
        assert bench.scheduler.matched(asked, 0) == (0, False)  # preempted, and asked about again
        assert bench.scheduler._promises.held_bytes == 0
    finally:
        bench.close()


@pytest.mark.parametrize("ends", ["used", "aborted"])
def test_host_memory_is_free_at_once_when_it_is_not_wanted(served, ends):
    bench = Bench(served)
    gc.collect()
    gc.disable()
    try:
        asked = request()
        count, _ = bench.matched(asked)
        (playing,) = bench.worker._plays.values()
        kv = weakref.ref(playing.prefix.kv)
        del playing
        if ends == "used":
            bench.scheduler.allocated(asked, [list(range(20))], count)
        else:
            bench.scheduler.finished(asked, [[]])
        bench.step()
        assert kv() is None
    finally:
        gc.enable()
        bench.close()


def test_requests_without_room_in_host_memory_wait_or_are_computed(served):
    bench = Bench(served)
    try:
        one = 64 * SPEC.elements_per_token * 4
        bench.scheduler._promises._max_bytes = one + 1
        assert bench.matched(request("a")) == (64, False)
        b, c = request("b"), request("c")
        for asked in (b, c):
            bench.scheduler.arrived(asked)
            bench.scheduler._lookups[asked.request_id].handle.result(LIMIT_S)
            assert bench.scheduler.matched(asked, 0) == (None, False)
            bench.step()
        assert len(bench.worker._plays) == 1
        bench.scheduler._lookups["b"].due_s = time.monotonic()
        assert bench.scheduler.matched(b, 0) == (0, False)
        bench.step()
        assert bench.scheduler.counts.take()["lookups_unplayed"] == 1
        assert bench.scheduler.matched(c, 0) == (None, False)
        bench.scheduler.allocated(request("a"), [list(range(20))], 64)
        assert bench.matched(c) == (64, False)
    finally:
        bench.close()


def test_a_copy_that_fails_is_not_used(served):
    bench = Bench(served)
    try:
        asked = request()
        count, _ = bench.matched(asked)
        bench.scheduler.allocated(asked, [list(range(20))], count)
        bench.worker._blocks = None
        assert bench.step() == (set(), set(), set(range(8)))
        assert bench.worker.counts.take()["plays_failed"] == 1
    finally:
        bench.close()
