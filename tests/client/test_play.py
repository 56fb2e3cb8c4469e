"""Whole plays over links of every kind: what comes is the cache, on time, without a hole."""

from __future__ import annotations

import pytest
import torch

from kvabr.client import profiles
from kvabr.client.profiles import ProfileCache
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
async def test_a_prompt_that_goes_on_behind_an_asset_with_a_short_last_group(origin, short):
    tokens = (*TOKENS, *((token + 1) % 97 for token in prompt(160).tokens[70:160]))
    async with origin() as link:
        played = await play(link, tokens, deadline=2.0, spec=SPEC)
    assert played.tokens == 70
    assert played.catalog == short.behind(short.groups, 90)


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
async def test_arguments_that_make_no_sense(origin):
    async with origin() as link:
        for options, error in (
            ({"deadline": 0.0}, "deadline"),
            ({"deadline": float("nan")}, "deadline"),
            ({"patience": 0.5}, "patience"),
            ({"after": 0.0}, "after is 0"),
            ({"tail": -1}, "tail"),
            ({"question_tokens": 1 << 40}, "question_tokens"),
            ({"time_price": -0.001}, "time_price is -0.001"),
            ({"time_price": float("nan")}, "time_price is nan"),
            ({"gpu_price": float("nan")}, "gpu_price is nan"),
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
