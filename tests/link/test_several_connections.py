"""Several connections to one peer: how many are worth it."""

import asyncio
from functools import partial

import pytest

from kvabr.client.peers import ClientPeer
from kvabr.link.moqt.connect import connect
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import read_all
from kvabr.transfer.peer import Peer
from kvabr.types.errors import TransportError, UsageError
from kvabr.types.peer import PeerOptions
from tests.assets import make_asset
from tests.client.virtual import virtual
from tests.memory_transport import Dials, MemoryConnection, MemoryLink
from tests.server.relays import origin, url_of

MOST = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    made = make_asset(tmp_path_factory.mktemp("assets") / "large", range(128), frame_bytes=3_000_000, levels=("FP16",))
    return made.catalog, partial(PublishedAssets(made.store.folder).find, EVERYTHING)


async def all_of(connection, catalog, times=1):
    """Fetch all groups, as many at a time as keep every connection busy; return the seconds."""
    began_s = asyncio.get_running_loop().time()
    gate = asyncio.Semaphore(8)

    async def one(group):
        async with gate:
            size = catalog.track("FP16").bytes[group]
            fetch = partial(connection.fetch, catalog.namespace, "FP16", group, limit=size, exact=True)
            data = await read_all(fetch(priority=group))
            assert len(data) == size

    for _ in range(times):
        await asyncio.gather(*map(one, range(catalog.groups)))
    return asyncio.get_running_loop().time() - began_s


@virtual
async def test_connections_are_added_while_each_brings_more(large):
    catalog, find = large
    links = [MemoryLink(1e8, 0.001) for _ in range(MOST)]
    left = iter(links)

    async def another():
        return MemoryConnection(find, next(left))

    async with Peer(Dials(another, MOST)) as peer:
        await all_of(peer, catalog, 8)
        assert peer.used == MOST
        assert await all_of(peer, catalog) == pytest.approx(96e6 / 4e8, rel=0.25)
        assert peer.stats().bytes_received == 9 * catalog.track("FP16").total_bytes


@virtual
async def test_a_path_that_carries_no_more_keeps_one_connection(large):
    """Another connection is tried, and then left alone for a minute."""
    catalog, find = large
    links: list[MemoryLink] = []

    async def another():
        links.append(MemoryLink(0.0, 0.001))
        for link in links:
            link.rate = 1e8 / len(links)
        return MemoryConnection(find, links[-1])

    async with Peer(Dials(another, MOST)) as peer:
        await all_of(peer, catalog, 6)
        assert peer.used == 1
        assert len(links) == 2


def begun(peer, catalog, groups=8):
    """Request some groups of 3 MB, one after the other, and return what reads them."""
    size = catalog.track("FP16").bytes[0]
    fetch = partial(peer.fetch, catalog.namespace, "FP16", limit=size, exact=True)
    return [asyncio.ensure_future(read_all(fetch(group, priority=group))) for group in range(groups)]


@virtual
async def test_closing_ends_the_dial_of_a_further_connection(large):
    catalog, find = large
    dialled, ended = [], []

    async def another():
        dialled.append(1)
        try:
            if len(dialled) > 1:
                await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            ended.append(1)
            raise
        return MemoryConnection(find, MemoryLink(1e8, 0.001))

    async with Peer(Dials(another, MOST)) as peer:
        reading = begun(peer, catalog)
        await asyncio.sleep(0.1)
        assert len(dialled) == 2
    assert ended == [1]
    await asyncio.gather(*reading, return_exceptions=True)


@virtual
async def test_closing_opens_no_connection(large):
    """What is under way then ends at once, which is not the rate of the connections."""
    catalog, find = large
    made = []

    async def another():
        made.append(MemoryConnection(find, MemoryLink(1e8, 0.001)))
        return made[-1]

    async with Peer(Dials(another, MOST)) as peer:
        reading = begun(peer, catalog)
        await asyncio.sleep(0.055)  # long enough to measure, as soon as something ends
        assert peer.stats().bytes_received > 4 << 20
    await asyncio.gather(*reading, return_exceptions=True)
    assert [one.closed for one in made] == [True]


@virtual
async def test_a_peer_with_several_connections_is_one_peer(large):
    catalog, find = large
    metrics, dialled = ClientMetrics(), []

    async def another():
        dialled.append(1)
        if len(dialled) == 3:
            raise TransportError("no more than two")
        return MemoryConnection(find, MemoryLink(1e8, 0.001))

    peer = Peer(Dials(another, MOST))
    downloads = ClientPeer("a peer", peer, GroupCache(0), metrics, own=True)
    await peer.connected()
    await all_of(peer, catalog, 4)
    assert (peer.used, len(dialled)) == (2, 3)
    assert metrics.value("kvabr_client_peers") == 1
    assert metrics.value("kvabr_client_dials_failed_total") == 0  # the peer was reached
    for _ in range(2):
        await downloads.close()
        assert metrics.value("kvabr_client_peers") == 0


@pytest.mark.process
async def test_several_connections_of_a_client(asset, tls):
    async with origin(asset.store.folder, tls) as server:
        how = PeerOptions(transport="tcp", connections=3, fingerprint=server.fingerprint, timeout_s=300.0)
        async with connect(url_of(server), how) as connection:
            await connection._open()
            assert len(server.peers) == 2
            sizes = asset.catalog.track("FP16").bytes
            fetch = partial(connection.fetch, asset.catalog.namespace, "FP16", exact=True)
            readers = [fetch(group, limit=sizes[group]) for group in range(asset.catalog.groups)]
            assert [len(await read_all(one)) for one in readers] == list(sizes)
            assert min(one.bytes_received for one in connection._connections) > 0
            assert connection.stats().bytes_received == sum(sizes)


@pytest.mark.parametrize("connections", [0, -1, 17])
def test_numbers_of_connections_that_make_no_sense_are_refused(connections):
    with pytest.raises(UsageError, match="must be at least 1 and at most 16"):
        connect("moqt://localhost/", PeerOptions(connections=connections))
