"""The connections of plays over shared downloads: one transfer for many readers, checked once, kept if good."""

from __future__ import annotations

import asyncio

import pytest

from kvabr.client.play_connection import PlayConnection, SharedTransfers
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import read_all
from kvabr.types.errors import ConnectionLostError, NotFoundError
from tests.client.virtual import virtual


def sharing(link):
    return SharedTransfers(link, GroupCache(1 << 30), ClientMetrics())


def joining(shared):
    return PlayConnection(shared, lambda _, priority: priority)


@virtual
async def test_closing_tells_the_readers(origin, short):
    async with origin(rate=100.0) as link:
        shared = sharing(link)
        async with joining(shared) as play:
            reading = asyncio.create_task(read_all(play.fetch(short.namespace, "Int8", 0, limit=10_000)))
            await asyncio.sleep(5)
            await shared.close()
            with pytest.raises(ConnectionLostError, match="closed"):
                await reading


@virtual
async def test_one_who_joins_late_gets_all_of_it(origin, short):
    size, where = short.track("FP16").bytes[0], (short.namespace, "FP16")
    async with origin(rate=size) as link:
        shared = sharing(link)
        one, two = joining(shared), joining(shared)
        for play in (one, two):
            play.identify(*where, short.track("FP16").digests)
        early = one.fetch(*where, 0, limit=size)
        begin = await early.read()
        late = two.fetch(*where, 0, limit=size)
        whole = await read_all(late)
        assert await read_all(early) == whole
        assert begin == whole[: len(begin)]
        assert late.stats.limit == "network"  # the end of it came over the network
        assert link.requests == 1
        # The first part of it did not.
        assert len(whole) == size == late.stats.received
        await shared.close()


@virtual
async def test_the_last_to_leave_ends_the_download(origin, short):
    size, where = short.track("FP16").bytes[0], (short.namespace, "FP16")
    async with origin(rate=size) as link:
        shared = sharing(link)
        one, two = joining(shared), joining(shared)
        downloads = [play.fetch(*where, 0, limit=size) for play in (one, two)]
        await asyncio.gather(*(download.read() for download in downloads))
        downloads[0].cancel()
        await asyncio.sleep(0)
        assert link.downloads == 1
        downloads[1].cancel()
        await asyncio.sleep(0)
        assert link.downloads == 0


@virtual
async def test_a_catalog_that_lies_about_sizes_gets_nothing_of_what_is_kept(origin, short):
    track, where = short.track("Int8"), (short.namespace, "Int8")
    async with origin() as link:
        shared = sharing(link)
        play = joining(shared)
        play.identify(*where, track.digests)
        whole = await read_all(play.fetch(*where, 0, limit=track.bytes[0]))
        assert await read_all(play.fetch(*where, 0, limit=track.bytes[0])) == whole
        assert link.requests == 1
        await read_all(play.fetch(*where, 0, limit=track.bytes[0] + 10))
        assert link.requests == 2
        # A group that is another's digest: nothing is kept under it.
        play.identify(*where, track.digests[::-1])
        await read_all(play.fetch(*where, 1, limit=track.bytes[1]))
        await read_all(play.fetch(*where, 1, limit=track.bytes[1]))  # behind the check of the first
        assert shared.metrics.value("kvabr_client_downloads_total", result="damaged") >= 1
        assert list(play.cached_groups(*where)) == [4]
        await shared.close()


@virtual
async def test_a_play_that_is_over_fetches_nothing(origin, short):
    async with origin() as link:
        async with joining(sharing(link)) as play:
            with pytest.raises(NotFoundError):
                await read_all(play.fetch(short.namespace, "Int3", 0, limit=10))
        before = link.requests
        with pytest.raises(Exception, match="cancelled"):
            await read_all(play.fetch(short.namespace, "Int8", 0, limit=10))
        assert link.requests == before
        assert play.closed
        assert not link.closed
