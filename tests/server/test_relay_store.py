"""What a relay keeps of groups, and its room for those on their way."""

from __future__ import annotations

import asyncio

import pytest

from kvabr.server import relay_groups
from kvabr.server.grants import EVERYTHING
from kvabr.transfer.interface import read_all
from kvabr.types.errors import RequestError
from tests.assets import make_asset
from tests.memory_transport import Fault
from tests.server.relays import BIG, dialled, get, in_memory, play, relaying, until

pytestmark = pytest.mark.process


async def test_urgent_groups_get_the_room_first(asset, tls):
    size = len(asset.frame(0, "FP16"))
    stalled = Fault(stall_after=1000)
    upstream = in_memory(asset, faults=lambda ask: stalled if ask.track == "FP16" and ask.group == 0 else None)
    # A quarter is for groups on their way: one, while another group does not fit.
    async with upstream, relaying(upstream, tls, memory_bytes=6 * size) as relay, await dialled(relay) as connection:
        namespace, groups = asset.catalog.namespace, relay.source.groups
        first = connection.fetch(namespace, "FP16", 0, limit=BIG)
        assert await first.read()
        waiting = {
            group: connection.fetch(namespace, "FP16", group, limit=BIG, priority=priority)
            for group, priority in ((1, 200), (2, 1), (3, 100))
        }
        await until(lambda: len(groups) == 4)
        assert groups.bytes == size
        order = []

        async def read(group, download):
            assert await read_all(download) == asset.frame(group, "FP16")
            order.append(group)

        tasks = [asyncio.create_task(read(*one)) for one in waiting.items()]
        first.cancel()
        await asyncio.gather(*tasks)
        assert order == [2, 3, 1]
        assert groups.bytes == len(groups) == 0


async def test_a_reader_that_does_not_read_makes_room_for_others(asset, tls, monkeypatch):
    monkeypatch.setattr(relay_groups, "IDLE_READ_S", -1.0)  # at once
    size = len(asset.frame(0, "FP16"))
    async with in_memory(asset) as upstream, relaying(upstream, tls, memory_bytes=6 * size) as server:
        relay = server.source
        track = await relay.find_soon(EVERYTHING, asset.catalog.namespace, "FP16")
        deaf = track.open(0)
        await until(lambda: deaf.available == deaf.size)
        other = track.open(1)
        await until(lambda: other.available == other.size)
        with pytest.raises(RequestError, match="too slowly"):
            _ = deaf.available
        deaf.close()
        other.close()
        assert relay.groups.bytes == 0


async def test_memory_has_a_bound(tmp_path, tls, fresh):
    asset = make_asset(tmp_path / "asset", list(range(120)), frame_bytes=300_000)
    most = 8_000_000
    async with in_memory(asset) as upstream, relaying(upstream, tls, memory_bytes=most) as relay:
        kept, on_their_way = relay.source.store.memory, relay.source.groups
        async with await dialled(relay) as connection:
            for track in ("FP16", "Int4"):
                for group in range(30):
                    data = await get(connection, asset.catalog.namespace, track, group)
                    assert data == asset.frame(group, track)
                    assert kept.total_bytes <= most * 3 // 4
                    assert on_their_way.bytes <= most // 4
        assert kept.evicted > 0
        assert kept.total_bytes > most // 2
        await until(lambda: not on_their_way)


async def test_the_disk_serves_what_memory_has_no_room_for_and_outlives_the_relay(tmp_path, tls, fresh):
    asset = make_asset(tmp_path / "asset", list(range(64)), frame_bytes=30_000)
    folder, upstream = {"disk": tmp_path / "cache", "disk_bytes": 1 << 30, "memory_bytes": 200_000}, in_memory(asset)
    async with upstream:
        for asked in (1 + asset.catalog.groups, 2 + asset.catalog.groups, 3 + asset.catalog.groups):
            async with relaying(upstream, tls, **folder) as relay, await dialled(relay) as connection:
                await play(connection, asset)
                await until(lambda: not relay.source.store._writes)
                assert len(relay.source.store.disk) == asset.catalog.groups
                assert upstream.requests == asked  # the catalog anew, each group once
                await play(connection, asset)
                assert upstream.requests == asked


async def test_a_damaged_file_is_fetched_again(tmp_path, tls, fresh):
    asset = make_asset(tmp_path / "asset", list(range(8)), frame_bytes=300_000)
    folder = {"disk": tmp_path / "cache", "disk_bytes": 1 << 30}
    async with in_memory(asset) as upstream:
        async with relaying(upstream, tls, **folder) as relay, await dialled(relay) as connection:
            await play(connection, asset)
        for file in (tmp_path / "cache").glob("*.group"):
            data = bytearray(file.read_bytes())
            data[1000] ^= 1
            file.write_bytes(data)
        async with relaying(upstream, tls, **folder) as relay, await dialled(relay) as connection:
            await play(connection, asset)
            assert relay.source.store.damaged == asset.catalog.groups
