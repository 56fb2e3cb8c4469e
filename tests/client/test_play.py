"""Whole plays over links of every kind: what comes is the cache, on time, without a hole."""

from __future__ import annotations

import asyncio

import pytest
import torch

from kvabr.client import profiles
from kvabr.client.profiles import ProfileCache
from kvabr.client.result import NothingCached
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import NotFoundError, PolicyError, UsageError
from kvabr.types.naming import TrackNamespace
from tests.client.playing import play, play_asset
from tests.client.virtual import virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
COST = PrefillCost(0.001, 0.001)


def close(kv, tokens=TOKENS, error=0.02):
    """Whether a cache is that of the tokens, about."""
    exact = ToyModel().prefill(tokens)
    return kv.shape == exact.shape and float((kv.float() - exact).square().mean() / exact.square().mean()) < error


@virtual
async def test_a_fast_link_brings_the_best_track(origin, short):
    async with origin() as link:
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC)
    assert played.tokens == 70
    assert "Int8" in played.coverage or "FP16" in played.coverage
    assert played.loss < 2e-4  # no one could tell from the exact cache
    assert played.ttft_s < 0.5  # nothing was worth waiting for
    assert played.met
    assert close(played.kv)
    assert played.catalog == short
    assert played.lookup_s == pytest.approx(0.02, abs=0.005)


@virtual
async def test_a_slow_link_brings_what_it_can_in_time(origin, short):
    size = short.track("Int4").total_bytes
    async with origin(rate=size / 1.2) as link:
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC)
    assert "Int4" in played.coverage
    assert played.met
    assert 1.2 < played.ttft_s <= 2.0
    assert close(played.kv)
    assert played.loss > 0


@virtual
async def test_a_play_by_name(origin, short):
    async with origin() as link:
        played = await play_asset(link, short.namespace, deadline=2.0, policy="fixed:FP16")
        assert played.coverage == ("FP16",) * 5
        assert close(played.kv, error=1e-5)
        with pytest.raises(NotFoundError):
            await play_asset(link, TrackNamespace("test/model", "00" * 32), deadline=2.0)
        with pytest.raises(UsageError, match="not those of"):
            await play_asset(link, short.namespace, deadline=2.0, tokens=TOKENS[::-1])


@virtual
async def test_a_longer_asset_serves_a_prompt_that_begins_alike(origin, long):
    tokens = (*prompt(160).tokens[:48], *range(40))
    async with origin(folder=".") as link:
        played = await play(link, tokens, deadline=2.0, spec=SPEC)
    assert played.tokens == 48
    assert len(played.coverage) == played.catalog.groups == 3
    assert played.catalog.namespace == long.namespace
    assert close(played.kv, tokens[:48])


@virtual
async def test_a_prompt_that_goes_on_behind_an_asset_with_a_short_last_group(origin, short):
    tokens = (*TOKENS, *((token + 1) % 97 for token in prompt(160).tokens[70:160]))
    async with origin() as link:
        played = await play(link, tokens, deadline=2.0, spec=SPEC)
    assert played.tokens == 70
    assert played.catalog == short.behind(short.groups, 90)


@virtual
async def test_nothing_cached_and_no_engine_is_no_error(origin):
    async with origin() as link:
        played = await play(link, range(50), deadline=2.0, spec=SPEC)
    assert isinstance(played, NothingCached)
    assert played.spec == SPEC
    assert played.lookup_s == pytest.approx(0.02, abs=0.005)


@virtual
async def test_nothing_cached_and_an_engine_recomputes_everything(origin):
    async with origin() as link:
        played = await play(link, range(50), deadline=2.0, engine=ToyModel(), prefill_cost=COST)
    assert played.tokens == 50
    assert set(played.coverage) == {"recomputed"}
    assert close(played.kv, range(50), 1e-5)
    assert played.met


@virtual
async def test_a_salt_keeps_prompts_apart(origin):
    async with origin() as link:
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC, salt=b"tenant")
    assert isinstance(played, NothingCached)


@virtual
async def test_a_dead_link_and_an_engine_make_the_deadline_together(origin, short):
    size = short.track("Int4").total_bytes
    cost = PrefillCost(0.001, 1.0 / 70)
    async with origin(rate=size / 6) as link:
        played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=cost)
    assert "recomputed" in played.coverage
    assert played.met
    assert close(played.kv)
    assert played.record.tokens_recomputed > 0


@virtual
async def test_the_cache_lands_in_the_callers_tensor(origin):
    out = torch.full(SPEC.shape(100), 7.0)
    async with origin() as link:
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC, out=out, policy="fixed:FP16")
        assert played.kv.data_ptr() == out.data_ptr()
        assert close(out[:, :, :, :70], error=1e-5)
        assert bool((out[:, :, :, 70:] == 7.0).all())
        again = await play(link, range(50), deadline=2.0, engine=ToyModel(), prefill_cost=COST, out=out)
        assert again.kv.data_ptr() == out.data_ptr()
        assert close(out[:, :, :, :50], range(50), 1e-5)
        with pytest.raises(UsageError, match="`out` is"):
            await play(link, TOKENS, deadline=2.0, spec=SPEC, out=torch.zeros(SPEC.shape(60)))


@virtual
async def test_twenty_plays_at_once_share_one_connection(origin, short):
    size = short.track("Int4").total_bytes
    async with origin(rate=20 * size / 1.0) as link:
        many = [play(link, TOKENS, deadline=3.0, spec=SPEC) for _ in range(20)]
        results = await asyncio.gather(*many)
        assert link.downloads == 0
    assert all(close(played.kv) for played in results)
    assert all(played.met for played in results)


@virtual
async def test_watch_and_log_tell_the_story(origin, short):
    shots, lines = [], []
    async with origin(rate=short.track("Int4").total_bytes / 1.0) as link:
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC, watch=shots.append, log=lines.append)
    assert 20 < len(shots) < 80
    assert shots[-1].tracks == played.coverage
    assert any(shot.transfers for shot in shots)
    assert all(0 <= transfer.share <= 1 for shot in shots for transfer in shot.transfers.values())
    assert any(shot.rate >= shot.lower_bound > 0 for shot in shots)
    assert all(shot.network.rtt_s == 0.02 for shot in shots)
    assert [lines[0].name, lines[-1].name] == ["start", "deliver"]
    assert lines[0].lookup_s == played.lookup_s
    assert lines[-1].loss == played.loss
    times = [line.t for line in lines]
    assert times == sorted(times)


@virtual
async def test_a_lookup_counts_against_the_deadline(origin):
    async with origin(rtt_s=0.4) as link:
        played = await play(link, TOKENS, deadline=1.5, spec=SPEC, time_price=0.0)
    assert played.lookup_s == pytest.approx(0.4, abs=0.02)
    assert played.met
    assert 1.2 <= played.ttft_s <= 1.5


@virtual
async def test_time_for_what_no_cache_covers_is_set_aside(origin):
    tokens = (*TOKENS[:64], *range(90))
    async with origin(rate=1e5) as link:
        cost = PrefillCost(0.0, 0.5 / 90)
        played = await play(link, tokens, deadline=1.0, engine=ToyModel(), prefill_cost=cost, tail=0)
    assert played.tokens == 64
    assert played.ttft_s <= 0.5
    assert played.met


@virtual
async def test_a_play_is_late_if_what_no_cache_covers_takes_longer_than_is_left(origin):
    tokens = (*TOKENS[:64], *range(90))
    lines = []
    async with origin(rate=1e5) as link:
        cost = PrefillCost(0.0, 0.9 / 90)
        played = await play(link, tokens, deadline=1.0, engine=ToyModel(), prefill_cost=cost, log=lines.append)
    assert played.tokens == 64
    assert played.ttft_s <= 0.5  # no more than half of the deadline is set aside
    assert not played.met
    assert not lines[-1].met
    assert not played.record.met


@virtual
async def test_arguments_that_make_no_sense(origin):
    async with origin() as link:
        for options, error in (
            ({"deadline": 0.0}, "deadline"),
            ({"deadline": float("nan")}, "deadline"),
            ({"patience": 0.5}, "patience"),
            ({"time_price": -0.001}, "the price of time is -0.001"),
            ({"time_price": float("nan")}, "the price of time is nan"),
            ({"gpu_price": float("nan")}, "the price of .* is nan"),
        ):
            with pytest.raises(UsageError, match=error):
                await play(link, TOKENS, **({"deadline": 1.0, "spec": SPEC} | options))
        with pytest.raises(UsageError, match="at least one token"):
            await play(link, [], deadline=1.0, spec=SPEC)
        for wrong in ({"tokens": [1]}, None, "abc", b"ab", {1}, iter([1]), 5, torch.ones(2, 3, dtype=torch.int32)):
            with pytest.raises(UsageError, match=r"sequence of token ids|one dimension"):
                await play(link, wrong, deadline=1.0, spec=SPEC)
        for wrong in ([1.5], ["a"], [None], [-1], [1 << 32], [[1]]):
            with pytest.raises(UsageError, match="token ids are whole numbers"):
                await play(link, wrong, deadline=1.0, spec=SPEC)
        with pytest.raises(PolicyError, match="unknown policy"):
            await play(link, TOKENS, deadline=1.0, spec=SPEC, policy="hope")
        assert link.requests == 0


@virtual
async def test_a_profile_that_does_not_come_leaves_the_tracks_that_need_none(origin, long):
    profiles._profiles.clear()
    tokens, lines = prompt(160).tokens, []

    def stall(ask):
        return Fault(stall_after=100) if ask.track == "profile" else None

    async with origin(folder="long", rate=1e6, faults=stall) as link:
        played = await play(link, tokens, deadline=3.0, spec=SPEC, log=lines.append)
        assert played.met
        assert "AC-5x" not in played.coverage
    assert close(played.kv, tokens)
    if any(line.name == "profile_failed" for line in lines):
        assert played.lookup_s < 1.2
    async with origin(folder="long", rate=1e6) as link:
        await ProfileCache().fetch(link, long)
        played = await play(link, tokens, deadline=3.0, spec=SPEC, policy="fixed:AC-5x")
    assert set(played.coverage) == {"AC-5x"}
    assert close(played.kv, tokens, 0.05)
