"""Plays of a cache that is still being prefilled, over a simulated link and in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.engine_hook import StepGate
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, NothingCached
from kvabr.publish.encoder import publish
from kvabr.server.publication import BytesPublication
from kvabr.store.locations import open_asset, open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.events import GroupsPublished, SoonerAlone
from tests.client.classes import HYBRID, SLIDING, WINDOWS, published
from tests.client.classes import link as linked
from tests.client.live import GROUPS, TOKENS, Producer, origin, play, right, working
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt

SLOW = PrefillCost.from_rate(1.0)
"""An engine that is of no help."""


@virtual
async def test_groups_come_as_they_are_published(producer, asset):
    events = []
    async with origin(producer) as link, working(producer, 1.0):
        played = await play(link, log=events.append)
    assert played.tokens == 160
    assert right(played, asset)
    assert played.met
    # The last group is published after ten seconds, and its base needs no request; then the play ends soon.
    assert 10 < played.ttft_s < 10.5
    assert played.coverage[:-1] == ("FP16",) * 9
    edges = [event.edge for event in events if isinstance(event, GroupsPublished)]
    assert edges == list(range(1, 11))
    assert played.live.published == 10
    assert 9.9 < played.live.complete_s < 10.1
    assert played.live.stopped is played.live.sooner_alone_s is None


@pytest.mark.parametrize("before", [0, 1, 5, 9, 10])
@virtual
async def test_a_play_may_join_at_any_time(producer, before, asset):
    producer.publish(before)
    async with origin(producer) as link, working(producer, 1.0):
        played = await play(link)
    assert right(played, asset)
    assert played.live.published == 10
    assert played.ttft_s < GROUPS - before + 1


@virtual
async def test_a_complete_asset_is_preferred(producer, asset):
    producer.publish(3)

    def find(namespace, track):
        if track.startswith("prefix."):
            return BytesPublication(asset.catalog.dumps().encode())
        return producer.find(namespace, track)

    async with MemoryConnection(find, MemoryLink(1e6, 0.02)) as link, AsyncClient(link, model=SPEC) as client:
        found = await client.find(TOKENS, within_s=60)
    assert found.live is None


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """An asset of 330 groups, more than a lookup has names for."""
    spec = replace(SPEC, group_tokens=2)
    made, folder = prompt(660), tmp_path_factory.mktemp("endless") / "asset"
    with open_store(folder).writer() as writer:
        writer.commit(publish(ToyModel(spec), made, ("Int8", "Int4"), None, writer, time_engine=False))
    return open_asset(folder)


@virtual
async def test_a_prompt_of_many_groups_is_played_whole(endless):
    async with (
        origin(producer := Producer(endless, pace_s=0.01)) as link,
        working(producer, 0.01),
        AsyncClient(link, model=endless.catalog.spec) as client,
    ):
        played = await client.play(prompt(660).tokens, deadline=60.0)
    assert played.tokens == 660
    assert right(played, endless)
    assert played.live.published == 330


@virtual
async def test_what_came_before_its_news_is_kept_for_the_next_play(producer, asset):
    asked = []
    async with (
        origin(producer, rate=2e4, faults=lambda ask: asked.append((ask.track, ask.group))) as link,
        working(producer, 0.01),
        AsyncClient(link, model=SPEC) as client,
    ):
        played = await client.play(TOKENS, deadline=30.0, options=PlayOptions(time_price=100.0))
        assert played.coverage == ("Int4",) * GROUPS
        assert all(digest in client.store for digest in asset.catalog.track("Int4").digests)
        producer.forgotten = True
        asked.clear()
        again = await client.play(TOKENS, deadline=30.0, options=PlayOptions(time_price=100.0))
        assert right(again, asset)
        # The first ones were asked for before the play knew that they exist.
        assert {group for track, group in asked if track == "Int4"} <= {0, 1}


@virtual
async def test_a_prompt_that_goes_on_elsewhere_plays_what_is_shared(producer, asset):
    async with origin(producer) as link, working(producer, 1.0):
        played = await play(link, tokens=[*TOKENS[:80], 96, 95, 94])
    assert played.tokens == 80
    assert right(played, asset)
    assert played.ttft_s < 6


@virtual
async def test_live_plays_may_be_refused(producer, asset):
    producer.publish(GROUPS)
    async with origin(producer) as link:
        assert isinstance(await play(link, live=False), NothingCached)
        assert right(await play(link), asset)


@virtual
async def test_an_asset_is_played_by_its_name(producer, asset):
    async with origin(producer) as link, working(producer, 1.0), AsyncClient(link, model=SPEC) as client:
        played = await client.play_asset(producer.catalog.namespace, deadline=30)
        found = await client.find_asset(producer.catalog.namespace, within_s=60)
    assert right(played, asset)
    assert found.live == producer.live


@virtual
async def test_a_producer_that_stalls_ends_the_play_at_its_deadline(producer, asset):
    async with origin(producer) as link, working(producer, 0.5, chunks=6):
        with pytest.raises(IncompleteError, match=r"4 of 10 groups .* published 6, no more so far") as caught:
            await play(link, deadline=8)
        assert 7.9 < asyncio.get_running_loop().time() - 1000 < 8.1
    assert caught.value.missing == (6, 7, 8, 9)
    prefix = caught.value.prefix
    assert prefix.tokens == 96
    assert right(prefix, asset)


@virtual
async def test_a_producer_that_never_publishes(producer):
    async with origin(producer) as link:
        with pytest.raises(IncompleteError, match="has published none") as caught:
            await play(link, deadline=3)
        assert 2.9 < asyncio.get_running_loop().time() - 1000 < 3.1
    assert caught.value.prefix is None


@virtual
async def test_an_engine_computes_what_a_dead_producer_did_not_publish(producer, asset):
    engine = ToyModel(SPEC)
    async with origin(producer) as link:
        task = asyncio.ensure_future(
            play(link, deadline=20, engine=engine, prefill_cost=PrefillCost.from_rate(100.0), gpu_price=float("inf"))
        )
        await asyncio.sleep(1)
        producer.publish(6)
        await asyncio.sleep(1)
        producer.end("killed")
        played = await task
    assert played.tokens == 160
    assert right(played, asset)
    assert played.coverage[6:] == ("recomputed",) * 4
    assert (played.live.published, played.live.complete_s, played.live.stopped) == (6, None, "killed")
    assert played.ttft_s < 10


@virtual
async def test_an_engine_computes_in_time_what_a_stalling_producer_does_not_publish(producer, asset):
    engine = ToyModel(SPEC)
    async with origin(producer) as link, working(producer, 0.5, chunks=6):
        played = await play(
            link, deadline=12, engine=engine, prefill_cost=PrefillCost.from_rate(32.0), gpu_price=float("inf")
        )
    assert played.met
    assert right(played, asset)
    assert set(played.coverage[6:]) == {"recomputed"}


async def played_prefix(link, deadline=30.0, cost=SLOW, skip=0, tokens=TOKENS, **more):
    async with AsyncClient(link, model=SPEC) as client:
        found = await client.find(tokens, within_s=60)
        return await client.play_prefix(found, deadline=deadline, cost=cost, skip=skip, **more)


@pytest.mark.parametrize("skip", [0, 4])
@virtual
async def test_a_prefix_for_an_engine(producer, skip, asset):
    async with origin(producer) as link, working(producer, 1.0):
        prefix = await played_prefix(link, skip=skip)
    assert (prefix.first, prefix.tokens, prefix.cut) == (16 * skip, 160 - 16 * skip, None)
    assert right(prefix, asset, skip)
    assert prefix.live.published == 10 - skip


@virtual
async def test_a_prefix_is_cut_where_the_producer_dies(producer):
    producer.publish(4)
    producer.end("killed")
    async with origin(producer) as link:
        prefix = await played_prefix(link, deadline=8)
        assert asyncio.get_running_loop().time() - 1000 < 2
    assert prefix.tokens == 64
    assert "then it stopped: killed" in prefix.cut


@virtual
async def test_an_engine_that_would_be_sooner_is_told(producer):
    events = []
    engine = ToyModel(SPEC)
    async with origin(producer) as link, working(producer, 1.0):
        played = await play(
            link,
            engine=engine,
            prefill_cost=PrefillCost.from_rate(100.0),
            gpu_price=float("inf"),
            log=events.append,
        )
    (told,) = [event for event in events if isinstance(event, SoonerAlone)]
    assert told.alone_s == pytest.approx(1.6)
    assert told.ends_s == pytest.approx(10, abs=0.2)
    assert played.live.sooner_alone_s == pytest.approx(7.4, abs=0.3)


@virtual
async def test_upgrades_go_on_after_the_play(producer, asset):
    async with origin(producer, rate=20_000) as link, AsyncClient(link, model=SPEC) as client:
        async with working(producer, 0.05):
            played = await client.play(TOKENS, deadline=3.0, options=PlayOptions(after=60.0))
        assert played.met
        played.upgrades.into(StepGate())
        await played.upgrades.wait()
        better = replace(played, coverage=played.upgrades.coverage)
        assert better.coverage != played.coverage
        assert right(better, asset)


@virtual
async def test_a_live_catalog_that_makes_no_sense_is_refused(producer):
    good = producer.find

    def find(namespace, track):
        return BytesPublication(b"{}\n{}") if track.startswith("live.") else good(namespace, track)

    async with MemoryConnection(find, MemoryLink(1e6, 0.02)) as link, AsyncClient(link, model=SPEC) as client:
        with pytest.raises(FormatError):
            await client.find(TOKENS, within_s=60)


@virtual
async def test_a_connection_that_is_lost_ends_the_play(producer):
    async with origin(producer, lasts_s=3.5) as link, working(producer, 1.0):
        with pytest.raises(IncompleteError) as caught:
            await play(link, deadline=8)
    assert caught.value.prefix.tokens == 48


@virtual
async def test_a_decoder_may_come_before_its_producer(producer, asset):
    producer.begun = False
    async with origin(producer) as link:
        assert isinstance(await play(link), NothingCached)
        task = asyncio.ensure_future(play(link, wait_for_producer_s=5.0))
        await asyncio.sleep(2)
        producer.begun = True
        async with working(producer, 0.5):
            played = await task
        assert right(played, asset)
        producer.begun = False
        assert isinstance(await play(link, wait_for_producer_s=2.0), NothingCached)


@virtual
async def test_a_wait_beyond_the_deadline_ends_before_it(producer):
    """That nobody began is an answer, not a lookup that failed."""
    producer.begun = False
    clock = asyncio.get_running_loop().time
    async with origin(producer) as link:
        began_s = clock()
        assert isinstance(await play(link, deadline=2.0, wait_for_producer_s=10.0), NothingCached)
        assert clock() - began_s < 2.0
    async with origin(producer, rtt_s=0.5) as link:  # a round trip that takes longer than what is left after the wait
        assert isinstance(await play(link, deadline=2.0, wait_for_producer_s=10.0), NothingCached)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_wait_that_makes_no_sense(seconds):
    with pytest.raises(UsageError, match="producer"):
        PlayOptions(wait_for_producer_s=seconds)


@pytest.mark.parametrize("spec", [SLIDING, HYBRID, WINDOWS], ids=lambda spec: spec.model)
@virtual
async def test_groups_of_several_layer_classes_come_as_they_are_published(spec, tmp_path):
    tokens = list(range(3, 150))
    complete = published(tmp_path, spec, tokens)
    producer = Producer(complete.assets[0])
    options = PlayOptions(policy="fixed:Int8")
    async with linked(complete) as link, AsyncClient(link, model=spec) as client:
        wanted = await client.play(tokens, deadline=30, options=options)
    async with origin(producer) as link, AsyncClient(link, model=spec) as client, working(producer, 1.0):
        played = await client.play(tokens, deadline=30, options=options)
        found = await client.find(tokens, within_s=60)
    assert found.live is not None
    assert played.coverage == wanted.coverage
    assert played.spans == wanted.spans
    assert all(map(torch.equal, played.parts, wanted.parts))
    assert played.live.published == len(played.coverage)
