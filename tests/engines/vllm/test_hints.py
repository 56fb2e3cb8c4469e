"""Requests of sessions that continue: their groups stay in the node's store."""

import time
from contextlib import closing
from functools import partial

import pytest

from kvabr.client.options import PlayOptions
from kvabr.data import default_catalog
from kvabr.engines.vllm import worker
from kvabr.publish.publisher import Publisher, with_heads
from tests.client.served import LIMIT_S, Served
from tests.engines.served import assets_of
from tests.engines.vllm.halves import TOKENS, Bench, request
from tests.toymodel import SPEC, ToyModel

pytestmark = pytest.mark.process


def polling(name="r", **said):
    return request(name, kv_transfer_params=said)


def store_of(bench):
    async def look(client):
        return client.store

    return bench.client.begin(look).result(LIMIT_S)


def published_bytes(folder):
    return sum(track.total_bytes for asset in assets_of(folder) for track in asset.catalog.tracks)


def until(bench):
    """Wait until a hint has been followed; return all that was counted."""
    counted, end_s = {}, time.monotonic() + LIMIT_S
    while not counted.keys() & {"tokens_kept", "hints_failed"}:
        assert time.monotonic() < end_s
        for name, value in bench.scheduler.counts.take().items():
            counted[name] = counted.get(name, 0) + value
        time.sleep(0.005)
    return counted


@pytest.mark.parametrize("said", [{"keep_s": 600}, {"back": True}])
def test_the_cache_of_a_session_that_goes_on_is_kept(bench, said):
    asked = polling(**said)
    bench.scheduler.arrived(asked)
    bench.scheduler.finished(asked, [[]])  # aborted, say, before anything was played
    assert until(bench)["tokens_kept"] == 70
    store = store_of(bench)
    assert store.memory.kept_bytes == store.memory.currsize > 0


def test_what_is_published_of_a_request_is_kept_once_it_is(tmp_path):
    (tmp_path / "assets").mkdir()
    with (
        closing(Served(tmp_path / "assets", tmp_path)) as served,
        closing(Bench(served, publish=tmp_path / "assets")) as bench,
    ):
        assert bench.matched(asked := polling(keep_s=600)) == (0, False)
        bench.prefilled()
        assert bench.scheduler.finished(asked, [list(range(9))])
        assert bench.steps()[0] == {"r"}
        bench.published()
        assert "tokens_kept" not in bench.scheduler.counts.take()
        served.look()
        for name, tokens in bench.worker.published():
            bench.scheduler.published(name, tokens)
        assert until(bench)["tokens_kept"] == 64
        assert store_of(bench).memory.kept_bytes > 0


def test_more_than_the_longest_time_is_the_longest_time(bench):
    assert [bench.scheduler._hints.seconds(polling(keep_s=long)) for long in (1e300, 10**400)] == [3600.0, 3600.0]


def test_every_rank_has_its_part(tmp_path):
    kv = ToyModel().prefill(TOKENS)
    parts = [with_heads(SPEC, (heads,)) for heads in (range(1), range(1, 2))]
    for part, head in zip(parts, (0, 1), strict=True):
        made = Publisher(tmp_path / "assets", part, prior=default_catalog(), tracks=["FP16"])
        made.reserve(TOKENS).fill(kv[:, :, head : head + 1], lambda _: None)
        made.close()
    with closing(Served(tmp_path / "assets", tmp_path)) as served, closing(Bench(served, heads=range(1, 2))) as bench:
        assert bench.model.shards == tuple(parts)
        bench.scheduler.finished(polling(back=True), [[]])
        assert until(bench)["tokens_kept"] == 70
        assert store_of(bench).memory.kept_bytes == published_bytes(tmp_path / "assets")


def test_what_was_played_with_a_loss_is_fetched_again_while_the_link_is_idle(served, monkeypatch):
    monkeypatch.setattr(worker, "PlayOptions", partial(PlayOptions, time_price=1e6))
    with closing(Bench(served, policy="anytime", prefill_rate=1.0)) as bench:
        asked = request()
        assert bench.matched(asked) == (64, True)
        had, lookup = store_of(bench).memory.currsize, bench.scheduler._lookups["r"]
        assert lookup.worst > bench.options.keep_loss
        bench.scheduler.finished(asked, [[]])
        end_s, counted = time.monotonic() + LIMIT_S, {}
        while "tokens_refined" not in counted:
            assert time.monotonic() < end_s
            counted = bench.scheduler.counts.take()
            time.sleep(0.005)
        assert store_of(bench).memory.currsize > 1.5 * had
        again = request("again")
        assert bench.matched(again) == (64, True)
        assert bench.scheduler._lookups["again"].worst < 0.1 * lookup.worst
