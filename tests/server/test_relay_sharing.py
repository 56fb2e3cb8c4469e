"""Assets that have groups in common, through a relay: what becomes of one does no harm to the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvabr.store.local import LocalStore
from kvabr.store.names import catalog_name, group_name
from kvabr.types.errors import NotFoundError, RequestError
from kvabr.types.naming import CATALOG_TRACK
from tests.assets import frame_file, make_asset
from tests.memory_transport import Fault
from tests.server.relays import BIG, LONG_S, chain_of, dialled, get, in_memory, play, relaying, sent, until

pytestmark = pytest.mark.process


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
        return [len(transfer.readers) for transfer in self.relay.source.groups._transfers.values()]

    @property
    def download(self):
        (held,) = [one for one in self.upstream._sending if one._fault.stall_after is not None]
        return held

    def release(self):
        download = self.download
        download._fault = replace(download._fault, stall_after=None)
        self.upstream.serve()

    async def both_wait(self, one, other):
        """Ask for the first group of each, so that the second player joins the first one's transfer."""
        waiting = []
        for player, asset in zip(self.players, (one, other), strict=True):
            waiting.append(asyncio.create_task(get(player, asset.catalog.namespace, "FP16")))
            await until(lambda: self.readers == [len(waiting)])
        return waiting


@contextlib.asynccontextmanager
async def held(root, tls, asset, **fault):
    def faults(ask):
        first = ask.track == "FP16" and ask.namespace == asset.catalog.namespace and not ask.attempt
        return Fault(**fault) if first else None

    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(in_memory(SimpleNamespace(store=LocalStore(root)), faults=faults))
        relay = await stack.enter_async_context(relaying(upstream, tls))
        yield Held(relay, upstream, [await stack.enter_async_context(await dialled(relay)) for _ in range(2)])


async def test_a_removed_asset_leaves_what_others_have(tmp_path, long, short, tls, fresh):
    async with chain_of(tmp_path, tls) as (server, relay), await dialled(relay) as player:
        await until(lambda: sum(map(len, server.source._logs.values())) == 1)
        await play(player, long)
        await play(player, short)
        asked = sent(server)
        assert asked["FP16"] == 8
        shutil.rmtree(long.store.folder)
        server.source.refresh()
        kept = set(short.catalog.track("FP16").digests)
        await until(lambda: len(relay.source.store) == len(kept))
        await play(player, short)
        assert sent(server) == asked
        with pytest.raises(NotFoundError):
            await get(player, long.catalog.namespace, CATALOG_TRACK)


@pytest.mark.parametrize("how", ["refused", "a lie"])
async def test_a_group_on_its_way_comes_under_another_name(tmp_path, long, short, tls, how):
    async with held(tmp_path, tls, long, stall_after=0, corrupt_at=0 if how == "a lie" else None) as world:
        waiting = await world.both_wait(long, short)
        if how == "refused":
            world.download.fail(RequestError("reset by the publisher"))
        else:
            world.release()
        async with asyncio.timeout(LONG_S):
            assert await asyncio.gather(*waiting) == 2 * [short.frame(0, "FP16")]
        assert world.relay.source.groups.bytes == len(world.relay.source.groups) == 0


async def test_who_has_read_some_of_a_lie_asks_again(tmp_path, long, short, tls):
    async with held(tmp_path, tls, long, stall_after=5000, corrupt_at=0) as world:
        waiting = await world.both_wait(long, short)
        await until(
            lambda: all(
                reader.has_read
                for transfer in world.relay.source.groups._transfers.values()
                for reader in transfer.readers
            )
        )
        world.release()
        async with asyncio.timeout(LONG_S):
            assert all(isinstance(one, RequestError) for one in await asyncio.gather(*waiting, return_exceptions=True))
        for player, asset in zip(world.players, (long, short), strict=True):
            assert await get(player, asset.catalog.namespace, "FP16") == asset.frame(0, "FP16")
        await until(lambda: not len(world.relay.source.groups))


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
