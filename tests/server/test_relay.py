"""What passes through a relay, between real sockets towards players and origins on QUIC or in memory."""

import asyncio
import contextlib
import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvabr.server import relay_groups
from kvabr.server.limits import ServerLimits
from kvabr.store.local import LocalStore
from kvabr.store.names import catalog_name, group_name
from kvabr.types.errors import ConnectionLostError, NotFoundError, RequestError
from kvabr.types.naming import CATALOG_TRACK
from tests.assets import frame_file, make_asset
from tests.memory_transport import Fault
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
        assert not relay.budgets._waiting
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
        (transfer,) = relay.source.groups._under_way.values()
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


async def test_a_request_that_is_cancelled_before_anything_is_looked_up(small, tls, monkeypatch, recwarn):
    async with chain_of(small.store.folder, tls) as (_, relay), await dialled(relay) as connection:
        (peer,) = relay.peers
        find, cancelled = peer._find, []

        def find_and_cancel(number, message, grant):
            find(number, message, grant)
            peer._forget(number)  # as if both had come in one packet
            cancelled.append(number)

        monkeypatch.setattr(peer, "_find", find_and_cancel)
        download = connection.fetch(small.catalog.namespace, CATALOG_TRACK, limit=BIG)
        await until(lambda: cancelled)
        download.cancel()
        await asyncio.sleep(0)
        gc.collect()
        assert relay.requests == 0
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


async def test_the_memory_of_a_shared_group_is_counted_for_the_reader_that_is_left(asset, tls):
    upstream = in_memory(asset, faults=lambda ask: Fault(stall_after=1000) if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as one, await dialled(relay) as other:
        size, namespace = len(asset.frame(0, "FP16")), asset.catalog.namespace
        downloads = [connection.fetch(namespace, "FP16", limit=BIG) for connection in (one, other)]
        for download in downloads:
            assert await download.read()
        accounts = [peer._budget.accounts[0] for peer in relay.peers]
        assert sorted(account.memory for account in accounts) == [0, size]
        (transfer,) = relay.source.groups._under_way.values()
        downloads[0].cancel()
        await until(lambda: len(transfer.readers) == 1)
        assert sorted(account.memory for account in accounts) == [0, size]
        assert relay.budgets.total.memory == size
        downloads[1].cancel()
        await until(lambda: relay.budgets.total.memory == 0)


async def test_memory_has_a_bound(tmp_path, tls, fresh):
    asset = make_asset(tmp_path / "asset", list(range(120)), frame_bytes=300_000)
    most = 6_000_000
    limits = ServerLimits(memory=2_000_000)
    async with in_memory(asset) as upstream, relaying(upstream, tls, memory_bytes=most, limits=limits) as relay:
        kept, sent_now = relay.source.store.memory, relay.budgets.total
        async with await dialled(relay) as connection:
            for track in ("FP16", "Int4"):
                for group in range(30):
                    data = await get(connection, asset.catalog.namespace, track, group)
                    assert data == asset.frame(group, track)
                    assert kept.currsize <= most
                    assert sent_now.memory <= 2_000_000
        assert kept.evicted > 0
        assert kept.currsize > most // 2
        await until(lambda: not relay.source.groups)


async def test_the_disk_serves_what_memory_has_no_room_for_and_outlives_the_relay(tmp_path, tls, fresh):
    asset = make_asset(tmp_path / "asset", list(range(64)), frame_bytes=30_000)
    folder, upstream = {"disk": tmp_path / "cache", "disk_bytes": 1 << 30, "memory_bytes": 200_000}, in_memory(asset)
    async with upstream:
        for asked in (1 + asset.catalog.groups, 2 + asset.catalog.groups, 3 + asset.catalog.groups):
            async with relaying(upstream, tls, **folder) as relay, await dialled(relay) as connection:
                await play(connection, asset)
                await until(lambda: not relay.source.store._writes)
                assert len(relay.source.store.disk.kept) == asset.catalog.groups
                assert upstream.requests == asked  # the catalog anew, each group once
                await play(connection, asset)
                assert upstream.requests == asked


@pytest.fixture
def long(tmp_path):
    return make_asset(tmp_path / "long", list(range(32)), frame_bytes=20_000)


@pytest.fixture
def short(tmp_path, long):
    """Its four groups at FP16 are the first ones of the other's."""
    asset = make_asset(tmp_path / "short", list(range(16)), levels=("FP16",), frame_bytes=20_000)
    assert asset.catalog.track("FP16").digests == long.catalog.track("FP16").digests[:4]
    return asset


class Held:
    """A relay whose origin holds an asset's first group at FP16, at first; and a player for each of two assets."""

    def __init__(self, relay, upstream, players):
        self.relay, self.upstream, self.players = relay, upstream, players

    @property
    def readers(self):
        return [len(transfer.readers) for transfer in self.relay.source.groups._under_way.values()]

    @property
    def download(self):
        (held,) = [one for one in self.upstream._sending if one._fault.stall_after is not None]
        return held

    def release(self):
        download = self.download
        download._fault = replace(download._fault, stall_after=None)
        self.upstream.serve()


@contextlib.asynccontextmanager
async def held(root, tls, asset, **fault):
    def faults(ask):
        first = ask.track == "FP16" and ask.namespace == asset.catalog.namespace and not ask.attempt
        return Fault(**fault) if first else None

    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(in_memory(SimpleNamespace(store=LocalStore(root)), faults=faults))
        relay = await stack.enter_async_context(relaying(upstream, tls))
        yield Held(relay, upstream, [await stack.enter_async_context(await dialled(relay)) for _ in range(2)])


@pytest.mark.parametrize("how", ["refused", "a lie"])
async def test_a_group_that_one_asset_lacks_is_fetched_for_another(tmp_path, long, short, tls, how):
    """Both have the same groups, and the origin spoils that of one of them."""
    async with held(tmp_path, tls, long, stall_after=5000, corrupt_at=0 if how == "a lie" else None) as world:
        spoilt = asyncio.create_task(get(world.players[0], long.catalog.namespace, "FP16"))
        await until(lambda: world.readers == [1])  # otherwise the right one might be in the store first
        assert await get(world.players[1], short.catalog.namespace, "FP16") == short.frame(0, "FP16")
        if how == "refused":
            world.download.fail(RequestError("reset by the publisher"))
        else:
            world.release()
        with pytest.raises(RequestError):
            await spoilt
        assert await get(world.players[0], long.catalog.namespace, "FP16") == long.frame(0, "FP16")
        await until(lambda: not world.relay.source.groups)


async def test_a_catalog_that_lies_about_a_size_holds_up_nobody_else(tmp_path, long, tls):
    """It vouches for another asset's group with less bytes than that has."""
    liar = make_asset(tmp_path / "liar", list(range(100, 132)))
    catalog = json.loads(liar.catalog_bytes())
    (track,) = [one for one in catalog["tracks"] if one["name"] == "FP16"]
    track["digests"][0] = digest = long.catalog.track("FP16").digests[0]
    frame_file(liar.store.folder, 0, "FP16").rename(liar.store.path(group_name(digest)))
    liar.store.path(catalog_name(liar.name)).write_text(json.dumps(catalog))
    async with held(tmp_path, tls, liar, stall_after=0) as world:
        one, other = world.players
        download = one.fetch(liar.catalog.namespace, "FP16", 0, limit=BIG)
        await until(lambda: world.readers == [1])
        assert await get(other, long.catalog.namespace, "FP16") == long.frame(0, "FP16")
        download.cancel()
