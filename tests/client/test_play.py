"""Whole plays over links of every kind: what comes is the cache, on time, without a hole."""

from functools import cache, partial

import pytest
import torch

from kvabr import AsyncClient, PlayOptions
from kvabr.client import memory
from kvabr.client.memory import PeerHistory, ProfileCache
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import NotFoundError, PlayError, PolicyError, UsageError
from kvabr.types.events import PlayStarted
from kvabr.types.naming import TrackNamespace
from tests.client import live
from tests.client.playing import play, play_asset
from tests.client.virtual import virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
COST = PrefillCost(0.001, 0.001)


@cache
def exact_of(tokens):
    return ToyModel().prefill(tokens)


def close(kv, tokens=TOKENS, error=0.02):
    """Whether a cache is that of the tokens, about."""
    exact = exact_of(tuple(tokens))
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
async def test_no_cache_that_would_lose_more_than_the_bound_is_delivered(origin):
    how = {"deadline": 2.0, "policy": "fixed:Int4", "max_loss": 1e-9}
    async with origin() as link:
        with pytest.raises(PlayError, match=r"max_loss \(1e-09\)"):
            await play(link, TOKENS, **how)
        played = await play(link, TOKENS, **how, engine=ToyModel(), prefill_cost=COST)
    assert played.loss == 0.0
    assert close(played.kv, error=1e-5)


@virtual
async def test_a_prompt_that_goes_on_behind_an_asset_with_a_short_last_group(origin, short):
    tokens = (*TOKENS, *((token + 1) % 97 for token in prompt(160).tokens[70:160]))
    async with origin() as link:
        played = await play(link, tokens, deadline=2.0, spec=SPEC)
    assert played.tokens == 70
    assert played.catalog == short.with_tail(short.groups, 90)


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
        with pytest.raises(UsageError, match="`out` must be"):
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
        with pytest.raises(UsageError, match="at least 1 token"):
            await play(link, [], deadline=1.0, spec=SPEC)
        for wrong in ({"tokens": [1]}, None, "abc", b"ab", {1}, iter([1]), 5, torch.ones(2, 3, dtype=torch.int32)):
            with pytest.raises(UsageError, match=r"sequence of token ids|one dimension"):
                await play(link, wrong, deadline=1.0, spec=SPEC)
        for wrong in ([1.5], ["a"], [None], [-1], [1 << 32], [[1]]):
            with pytest.raises(UsageError, match="token ids must be whole numbers"):
                await play(link, wrong, deadline=1.0, spec=SPEC)
        with pytest.raises(PolicyError, match="unknown policy"):
            await play(link, TOKENS, deadline=1.0, spec=SPEC, policy="hope")
        assert link.requests == 0


@virtual
async def test_a_profile_that_does_not_come_leaves_the_tracks_that_need_none(origin, long):
    memory._profiles.clear()
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


PROMPT = (*TOKENS, 5, 6, 7)
FAST, SLOW = PrefillCost(0.3, 1e-6), PrefillCost(0.0, 0.3)


async def played(link, tokens=PROMPT, **how):
    options = {"policy": "fixed:Int4", "prefill_cost": FAST, "engine": ToyModel()} | how
    return await play(link, tokens, deadline=2.0, **options)


@virtual
async def test_the_tail_is_neither_fetched_nor_waited_for(origin):
    lines = []
    async with origin() as link:
        whole = await played(link, tail=0)
        found = await played(link, tail=40, log=lines.append)
    assert (whole.tokens, whole.tail) == (70, 0)
    assert (found.tokens, found.tail) == (32, 38)
    assert found.kv.shape[3] == 32
    assert found.coverage == ("Int4",) * 2
    assert found.record.bytes_fetched < whole.record.bytes_fetched
    assert found.loss < whole.loss
    assert found.met
    (start,) = [line for line in lines if isinstance(line, PlayStarted)]
    assert (start.groups, start.tail) == (2, 38 + 3)
    assert start.tail_s == pytest.approx(38e-6)


LONGEST = """
from kvabr.abr.policies.cheapfirst import CheapFirst

class Longest(CheapFirst):
    def choose_tail(self, offers, costs):
        return len(offers) - 1
"""


@virtual
async def test_the_engines_time_for_the_tail_is_set_aside(origin, tmp_path):
    (tmp_path / "longest.py").write_text(LONGEST)
    async with origin(rate=2e5) as link:
        policy = f"{tmp_path / 'longest.py'}:Longest"
        found = await played(link, policy=policy, tail=40, prefill_cost=PrefillCost(0.0, 0.02))
    assert found.tail == 38
    assert found.met
    assert found.ttft_s <= 2.0 - 0.02 * (38 + 3)


@virtual
async def test_of_a_cache_that_is_being_prefilled_the_last_groups_are_not_waited_for(producer, asset):
    how = {"policy": "anytime", "prefill_cost": FAST, "engine": ToyModel(), "question_tokens": 4, "time_price": 0.1}
    how |= {"gpu_price": 10.0}  # or all of it would be computed at once
    async with live.origin(producer) as link, live.working(producer, 1.0):
        found = await live.play(link, tail=40, **how)
    assert found.tail == 32
    assert found.tokens == 160 - 32
    assert 8.0 <= found.ttft_s < 8.5  # the eighth of ten groups, one a second
    assert live.right(found, asset)


@virtual
async def test_a_client_that_does_not_play_knows_what_others_have_heard(origin, short, tmp_path):
    options = PlayOptions(time_price=0.0, gpu_price=0.0)
    async with origin() as link, AsyncClient(link, cache=tmp_path, options=options) as client:
        link.peer = "moqt://origin.example/"
        ask = partial(client.tail_of, short, deadline=10.0, cost=PrefillCost(0.0, 0.05), uncached=3)
        assert await ask() == 0  # more than a little of the time left
        other = PeerHistory(tmp_path / "peers.json")
        other.record(link.peer, short.track("Int4").total_bytes / 8.0, 0.02)
        other.save()
        assert await ask() > 0
