"""A request's bound on its expected loss: of its play, of shared blocks, and of blocks that vLLM has kept."""

from contextlib import closing

import pytest

from kvabr.player.groups import DecodeRates
from tests.engines.vllm.halves import TOKENS, Bench, request
from tests.engines.vllm.overload import Asked, at_once, engine_of, published

LOSSES = (0.0, 0.001, 0.01)


def bound(name, max_loss, tokens=TOKENS):
    asked = request(name, tokens, kv_transfer_params={"max_loss": max_loss})
    asked.block_hashes = [hash(tuple(tokens[:end])) for end in range(8, len(tokens) + 1, 8)]
    return asked


def ended(bench, asked, blocks):
    served = bench.scheduler.served(asked, [list(blocks)])
    bench.scheduler.finished(asked, [list(blocks)])
    return served


def test_a_play_is_cut_where_it_would_lose_too_much(served):
    with closing(Bench(served, policy="fixed:Int4")) as bench:
        asked = request("any")
        assert bench.load(asked)[0] == 64
        whole = ended(bench, asked, range(20))["loss"]
        asked = bound("some", 0.7 * whole)
        loaded = bench.load(asked)[0]
        assert 0 < loaded < 64
        assert 0.0 < ended(bench, asked, range(20))["loss"] <= 0.7 * whole
        assert bench.load(bound("none", 0.0))[0] == 0
        assert bench.load(bound("much", 10**400))[0] == 64


def test_a_track_within_the_bound_is_played(served):
    with closing(Bench(served, policy="anytime", prefill_rate=1.0)) as bench:
        asked = bound("a", 1e-4)
        assert bench.load(asked)[0] == 64
        assert ended(bench, asked, range(20))["loss"] <= 1e-4


def test_the_blocks_of_a_running_request_are_shared_only_within_the_bound(served):
    with closing(Bench(served, policy="fixed:Int4")) as bench:
        running = request("running")
        bench.load(running)
        (lossy,) = bench.scheduler._kept._served.values()
        assert bench.matched(bound("loose", 1.01 * lossy.leaves), 64) == (0, False)
        assert not bench.evicted
        assert bench.scheduler.matched(bound("strict", 0.5 * lossy.leaves), 64) == (None, False)
        assert bench.evicted >= set(range(1, 8))
        assert bench.scheduler.counts.take()["requests_spared"] == 1


def test_kept_blocks_count_against_the_bound(served):
    """Within `keep_loss`, blocks stay for later requests: those with a lower bound do without, others lose less."""
    with closing(Bench(served, policy="fixed:Int4", keep_loss=1.0)) as bench:
        first = bound("first", 1.0, TOKENS[:40])
        assert bench.load(first)[0] == 32
        ended(bench, first, range(20))
        kept = bench.scheduler._kept.loss_before(first, 32)
        assert kept > 0
        strict = bound("strict", 0.5 * kept)
        assert bench.scheduler.matched(strict, 32) == (None, False)
        assert not hasattr(strict, "skip_reading_prefix_cache")  # with it, vLLM would ignore this answer
        bench.step()
        assert strict.skip_reading_prefix_cache  # as vLLM reads it before it asks again
        assert bench.matched(strict, 0) == (0, False)
        loose = bound("loose", 1.5 * kept)
        loaded = bench.load(loose, 32)[0]
        assert loaded < 32
        served_loss = ended(bench, loose, range(20))
        assert (served_loss or {"loss": kept})["loss"] <= 1.5 * kept


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    return published(tmp_path_factory.mktemp("crowd"), 12)


@pytest.mark.parametrize("carried", [0.1, 1.0, 30.0])
def test_no_promise_loses_more_on_any_link(crowd, carried, monkeypatch):
    """``carried``: prompts on the smallest track that the link carries by the deadline, of twelve at once."""
    monkeypatch.setattr(DecodeRates, "observe", lambda *_: None)  # real seconds
    library, prompts, catalog = crowd
    asked = [Asked(f"r{n}", ids, 2.0, catalog, LOSSES[n % len(LOSSES)]) for n, ids in enumerate(prompts)]
    rate = carried * min(track.total_bytes for track in catalog.tracks) / 2.0
    at_once(library, asked, rate, engine_of(24, 64, 2.0))
    assert all(one.loss <= one.max_loss for one in asked)
    assert all(one.met for one in asked)
