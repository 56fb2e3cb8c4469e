"""What passes through a relay, between real sockets towards players and origins on QUIC or in memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from kvabr.server import relay_groups
from kvabr.server.grants import EVERYTHING
from kvabr.server.limits import ServerLimits
from kvabr.transfer.interface import read_all
from kvabr.types.errors import ConnectionLostError, NotFoundError, RequestError, TransportError
from kvabr.types.naming import CATALOG_TRACK
from tests.assets import make_asset
from tests.memory_transport import Fault, MemoryLink
from tests.server.relays import (
    BIG,
    ELSEWHERE,
    LONG_S,
    chain_of,
    dialled,
    get,
    in_memory,
    play,
    relaying,
    sent,
    until,
)

pytestmark = pytest.mark.process


async def test_a_group_is_fetched_once_for_two_hundred_players(small, tls, fresh):
    async with chain_of(small.store.folder, tls) as (server, relay), contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(await dialled(relay)) for _ in range(20)]

        async def fetched(connection):
            try:
                return await get(connection, small.catalog.namespace, "FP16", 3)
            except ConnectionLostError:  # by qh3, if acknowledgements come late; players dial again, too
                async with await dialled(relay) as another:
                    return await fetched(another)

        got = await asyncio.gather(*(fetched(connection) for connection in connections for _ in range(10)))
        assert len(got) == 200
        assert set(got) == {bytes(small.frame(3, "FP16"))}
        assert sent(server) == {CATALOG_TRACK: 1, "FP16": 1}
        await until(lambda: not relay.source.groups)
        assert relay.source.groups.bytes == 0


async def test_what_is_on_its_way_for_one_player_takes_no_room_of_the_others(asset, tls, fresh, monkeypatch):
    """So a crowd that plays one asset waits no longer than a single player."""
    limits = ServerLimits(memory_per_address=700_000)
    first = asset.catalog.track("FP16").bytes[0]
    monkeypatch.setattr(relay_groups, "PATIENCE_S", LONG_S)
    upstream = in_memory(asset, faults=lambda ask: Fault(stall_after=1000) if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls, limits=limits) as relay, contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(await dialled(relay)) for _ in range(8)]
        namespace = asset.catalog.namespace
        await asyncio.gather(*(get(connection, namespace, CATALOG_TRACK) for connection in connections))
        waiting = [asyncio.create_task(get(connection, namespace, "FP16")) for connection in connections]
        await until(lambda: relay.requests == 8)
        assert relay.budgets.total.memory == first
        assert len(relay.budgets) == 0
        for task in waiting:
            task.cancel()
        await until(lambda: relay.budgets.total.memory == 0)


async def test_what_does_not_exist_is_not_found_and_leaves_nothing(asset, tls):
    async with chain_of(asset.store.folder, tls) as (server, relay), await dialled(relay) as connection:
        for namespace, track, group in (
            (asset.catalog.namespace, "FP16", 8),
            (asset.catalog.namespace, "AC-5x", 0),
            (asset.catalog.namespace, CATALOG_TRACK, 1),
            (ELSEWHERE, CATALOG_TRACK, 0),
            (ELSEWHERE, "FP16", 0),
        ):
            with pytest.raises(NotFoundError):
                await get(connection, namespace, track, group)
        assert "FP16" not in sent(server)
        assert not relay.source.groups


async def test_a_cancel_reaches_the_origin_when_nobody_else_waits(asset, tls):
    stall = Fault(stall_after=100_000)
    upstream = in_memory(asset, faults=lambda ask: stall if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as one, await dialled(relay) as other:
        namespace = asset.catalog.namespace
        downloads = [connection.fetch(namespace, "FP16", 2, limit=BIG) for connection in (one, other)]
        for download in downloads:
            assert await download.read()
        downloads[0].cancel()
        transfer = next(iter(relay.source.groups._admitted))
        await until(lambda: len(transfer.readers) == 1)
        assert upstream.downloads == 1
        await other.close()  # as good as a cancel
        await until(lambda: upstream.downloads == 0)
        assert not relay.source.groups


async def test_the_most_urgent_player_sets_the_priority_at_the_origin(asset, tls):
    upstream = in_memory(asset, faults=lambda ask: Fault(stall_after=1000) if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as one, await dialled(relay) as other:
        namespace = asset.catalog.namespace
        first = one.fetch(namespace, "FP16", 2, limit=BIG, priority=200)
        assert await first.read()
        (flight,) = upstream._sending
        assert flight.priority == 200
        second = other.fetch(namespace, "FP16", 2, limit=BIG, priority=90)
        await until(lambda: flight.priority == 90)
        first.prioritise(10)
        await until(lambda: flight.priority == 10)
        first.cancel()
        await until(lambda: flight.priority == 90)
        second.cancel()


async def test_who_may_enter(asset, tls):
    token = "a token of some length/+ %"  # noqa: S105
    async with in_memory(asset) as upstream, relaying(upstream, tls, token=token) as relay:
        async with await dialled(relay, token=token) as connection:
            assert await get(connection, asset.catalog.namespace, "Int4")
        for wrong in (None, "a token of some length"):
            with pytest.raises(TransportError, match="token is missing or wrong"):
                async with await dialled(relay, token=wrong) as connection:
                    await get(connection, asset.catalog.namespace, "Int4")


async def test_draining_finishes_what_is_under_way(asset, tls):
    link = MemoryLink(rate=1e6)
    async with (
        in_memory(asset, path=link) as upstream,
        relaying(upstream, tls) as relay,
        await dialled(relay) as connection,
    ):
        download = connection.fetch(asset.catalog.namespace, "FP16", 0, limit=BIG)
        assert await asyncio.wait_for(download.read(), LONG_S)
        draining = asyncio.create_task(relay.drain(LONG_S))
        await asyncio.sleep(0)
        with pytest.raises((ConnectionLostError, RequestError)):
            await get(connection, asset.catalog.namespace, "FP16", 1)
        link.rate = None
        async with asyncio.timeout(LONG_S):
            assert await read_all(download) == asset.frame(0, "FP16")
            await draining


async def test_a_request_that_is_cancelled_before_anything_is_looked_up(small, tls, monkeypatch, recwarn):
    async with chain_of(small.store.folder, tls) as (_, relay), await dialled(relay) as connection:
        (peer,) = relay.peers
        find, cancelled = peer._find, []

        def find_and_cancel(number, message, grant):
            find(number, message, grant)
            peer._waiting.stop(number)  # as if both had come in one packet
            cancelled.append(number)

        monkeypatch.setattr(peer, "_find", find_and_cancel)
        download = connection.fetch(small.catalog.namespace, CATALOG_TRACK, limit=BIG)
        await until(lambda: cancelled)
        download.cancel()
        await asyncio.sleep(0)
        gc.collect()
        assert relay.requests == 0
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


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
        for file in (tmp_path / "cache").glob("g/*"):
            data = bytearray(file.read_bytes())
            data[1000] ^= 1
            file.write_bytes(data)
        async with relaying(upstream, tls, **folder) as relay, await dialled(relay) as connection:
            await play(connection, asset)
            assert relay.source.store.damaged == asset.catalog.groups
