"""Plays of a cache that is still being prefilled, over a simulated link and in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.engine_hook import StepGate
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, NothingCached
from kvabr.player.assembler import Assembler
from kvabr.server.publication import BytesPublication
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.events import GroupsPublished, ProducerStopped, RequestSent, SoonerAlone
from kvabr.types.live import LiveEnd
from tests.client.classes import HYBRID, SLIDING, WINDOWS, published
from tests.client.classes import link as linked
from tests.client.live import Producer
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

TOKENS = prompt(160).tokens
GROUPS = 10
SLOW = PrefillCost.from_rate(1.0)
"""An engine that is of no help."""


@pytest.fixture(scope="module")
def asset(tmp_path_factory):
    """10 groups on three tracks; Int4 is the base."""
    return toy_asset(tmp_path_factory.mktemp("live") / "asset", ("FP16", "Int8", "Int4"), tokens=160)


@pytest.fixture
def producer(asset):
    return Producer(asset)


def right(found, asset, skip=0):
    """Whether a result has, of every group, exactly what the frame on its track decodes to."""
    catalog = asset.catalog.suffix(skip)
    assembler = Assembler(catalog)
    sizes = [catalog.group_tokens(group) for group in range(len(found.coverage))]
    begin = 0
    for group, (track, size) in enumerate(zip(found.coverage, sizes, strict=True)):
        place = found.kv[:, :, :, begin : begin + size]
        if track != RECOMPUTED:
            assembler.put(group, track, asset.frame(skip + group, track))
            if not torch.equal(place, assembler._place(group)):
                return False
        elif not place.abs().sum() > 0:
            return False
        begin += size
    return begin == found.kv.shape[3] == found.tokens


@asynccontextmanager
async def origin(producer, rate=1e6, rtt_s=0.02, **options):
    async with MemoryConnection(producer.find, MemoryLink(rate, rtt_s), **options) as link:
        yield link


@asynccontextmanager
async def working(producer, pace_s, chunks=None):
    """A producer at work."""
    task = asyncio.ensure_future(producer.run(pace_s, chunks))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def play(link, deadline=30.0, engine=None, tokens=TOKENS, **options):
    async with AsyncClient(link, model=None if engine else SPEC) as client:
        return await client.play(tokens, deadline=deadline, engine=engine, options=PlayOptions(**options))


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


@virtual
async def test_the_base_is_on_its_way_before_its_news(producer):
    """The round trip is long, and each group is here half of one after it was published."""
    sent = []
    note = lambda ask: sent.append((ask.track, ask.group))  # noqa: E731
    async with origin(producer, rtt_s=0.5, faults=note) as link, working(producer, 2.0):
        played = await play(link, policy="fixed:Int4")
    assert played.met
    assert played.ttft_s < 20.3
    assert [group for track, group in sent if track == "Int4"] == list(range(GROUPS))  # once each


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


@virtual
async def test_a_prompt_that_goes_on_elsewhere_plays_what_is_shared(producer, asset):
    async with origin(producer) as link, working(producer, 1.0):
        played = await play(link, tokens=[*TOKENS[:80], 96, 95, 94])
    assert played.tokens == 80
    assert right(played, asset)
    assert played.ttft_s < 6


@virtual
async def test_live_plays_may_be_refused(producer):
    producer.publish(GROUPS)
    async with origin(producer) as link:
        assert isinstance(await play(link, live=False), NothingCached)


@virtual
async def test_an_asset_is_played_by_its_name(producer, asset):
    async with origin(producer) as link, working(producer, 1.0), AsyncClient(link, model=SPEC) as client:
        played = await client.play_asset(producer.catalog.namespace, deadline=30)
        found = await client.find_asset(producer.catalog.namespace, within_s=60)
    assert right(played, asset)
    assert found.live == producer.live


@virtual
async def test_what_has_become_complete_meanwhile_is_told_by_its_catalog(producer, asset):
    producer.publish(2)
    async with origin(producer) as link:
        task = asyncio.ensure_future(play(link, deadline=20))
        await asyncio.sleep(1)
        producer.publish(7, tell=False)
        producer.publish(tell=False)
        producer.forgotten = True
        producer.news.finish("forgotten")
        played = await task
    assert right(played, asset)
    assert played.ttft_s < 5


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


@pytest.mark.parametrize("reason", ["the engine ran out of memory", "\U0001f4a5" * 500], ids=["usual", "longest"])
@virtual
async def test_a_producer_that_dies_ends_the_play_with_its_reason(producer, asset, reason):
    events = []
    async with origin(producer) as link:
        task = asyncio.ensure_future(play(link, deadline=20, log=events.append))
        await asyncio.sleep(1)
        producer.publish(3)
        await asyncio.sleep(1)
        producer.end(reason)
        with pytest.raises(IncompleteError, match=f"then it stopped: {reason[:20]}") as caught:
            await task
    assert asyncio.get_running_loop().time() - 1000 < 3
    assert right(caught.value.prefix, asset)
    assert [(event.edge, event.reason) for event in events if isinstance(event, ProducerStopped)] == [(3, reason)]


@virtual
async def test_the_end_of_another_production_is_not_that_of_this_one(producer):
    producer.publish(3)
    producer.news.append(LiveEnd("f" * 16, "the first one died").dumps())
    async with origin(producer) as link:
        with pytest.raises(IncompleteError, match="of another production") as caught:
            await play(link, deadline=20)
    assert "the first one died" not in str(caught.value)


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
async def test_a_prefix_is_cut_where_the_producer_stalls(producer, asset):
    async with origin(producer) as link, working(producer, 0.5, chunks=6):
        prefix = await played_prefix(link, deadline=8)
        assert asyncio.get_running_loop().time() - 1000 < 8.1
    assert prefix.tokens == 96
    assert right(prefix, asset)


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
async def test_what_the_producer_left_out_is_not_asked_for(producer, asset):
    sent = []
    async with origin(producer, faults=lambda ask: sent.append((ask.track, ask.group))) as link:
        task = asyncio.ensure_future(play(link))
        await asyncio.sleep(1)
        producer.publish(4)
        producer.publish(left_out=("FP16", "Int8"))
        producer.publish(left_out=("Int4",))
        producer.publish(4)
        played = await task
    assert played.coverage[4] == "Int4"
    assert right(played, asset)
    assert not {("FP16", 4), ("Int8", 4)} & set(sent)


@virtual
async def test_a_frame_that_is_not_what_the_news_said_is_not_used(producer, asset):
    """A producer that lies about a digest: the group comes on another track."""
    async with origin(producer) as link, working(producer, 0.2, chunks=2):
        task = asyncio.ensure_future(play(link, deadline=20))
        await asyncio.sleep(1)
        producer.publish(spoil=lambda name, frame: frame[:-1] + bytes([frame[-1] ^ 1]) if name == "Int4" else frame)
        producer.publish(spoil=lambda name, frame: frame + b"x" if name == "Int4" else frame)
        producer.publish(6)
        played = await task
    assert right(played, asset)
    assert "Int4" not in played.coverage[2:4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.replace(b'"group":2', b'"group":3'), "group 3 came, 2 is next"),
        (lambda data: data.replace(b"0123456789abcdef", b"0123456789abcdee"), "another production"),
        (lambda _: b"nonsense", "edge message"),
        (lambda _: b"", "edge message"),
        (lambda _: b"[" * 1000, "edge message"),
        (lambda data: data.replace(b'"Int4":[', b'"Int4":[1000000'), "no cache needs so many"),
    ],
)
@virtual
async def test_news_that_make_no_sense_end_the_play_with_what_is_in_place(producer, change, says, asset):
    async with origin(producer) as link:
        task = asyncio.ensure_future(play(link, deadline=5))
        await asyncio.sleep(1)
        producer.publish(2)
        await asyncio.sleep(0.5)
        append = producer.news.append
        producer.news.append = lambda data: append(change(data))
        producer.publish()
        if change(b"data"):
            with pytest.raises(IncompleteError, match=says) as caught:
                await task
        else:  # nothing comes: it is asked for again
            with pytest.raises(IncompleteError) as caught:
                await task
    assert caught.value.prefix.tokens == 32
    assert right(caught.value.prefix, asset)
    assert asyncio.get_running_loop().time() - 1000 < 5.2


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
async def test_plays_share_what_they_wait_for(producer, asset):
    sent = []
    note = lambda ask: sent.append((ask.track, ask.group))  # noqa: E731
    async with (
        origin(producer, faults=note) as link,
        AsyncClient(link, model=SPEC) as client,
        working(producer, 1.0),
    ):
        both = await asyncio.gather(*(client.play(TOKENS, deadline=30) for _ in range(2)))
    assert all(right(played, asset) for played in both)
    assert len([group for track, group in sent if track == "Int4"]) == GROUPS
    assert len([group for track, group in sent if track == "kvabr.edge"]) <= GROUPS + 1


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
    with pytest.raises(UsageError, match="for a producer"):
        PlayOptions(wait_for_producer_s=seconds)


@virtual
async def test_a_cancelled_play_leaves_nothing(producer):
    async with origin(producer) as link:
        task = asyncio.ensure_future(play(link))
        await asyncio.sleep(1)
        producer.publish(2)
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert link.downloads == 0
        assert not producer.news._watchers


@virtual
async def test_a_wait_for_the_producer_is_no_slow_link(producer):
    """Nothing is asked for again, abandoned or counted as silence while the producer is slow."""
    events = []
    async with origin(producer) as link, working(producer, 25.0):
        played = await play(link, deadline=300, log=events.append)
    assert played.met
    assert played.record.abandoned == 0
    asked = [(event.group, event.track) for event in events if isinstance(event, RequestSent)]
    assert len(asked) == len(set(asked))
    assert played.coverage[0] == "FP16"


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
