"""What a play of a cache that is still being prefilled hears of its producer, and asks for ahead."""

from __future__ import annotations

import asyncio

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.result import IncompleteError
from kvabr.types.events import ProducerStopped, RequestSent
from kvabr.types.live import LiveEnd
from tests.client.live import GROUPS, TOKENS, origin, play, right, working
from tests.client.virtual import virtual
from tests.toymodel import SPEC


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
        (lambda data: data.replace(b'"Int4":[', b'"Int4":[1000000'), "more than a cache can need"),
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


LAYERS = ("FP16", "Int8")


async def begun(link, producer, sent=None, *, pace_s=0.2, **options):
    """A play that has all groups but the last; return it."""
    task = asyncio.ensure_future(play(link, **options))
    await asyncio.sleep(pace_s)
    for _ in range(GROUPS - 1):
        producer.publish()
        await asyncio.sleep(pace_s)
    assert not task.done()
    return task


@virtual
async def test_what_follows_a_base_is_waited_for_and_used(producer, asset):
    sent = []
    async with origin(producer, faults=lambda ask: sent.append((ask.track, ask.group))) as link:
        task = await begun(link, producer, time_price=1e-7)
        producer.publish(left_out=LAYERS, rest_s=0.1)
        await asyncio.sleep(0.09)
        assert not task.done()
        assert not {(name, GROUPS - 1) for name in LAYERS} & set(sent)
        producer.add(GROUPS - 1, LAYERS)
        producer.end()
        played = await task
    assert played.coverage[-1] in LAYERS
    assert right(played, asset)
    assert played.met


@pytest.mark.parametrize("skip", [0, 4])
@virtual
async def test_news_that_came_before_the_play_are_caught_up(producer, skip, asset):
    """Many at a time, in which groups are announced and added to in turn."""
    producer.publish(5, left_out=LAYERS, rest_s=0.5)
    for chunk in range(4):
        producer.add(chunk, ("FP16",), 0.5)
    producer.publish(4)
    for chunk in range(5):
        producer.add(chunk, ("Int8",) if chunk < 4 else LAYERS)
    async with origin(producer) as link:
        task = asyncio.ensure_future(play(link))
        await asyncio.sleep(2.0)
        producer.publish()
        producer.end()
        played = await task
    assert {*played.coverage[:-1]} <= {*LAYERS}
    assert right(played, asset)
