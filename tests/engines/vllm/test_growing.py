"""Caches that other nodes play while they are computed: by steps in the scheduler, out of blocks in a worker."""

import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from kvabr.engines.vllm.caches import EngineCaches, Pages
from kvabr.engines.vllm.growing import Growth
from kvabr.store.locations import open_asset
from kvabr.types.kv import LayerClass
from tests.client.served import LIMIT_S, Served
from tests.engines.vllm.halves import TOKENS, Bench, exact, near, request
from tests.engines.vllm.test_groups import bench_of as windows_of
from tests.engines.vllm.test_groups import check, load, numbers, prefill
from tests.toymodel import SPEC

pytestmark = pytest.mark.process

FULL = LayerClass("full", (0,), 1, 4, 4, "float16")
TABLE = tuple(range(1, 30))


def growing(prompt=70, computed=0, caches=None, table=TABLE):
    caches = caches or EngineCaches((FULL,), (Pages(0, 0, 8, ("0",), (0,)),))
    made = Growth(caches, 16, lambda request: (tuple(request.prompt_token_ids), request.salt, None))
    ids = list(range(prompt))
    asked = SimpleNamespace(
        request_id="r", num_computed_tokens=computed, num_prompt_tokens=prompt, prompt_token_ids=ids, salt=b"s"
    )
    made.arrived(asked)

    def step(tokens):
        told = made.step({"r": tokens}, lambda _: (table,) * len(caches.blocks))
        asked.num_computed_tokens += tokens
        return told

    return made, asked, step


def test_each_step_adds_the_groups_that_it_completes():
    made, _, step = growing()
    told = [one for tokens in (10, 30, 5, 25, 1, 1) for one in step(tokens)]
    assert [(one.first, one.last) for one in told] == [(0, 0), (0, 32), (32, 64)]
    assert told[0].tokens == tuple(range(64))
    assert (told[0].salt, told[0].had, told[0].step) == (b"s", 0, 10)
    assert told[1].tokens == ()
    assert told[2].blocks == ((5, 6, 7, 8),)
    assert made.over("r")
    assert not made.over("r")


# ------------------------------------------------------- the worker


def live(served, folder, **options):
    return Bench(served, folder, publish_live=True, **({"tracks": ["FP16"]} | options))


def written(bench, first, last, table=range(1, 30)):
    """Put the toy model's cache into the blocks, as a step of the engine."""
    from kvabr.engines.layouts import BlockLayout
    from tests.engines.paging import paged_blocks

    numbers = list(table)[first // 8 : last // 8]
    paged_blocks(bench.caches, numbers, BlockLayout.TRANSPOSED).write(exact(first, last))


def compute(bench, asked, tokens, table=range(1, 30)):
    begin = asked.num_computed_tokens
    bench.running, bench.tables = {asked.request_id: tokens}, {asked.request_id: (list(table),)}
    bench.worker.begin(step := bench.scheduler.step(bench.running, bench.tables.get))
    bench.worker.preempted(step)
    written(bench, begin // 8 * 8, (begin + tokens) // 8 * 8, table)
    bench.worker.computed()
    bench.worker.collect()
    asked.num_computed_tokens += tokens
    bench.running = {}


def polling(bench, computed=0, **more):
    asked = request("p", num_computed_tokens=computed, **more)
    bench.scheduler.arrived(asked)
    return asked


def played(folder, tmp_path, tokens=64):
    with closing(Served(folder, tmp_path)) as served, closing(Bench(served)) as bench:
        count, _ = bench.load(request(tokens=[*TOKENS[:tokens], 1, 2]))
        assert count == tokens
        assert near(bench.blocks(list(range(tokens // 8))), exact(0, tokens))


@pytest.mark.parametrize("beside", [False, True])
def test_a_cache_is_published_while_it_is_computed(served, tmp_path, beside):
    with closing(live(served, tmp_path / "out")) as bench:
        bench.worker._publications.overlapped = beside  # as on a GPU
        asked = polling(bench)
        compute(bench, asked, 20)
        frames = wait_for(lambda: list((tmp_path / "out").glob("g/[0-9a-f]*")))
        assert len(frames) == 1  # before the request has ended
        for tokens in (20, 24, 6):
            compute(bench, asked, tokens)
        assert bench.scheduler.finished(asked, [list(range(1, 10))])
        assert bench.steps()[0] == {"p"}
        bench.published()
        counted = bench.worker.counts.take()
        assert (counted["published_live"], counted["published"]) == (1, 1)
    played(tmp_path / "out", tmp_path)


def wait_for(found):
    end_s = time.monotonic() + LIMIT_S
    while not (got := found()):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    return got


def test_preempted_and_computed_again_elsewhere(served, tmp_path):
    with closing(live(served, tmp_path / "out")) as bench:
        bench.worker._publications.overlapped = True
        asked = polling(bench)
        compute(bench, asked, 40)
        # vLLM takes the blocks, and gives them to another request in the step before which it says so.
        step = bench.scheduler.step({}, {}.get, preempted=True)
        assert step.preempted
        bench.worker.begin(step)
        bench.worker.preempted(step)
        for layer in bench.caches:
            layer.fill_(float("nan"))
        bench.worker.computed()
        asked.num_computed_tokens = 0
        for tokens in (30, 40):
            compute(bench, asked, tokens, table=range(10, 39))
        assert bench.scheduler.finished(asked, [list(range(10, 19))])
        bench.steps()
        bench.published()
        assert bench.worker.counts.take()["published"] == 1
    played(tmp_path / "out", tmp_path)


def test_one_that_is_aborted_leaves_a_shorter_prompt(served, tmp_path):
    with closing(live(served, tmp_path / "out")) as bench:
        asked = polling(bench)
        compute(bench, asked, 40)
        assert bench.scheduler.finished(asked, [list(range(1, 6))])
        assert bench.steps()[0] == {"p"}
        bench.published()
        assert open_asset(tmp_path / "out").catalog.tokens == 32
    played(tmp_path / "out", tmp_path, tokens=32)


@pytest.mark.parametrize("beside", [False, True])
def test_after_a_reset_what_has_grown_ends_and_the_request_goes_on(served, tmp_path, beside):
    """Groups of later steps, perhaps computed with other weights, are not added."""
    with closing(live(served, tmp_path / "out")) as bench:
        bench.worker._publications.overlapped = beside
        given_back = []
        bench.worker.gone = given_back.append
        asked = polling(bench)
        compute(bench, asked, 40)
        assert bench.scheduler.reset()
        asked.num_computed_tokens = 0  # vLLM preempts it
        bench.scheduler.arrived(asked)
        for tokens in (30, 40):
            compute(bench, asked, tokens)
        assert not bench.scheduler.finished(asked, [list(range(1, 10))])
        assert bench.scheduler.counts.take()["publish_skipped_old"] == 1
        bench.published()
        assert given_back == []  # its blocks were still its own
        assert open_asset(tmp_path / "out").catalog.tokens == 32
    played(tmp_path / "out", tmp_path, tokens=32)


def test_what_is_known_or_lossy_does_not_grow(served, tmp_path):
    with closing(live(served, tmp_path / "out", policy="fixed:Int4")) as bench:
        bench.load(request())
        asked = polling(bench, computed=64)
        compute(bench, asked, 6)
        assert bench.worker.counts.take()["publish_dropped_lossy"] == 1
        assert bench.scheduler.finished(asked, [list(range(1, 10))])
        assert bench.steps()[0] == {"p"}
        bench.worker.lossy.clear()
        for verdict in ("published_live", "publish_dropped_known"):
            asked = polling(bench)
            compute(bench, asked, 70)
            bench.scheduler.finished(asked, [list(range(1, 10))])
            bench.steps()
            bench.published()
            assert bench.worker.counts.take()[verdict] == 1


def found(bench, asked):
    ids = asked.prompt_token_ids
    return bench.client.begin(lambda client: client.find(ids, model=SPEC)).result(LIMIT_S)


def test_windows_grow_with_every_step(tmp_path):
    (tmp_path / "none").mkdir()
    empty = Served(tmp_path / "none", tmp_path)
    tokens, kv = [token + 500 for token in range(150)], numbers(150, seed=1)
    bench = windows_of(empty, tmp_path / "out", publish_live=True)
    try:
        asked = request("p", tokens)
        tables = prefill(bench, asked, kv)
        assert bench.scheduler.finished(asked, tables)
        assert bench.steps()[0] == {"p"}
        bench.published()
        counted = bench.worker.counts.take()
        assert (counted["published_live"], counted["published"]) == (1, 1)
    finally:
        bench.close()
        empty.close()
    with closing(Served(tmp_path / "out", tmp_path)) as other, closing(windows_of(other)) as bench:
        count, tables = load(bench, request(tokens=[*tokens[:144], 1, 2]))
        assert count == 144
        check(bench, tables, 0, 144, kv)
