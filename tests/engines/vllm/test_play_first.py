"""Play first, promise later, without vLLM: a real origin over QUIC, and requests that change their mind."""

import contextlib
import gc
import time
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvabr.codec.container import pack, unpack
from kvabr.engines.layouts import BlockLayout
from kvabr.store.locations import open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.digests import SHA256, digest_of
from kvabr.types.errors import PlayError
from kvabr.types.tails import TailLoss
from tests.client.served import LIMIT_S, Served
from tests.engines.vllm.halves import LONGEST, Bench, exact, near, request
from tests.toymodel import SPEC, toy_asset

pytestmark = pytest.mark.process


def test_an_aborted_request_that_waits_ends_its_play(served, caplog):
    caplog.set_level("INFO", "vllm.kvabr")
    with closing(Bench(served)) as bench:
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
    assert "cancelled" not in caplog.text  # no line for each of many requests that share another's play


def test_a_cache_in_place_whose_request_is_aborted_is_dropped(served):
    with closing(Bench(served)) as bench:
        asked = request()
        assert bench.matched(asked) == (64, True)
        assert bench.matched(asked) == (64, True)  # vLLM had no blocks for it
        assert not bench.scheduler.finished(asked, [[]])
        bench.step()
        assert bench.worker._plays == {}
        assert bench.worker.counts.take()["plays_unused"] == 1


@pytest.mark.parametrize("how", [{}, {"ranks": 2}])
def test_the_end_of_a_lossy_cache_is_promised_to_nobody_and_computed_with_the_question(served, tmp_path, how):
    """Of a promise that is filled later, and of several workers, the scheduler says where it ends."""
    (tmp_path / "longest.py").write_text(LONGEST)
    how = dict(how)
    ranks = how.pop("ranks", 1)
    bench = Bench(served, policy=f"{tmp_path / 'longest.py'}:Longest", tail=40, **how)
    bench.scheduler._model = replace(bench.model, ranks=ranks)  # the worker stands for all: it has all layers and heads
    try:
        asked = request()
        count, unfilled = bench.load(asked)
        assert (count, unfilled) == (32, set())
        counted = bench.worker.counts.take()
        counted |= {"tokens_tail": counted.get("tokens_tail", 0) + bench.scheduler.counts.take().get("tokens_tail", 0)}
        assert counted["tokens_tail"] == 32
        assert "plays_cut" not in counted
        assert "tokens_missed" not in counted
        assert counted["tokens_loaded"] == 32
        assert torch.allclose(bench.blocks(range(4)), exact(0, 32), atol=0.6)
        assert bench.blocks(range(4, 8)).isnan().all()
    finally:
        bench.close()


EARLIER = """
from kvabr.abr.policies.cheapfirst import CheapFirst
from kvabr.abr.policy import Decision

class Earlier(CheapFirst):
    def decide(self, view):
        return super().decide(view) if view.solid < 3 else Decision.recompute(2, "it is better computed")
"""
"""A policy that cuts plays in front of what is in place."""


@pytest.mark.parametrize(
    "how",
    [
        {"policy": "Earlier", "prefill_rate": 1000.0},
        {"policy": "Longest", "tail": 40},
    ],
)
def test_what_stays_is_judged_by_what_others_lose_that_share_it(tmp_path, how):
    """A play that ends after two groups of four: right behind these, where another request may go on, most is lost."""
    made = toy_asset(tmp_path / "assets" / "one", ("Int4",))
    tails = (TailLoss(16, 0.2), TailLoss(128, 0.1))
    tracks = tuple(replace(track, tails=tails) for track in made.catalog.tracks)
    catalog = replace(made.catalog, tracks=tracks)
    Path(made.location).write_text(catalog.dumps())
    (tmp_path / "policies.py").write_text(LONGEST + EARLIER)
    with (
        closing(Served(tmp_path / "assets", tmp_path)) as served,
        closing(Bench(served, **how | {"policy": f"{tmp_path / 'policies.py'}:{how['policy']}"})) as bench,
    ):
        asked = request()
        assert bench.load(asked)[0] == 32
        (kept,) = bench.scheduler._kept._served.values()
        assert kept.worst == pytest.approx(catalog.prefix(2).track("Int4").total_loss)
        assert kept.worst > 2 * kept.loss


@pytest.mark.parametrize(
    ("step_tokens", "found"),
    [(1 << 20, [32] * 8), (6, [64] * 2), (21, [64] * 2), (22, [48, 64]), (86, [32, 32, 48, 64])],
)
def test_tails_that_are_chosen_before_the_play_share_a_step(served, tmp_path, step_tokens, found):
    """A question has 6 tokens here, a group 16."""
    (tmp_path / "longest.py").write_text(LONGEST)
    with closing(Bench(served, policy=f"{tmp_path / 'longest.py'}:Longest", tail=40)) as bench:
        bench.scheduler._model = replace(bench.model, step_tokens=step_tokens, ranks=2)
        for number, count in enumerate(found):
            assert bench.matched(request(f"r{number}")) == (count, True)


def test_the_scheduler_is_told_how_fast_the_engine_is(served, tmp_path):
    in_time = "max((index for index, cost in enumerate(costs) if cost < 30.0), default=0)"
    (tmp_path / "longest.py").write_text(LONGEST.replace("len(offers) - 1", in_time))
    with closing(Bench(served, policy=f"{tmp_path / 'longest.py'}:Longest", tail=40, deadline_s=30.0)) as bench:
        bench.scheduler._model = replace(bench.model, ranks=2)  # then tails are chosen before the play
        counts = []
        for rate in (0.1, 1e6, None):
            bench.scheduler.measured(None if rate is None else PrefillCost.from_rate(rate))
            counts.append(bench.matched(request(f"r{rate}"))[0])
        assert counts == [64, 32, 32]
        assert bench.worker.measured() is None
        for prefill in ({"r": 63}, {"r": 500}):
            step = bench.scheduler.step(prefill, bench.tables.get, before={"r": 1000})
            assert step.prefill == (1000, prefill["r"])
            bench.worker.begin(step)
            time.sleep(0.05)
            bench.worker.computed()
        bench.worker._copier.wait()
        cost = bench.worker.measured()
        assert bench.worker.measured() is None
        assert 0.005 < cost.seconds(1000, 500) < 5.0  # each slept for 0.05 s
        assert bench.worker.cost == cost


def test_what_vllm_has_changes_while_it_plays(served):
    with closing(Bench(served)) as bench:
        asked, numbers = request(), list(range(10, 30))
        assert bench.matched(asked, 24) == (40, True)
        assert bench.matched(asked, 40) == (24, True)  # more
        assert bench.matched(asked, 8) == (56, True)  # less: played again
        assert bench.worker.counts.take()["plays_unused"] == 1
        bench.scheduler.allocated(asked, [numbers], 56)
        assert bench.steps() == (set(), {"r"}, set())
        assert near(bench.blocks(numbers[1:8]), exact(8, 64))
        assert bool(bench.caches[0][numbers[:1]].isnan().all())
        assert bench.scheduler.matched(asked, 0) == (0, False)  # preempted, and asked about again
        assert bench.scheduler._promises.held_bytes == 0


@pytest.mark.parametrize("ends", ["used", "aborted"])
def test_host_memory_is_free_at_once_when_it_is_not_wanted(served, ends):
    bench = Bench(served)
    gc.collect()
    gc.disable()
    try:
        asked = request()
        count, _ = bench.matched(asked)
        (playing,) = bench.worker._plays.values()
        kv = weakref.ref(playing.prefix)
        assert "parts" not in vars(playing.prefix)  # nothing was expanded
        assert playing.prefix.nbytes == 64 * SPEC.elements_per_token * 2
        del playing
        if ends == "used":
            bench.scheduler.allocated(asked, [list(range(20))], count)
            bench.steps()
            bench.worker._loader.submit(lambda: None)
            bench.worker._loader.wait()  # its thread has gone on
        else:
            bench.scheduler.finished(asked, [[]])
            bench.step()
        assert kv() is None
    finally:
        gc.enable()
        bench.close()


def test_requests_without_room_in_host_memory_wait_or_are_computed(served):
    with closing(Bench(served)) as bench:
        one = 64 * SPEC.elements_per_token * 2  # as it came, in FP16
        bench.scheduler._promises._max_bytes = one * 3 // 2
        assert bench.matched(request("a")) == (64, True)
        b, c = request("b"), request("c")
        for asked in (b, c):
            bench.scheduler.arrived(asked)
            bench.scheduler._lookups[asked.request_id].handle.result(LIMIT_S)
            assert bench.scheduler.matched(asked, 0) == (None, False)
            bench.step()
        assert len(bench.worker._plays) == 1
        bench.scheduler._lookups["b"].due_s = time.monotonic()
        assert bench.scheduler.matched(b, 0) == (None, False)
        bench.step()
        assert bench.scheduler.matched(b, 0) == (0, False)
        bench.step()
        assert bench.scheduler.counts.take()["lookups_unplayed"] == 1
        assert bench.scheduler.matched(c, 0) == (None, False)
        bench.scheduler.allocated(request("a"), [list(range(20))], 64)
        assert bench.steps() == (set(), {"a"}, set())
        assert bench.matched(c) == (64, True)


def test_a_copy_that_fails_is_not_used(served):
    with closing(Bench(served)) as bench:
        asked = request()
        count, _ = bench.matched(asked)
        bench.scheduler.allocated(asked, [list(range(20))], count)
        bench.worker._blocks = None
        assert bench.steps() == (set(), {"r"}, set(range(8)))
        assert bench.worker.counts.take()["plays_failed"] == 1


def spoilt(asset, group, root):
    """A publisher's error: an asset again, but with NaN in a frame, which nothing but decoding it shows."""
    frames = [bytes(asset.frame(number, "FP16")) for number in range(asset.catalog.groups)]
    header, payload = unpack(frames[group])
    frames[group] = pack(b"\xff" * len(payload), header)
    digests = tuple(digest_of(frame, SHA256) for frame in frames)
    with open_store(root).writer(live=True) as writer:
        for number, frame in enumerate(frames):
            writer.frame(number, "FP16", frame, digests[number])
        (track,) = asset.catalog.tracks
        writer.commit(replace(asset.catalog, tracks=(replace(track, digests=digests, packs=()),)))


@pytest.mark.parametrize("group", [0, 2])
def test_a_group_that_cannot_be_decoded_after_the_promise_is_computed(tmp_path, group):
    spoilt(toy_asset(tmp_path / "made", ("FP16",)), group, tmp_path / "assets")
    with closing(Served(tmp_path / "assets", tmp_path)) as served, closing(Bench(served)) as bench:
        asked = request()
        assert bench.load(asked) == (64, set(range(2 * group, 8)))
        assert near(bench.blocks(list(range(2 * group))), exact(0, 16 * group))
        counted = bench.worker.counts.take()
        assert counted["plays_failed"] == 1
        assert counted.get("tokens_loaded", 0) == 16 * group
        assert bench.scheduler.matched(asked, 0) == (0, False)  # not again


def test_a_request_waits_for_another_that_loads_what_both_begin_with(served):
    with closing(Bench(served)) as bench:
        one, other = request("one"), request("other")
        assert bench.matched(one) == (64, True)
        assert bench.matched(other) == (64, True)
        bench.scheduler.allocated(one, [list(range(20))], 64)
        assert bench.scheduler.matched(other, 0) == (None, False)
        assert bench.steps() == (set(), {"one"}, set())
        assert bench.scheduler.matched(other, 64) == (0, False)  # vLLM has it now


def test_what_another_connector_would_keep_is_not_lossy(served):
    for limit, told in ((1.0, 64), (1e-9, 0)):
        with closing(Bench(served, policy="fixed:Int4", keep_loss=limit)) as bench:
            bench.worker.register(bench.named, lambda _: BlockLayout.TRANSPOSED, keepers=["OtherConnector"])
            assert bench.matched(request("a")) == (told, bool(told))
