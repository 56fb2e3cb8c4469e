"""The connections of plays over shared downloads: one transfer for many readers, checked once, kept if good."""

from __future__ import annotations

from kvabr.client.play_connection import PlayConnection, SharedTransfers
from kvabr.store.group_store import MemoryGroupStore, TieredGroupStore
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import read_all
from tests.client.virtual import virtual


def sharing(link):
    return SharedTransfers(link, TieredGroupStore(MemoryGroupStore(1 << 30)), ClientMetrics())


def joining(shared):
    return PlayConnection(shared, lambda _, priority: priority)


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
