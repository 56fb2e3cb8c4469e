"""Plays of a cache whose groups are announced with their base alone; their other tracks follow."""

from __future__ import annotations

import asyncio

import pytest

from tests.client.live import Producer
from tests.client.test_live import GROUPS, origin, play, right
from tests.client.virtual import virtual
from tests.toymodel import toy_asset

LAYERS = ("FP16", "Int8")


@pytest.fixture(scope="module")
def asset(tmp_path_factory):
    """10 groups on three tracks; Int4 is the base."""
    return toy_asset(tmp_path_factory.mktemp("live") / "asset", ("FP16", "Int8", "Int4"), tokens=160)


@pytest.fixture
def producer(asset):
    return Producer(asset)


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


@pytest.mark.parametrize("ends", [False, True])
@virtual
async def test_a_promise_that_is_not_kept_does_not_hold_a_play(producer, ends, asset):
    async with origin(producer) as link:
        task = await begun(link, producer)
        producer.publish(left_out=LAYERS, rest_s=0.1)
        before_s = asyncio.get_running_loop().time()
        if ends:
            producer.end("the engine was killed")
        played = await task
        took_s = asyncio.get_running_loop().time() - before_s
    assert took_s < (0.1 if ends else 1.0)
    assert played.coverage[-1] == "Int4"
    assert played.live.stopped is None  # every group was published
    assert right(played, asset)


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
