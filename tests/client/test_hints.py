"""Hints: what is expected to come is in the store before it does, and stays there."""

import asyncio
from queue import SimpleQueue

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.data import default_catalog
from kvabr.publish.publisher import Publisher
from kvabr.store.lru import ByteLru
from kvabr.types.errors import UsageError
from kvabr.types.peer import PeerOptions
from tests.client.served import LIMIT_S, Served
from tests.client.virtual import virtual
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(160).tokens


@virtual
async def test_a_play_after_a_hint_fetches_nothing_and_is_at_once_there(origin, long):
    async with origin(1e5, folder="long") as link:
        client = AsyncClient(link, model=SPEC)
        hinted = await client.hint_asset(long.namespace, within_s=60.0, keep_s=60.0)
        assert hinted.tokens == 160
        assert hinted.bytes >= long.track("FP16").total_bytes
        assert hinted.loss == pytest.approx(long.track("FP16").total_loss)
        before = link.stats().bytes_received
        played = await client.play(TOKENS, deadline=1.0)
        assert link.stats().bytes_received - before < 20_000  # the catalog
        assert set(played.coverage) == {"FP16"}
        assert played.ttft_s < 0.1
        await client.close()


@virtual
async def test_a_hint_yields_to_plays_and_keeps_what_has_come(origin, long):
    async with origin(long.track("Int4").total_bytes / 2, folder="long") as link:
        client = AsyncClient(link, model=SPEC)
        hinted = await client.hint_asset(long.namespace, within_s=1.0, options=PlayOptions(policy="fixed:Int4"))
        assert 0 < hinted.tokens < 160
        assert hinted.tokens == 16 * len(client.store)
        assert hinted.loss > 0
        with pytest.raises(UsageError, match="positive number of seconds"):
            await client.hint_asset(long.namespace, within_s=0.0)
        await client.close()


@virtual
async def test_a_hint_takes_no_turn_of_a_play(origin, long, short):
    async with origin(short.track("Int4").total_bytes, folder=".") as link:
        client = AsyncClient(link, model=SPEC, limits=Limits(plays=1))
        found, ours = [await client.find_asset(one.namespace, within_s=9.0) for one in (long, short)]
        hint = asyncio.create_task(client.hint_asset(found, within_s=30.0, options=PlayOptions(policy="fixed:FP16")))
        await asyncio.sleep(0.1)
        played = await client.play_asset(ours, deadline=4.0, options=PlayOptions(policy="fixed:Int4"))
        assert played.ttft_s < 1.5  # alone: 1.02
        assert not hint.done()
        assert (await hint).tokens == 160
        assert [client.metrics.value("kvabr_client_plays_total", result=one) for one in ("met", "hint")] == [1, 1]
        await client.close()


@virtual
async def test_what_a_hint_asks_for_is_kept_before_other_groups(origin, long):
    async with origin(1e8, folder="long") as link:
        client = AsyncClient(link, model=SPEC)
        await client.hint_asset(long.namespace, within_s=10.0, keep_s=100.0, options=PlayOptions(policy="fixed:FP16"))
        assert client.store.memory.kept_bytes == long.track("FP16").total_bytes
        await client.close()


def test_what_was_asked_for_first_is_kept_no_longer_beyond_half():
    lru = ByteLru(8, lambda _: 1, clock=lambda: 0.0)
    for each in range(8):
        lru.add(each, each)
    lru.keep([0, 1], 10.0)
    lru.keep([2, 3, 4], 10.0)
    assert lru.kept_bytes == 4
    for each in range(100, 104):
        lru.add(each, each)
    assert [each for each in range(8) if each in lru] == [0, 2, 3, 4]  # of one call the first ones
    lru.keep([2], 20.0)
    lru.keep([100, 101], 10.0)
    assert lru.kept_bytes == 4
    del lru[2]
    assert lru.kept_bytes == 3
    lru.clear()
    assert lru.kept_bytes == 0


@pytest.mark.process
async def test_a_session_that_forks_is_played_on_both_ways_and_shares_what_they_share(tmp_path):
    """Both are published at the same time: neither can take over the groups of the other."""
    (tmp_path / "assets").mkdir()
    made = Publisher(tmp_path / "assets", SPEC, prior=default_catalog(), tracks=["FP16"])
    forks = [[*TOKENS[:96], *own] for own in (TOKENS[96:], reversed(TOKENS[:40]))]
    slots, outcomes = [made.reserve(fork) for fork in forks], SimpleQueue()
    for slot, fork in zip(slots, forks, strict=True):
        slot.fill(ToyModel().prefill(fork), outcomes.put)
    made.close()
    assert [outcomes.get_nowait().verdict for _ in forks] == ["published"] * 2
    with Served(tmp_path / "assets", tmp_path) as served:
        peer = PeerOptions(fingerprint=served.fingerprint, timeout_s=LIMIT_S)
        async with AsyncClient(served.url, peer, model=SPEC) as client:
            hinted = [await client.hint_asset(await client.find(fork), within_s=LIMIT_S, keep_s=60.0) for fork in forks]
            assert [one.tokens for one in hinted] == [160, 136]
            assert len(client.store) == 6 + 4 + 3  # groups: of both, and of each
            played = await asyncio.gather(*(client.play(fork, deadline=LIMIT_S) for fork in forks))
            for one, fork in zip(played, forks, strict=True):
                assert torch.allclose(one.kv.float(), ToyModel().prefill(fork), rtol=1e-3, atol=1e-3)
            assert client.metrics.value("kvabr_client_groups_total", source="network") == 13
