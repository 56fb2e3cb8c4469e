"""The origin on moq-rs: real sockets; clients of kvabr's on moq-rs and on aioquic, and moq-rs's own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time

import pytest

from kvabr.moqt.codes import RequestCode
from kvabr.quic import dial as quic
from kvabr.quic import moq_lib as moqlib
from kvabr.quic.interface import read_all
from kvabr.replay.live.conditions import Conditions
from kvabr.replay.live.shaper import Shaper
from kvabr.replay.trace import BYTES_PER_MBIT, Trace
from kvabr.server import moq_peer as moqpeer
from kvabr.server.moq_listen import FRAME_BYTES
from kvabr.server.moq_server import MoqServer
from kvabr.server.server import ServerLimits
from kvabr.store.grants import Grant, Grants
from kvabr.types.errors import ConnectionLostError, NotFoundError, RequestError, TransportError
from kvabr.types.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace
from tests.assets import make_asset
from tests.moqbed import dialled, moq, options, origin

BIG = 1 << 24
SOON_S = 5.0


@pytest.fixture
def asset(tmp_path):
    return make_asset(tmp_path / "asset", list(range(40)), frame_bytes=200_000, profile=b"profile" * 1000)


def digest(token):
    """As a grant has it."""
    return hashlib.sha256(token.encode()).hexdigest()


async def until(condition):
    """Wait for something that is about to happen."""
    end_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def test_moq_rs_itself_gets_a_small_frame_and_then_larger_ones(asset):
    namespace = asset.catalog.namespace
    async with origin(asset.path) as server:
        url = f"moqt://localhost:{server.address[1]}/"
        async with moq.Client(url, tls_fingerprints=[server.fingerprint], reconnect=False) as client:
            broadcast = await client.announced_broadcast(moqlib.path_of(namespace, "split"))
            group = await broadcast.fetch_group("FP16", 4)
            frames = [frame.payload async for frame in group]
            assert b"".join(frames) == asset.frame(4, "FP16")
            sizes = [len(frame) for frame in frames]
            assert sizes[:3] == [1024, 4096, 20480]  # the first comes in one packet
            assert all(size >= 1 << 14 for size in sizes[2:-1])
            assert max(sizes) <= FRAME_BYTES


@pytest.mark.parametrize("draft", ["moqt-18", "moqt-16"])
@pytest.mark.parametrize("names", ["draft", "split"])
async def test_moqt_gets_the_same(asset, draft, names):
    namespace, catalog = asset.catalog.namespace, asset.catalog
    async with (
        origin(asset.path) as server,
        await quic.dial(options(server, drafts=(draft,), names=names), "aioquic") as connection,
    ):
        assert connection.protocol == draft
        assert await read_all(connection.fetch(namespace, "FP16", 2, limit=BIG)) == asset.frame(2, "FP16")
        profile = TrackNamespace(namespace.model, catalog.profile)
        assert await read_all(connection.fetch(profile, PROFILE_TRACK, limit=BIG)) == b"profile" * 1000
        for missing, track, group in ((namespace, "FP16", 10), (namespace, "AC-5x", 0), (profile, "FP16", 0)):
            with pytest.raises(NotFoundError):
                await asyncio.wait_for(read_all(connection.fetch(missing, track, group, limit=BIG)), SOON_S)


@pytest.mark.parametrize("library", ["aioquic", "qh3"])
async def test_who_asks_at_once_is_served(asset, library, monkeypatch):
    """A peer's first request may be here before we have got round to the peer."""
    attend = MoqServer.attend

    async def late(*arguments):
        await asyncio.sleep(0.2)
        await attend(*arguments)

    monkeypatch.setattr(MoqServer, "attend", late)
    async with origin(asset.path) as server, await quic.dial(options(server), library) as connection:
        download = connection.fetch(asset.catalog.namespace, "FP16", 2, limit=BIG)
        assert await asyncio.wait_for(read_all(download), SOON_S) == asset.frame(2, "FP16")


async def test_a_token_opens_its_own_assets_and_nothing_else(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    mine = make_asset(root / "mine", list(range(8)))
    theirs = make_asset(root / "theirs", list(range(100, 108)))
    grants = [Grant(name, assets=(name,), token_sha256=digest(name)) for name in ("mine", "theirs")]
    nowhere = TrackNamespace("test/model", "0" * 64)
    async with origin(root, grants=Grants(grants)) as server:
        ours, others = (dialled(server, token=grant.name) for grant in grants)
        async with await ours as us, await others as them:
            assert await read_all(us.fetch(mine.catalog.namespace, "FP16", limit=BIG)) == mine.frame(0, "FP16")
            assert await read_all(them.fetch(theirs.catalog.namespace, "FP16", limit=BIG)) == theirs.frame(0, "FP16")
            said = set()
            for namespace in (theirs.catalog.namespace, nowhere):
                for track in ("FP16", CATALOG_TRACK):
                    with pytest.raises(NotFoundError) as missing:
                        await read_all(us.fetch(namespace, track, limit=BIG))
                    said.add((type(missing.value), missing.value.code, str(missing.value).partition(":")[2]))
            assert len(said) == 1
        assert server.metrics.value("kvabr_connections_total", result="unauthorized") == 0
        with pytest.raises(TransportError, match="token"):
            await dialled(server, token=grants[0].name * 2)
        assert server.metrics.value("kvabr_connections_total", result="unauthorized") == 1


async def test_a_grant_that_is_taken_back_counts_at_once(asset, tmp_path):
    grant = Grant("all", token_sha256=digest("t"))
    async with origin(tmp_path, grants=Grants([grant])) as server, await dialled(server, token="t") as connection:  # noqa: S106
        namespace = asset.catalog.namespace
        assert await read_all(connection.fetch(namespace, "FP16", 0, limit=BIG))
        server.holdings.regrant(Grants([]))
        with pytest.raises(NotFoundError):
            await read_all(connection.fetch(namespace, "FP16", 1, limit=BIG))


async def test_a_flood_is_turned_away_and_the_rest_served(asset):
    limits = ServerLimits(requests_per_s=8)
    async with origin(asset.path, limits=limits) as server, await dialled(server) as connection:
        namespace = asset.catalog.namespace
        wanted = [(track, group) for track in ("FP16", "Int4") for group in range(10)]
        downloads = [connection.fetch(namespace, track, group, limit=BIG) for track, group in wanted]
        got = await asyncio.gather(*(read_all(each) for each in downloads), return_exceptions=True)
        refused = [each for each in got if isinstance(each, RequestError)]
        served = [each for each in got if isinstance(each, bytes)]
        assert refused
        assert served
        assert len(refused) + len(served) == 20
        assert {each.code for each in refused} == {RequestCode.EXCESSIVE_LOAD}
        assert all(each.retry_after_s for each in refused)
        # A refused track is one refusal, however many of its groups were asked for.
        assert 1 <= server.metrics.value("kvabr_refusals_total", code="EXCESSIVE_LOAD") <= len(refused)
        await until(lambda: server.requests == 0)
        assert server.metrics.value("kvabr_requests_in_flight") == 0


async def test_only_so_many_may_come_in(asset):
    async with origin(asset.path, limits=ServerLimits(connections=1)) as server, await dialled(server) as first:
        with pytest.raises(TransportError):
            await dialled(server)
        assert await read_all(first.fetch(asset.catalog.namespace, "FP16", limit=BIG))
        assert server.metrics.value("kvabr_connections_total", result="too many") == 1
        await first.close()
        await until(lambda: not server.peers)
        assert server.metrics.value("kvabr_connections") == 0
        async with await dialled(server):
            assert len(server.peers) == 1


async def test_memory_has_a_bound_and_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(moqpeer, "_QUIET_S", 0.05)
    asset = make_asset(tmp_path / "asset", list(range(160)), frame_bytes=300_000, levels=("FP16",))
    limits = ServerLimits(buffered_bytes_per_connection=1 << 20)
    seen = []
    room = moqpeer.MoqPeer._room

    def watched(peer, size):
        seen.append((peer._kept_bytes, peer._server.buffered()))
        return room(peer, size)

    monkeypatch.setattr(moqpeer.MoqPeer, "_room", watched)
    async with origin(asset.path, limits=limits) as server, await dialled(server) as connection:
        namespace = asset.catalog.namespace
        downloads = [connection.fetch(namespace, "FP16", group, limit=400_000) for group in range(40)]
        got = await asyncio.gather(*(read_all(each) for each in downloads))
        assert got == [asset.frame(group, "FP16") for group in range(40)]
        assert 300_000 < max(kept for kept, _ in seen) <= 4 << 20
        assert max(unsent for _, unsent in seen) <= 1 << 20
        (peer,) = server.peers
        await until(lambda: peer._kept_bytes == 0 and not peer._kept)
        assert server.buffered() == 0


async def test_a_group_too_large_for_moq_rs_is_refused(asset, monkeypatch):
    monkeypatch.setattr(moqlib, "MAX_GROUP_BYTES", 100_000)
    async with origin(asset.path) as server, await dialled(server) as connection:
        with pytest.raises(RequestError) as refused:
            await read_all(connection.fetch(asset.catalog.namespace, "FP16", limit=BIG))
        assert refused.value.code == RequestCode.NOT_SUPPORTED
        assert await read_all(connection.fetch(asset.catalog.namespace, CATALOG_TRACK, limit=BIG))


async def test_a_damaged_group_takes_nothing_else_with_it(asset):
    async with origin(asset.path) as server, await dialled(server) as connection:
        (asset.path / "groups" / "FP16" / "00003.kvg").write_bytes(b"short")
        namespace = asset.catalog.namespace
        with pytest.raises(RequestError) as refused:
            await read_all(connection.fetch(namespace, "FP16", 3, limit=BIG))
        assert refused.value.code == RequestCode.INTERNAL_ERROR
        assert await read_all(connection.fetch(namespace, "FP16", 4, limit=BIG)) == asset.frame(4, "FP16")
        await until(lambda: server.requests == 0)


async def test_draining_finishes_what_is_under_way_and_takes_no_more(asset):
    async with origin(asset.path) as server:
        connection = await dialled(server)
        namespace = asset.catalog.namespace
        assert await read_all(connection.fetch(namespace, "FP16", 9, limit=BIG))
        running = [connection.fetch(namespace, "FP16", group, limit=BIG) for group in range(8)]
        await until(lambda: server.metrics.value("kvabr_requests_total", kind="Fetch") > 1)
        draining = asyncio.create_task(server.drain(SOON_S))
        await until(lambda: server.draining)
        late = connection.fetch(namespace, "Int4", 0, limit=BIG)
        got = await asyncio.gather(*(read_all(each) for each in running), return_exceptions=True)
        served = [data for data in got if isinstance(data, bytes)]
        assert served  # those that had not reached the server yet are refused like the late one
        assert all(data == asset.frame(group, "FP16") for group, data in enumerate(got) if isinstance(data, bytes))
        with pytest.raises(ConnectionLostError):
            await read_all(late)
        assert connection.going_away
        with contextlib.suppress(TransportError):
            await dialled(server, timeout_s=0.2)
            pytest.fail("a server that drains lets someone in")
        await asyncio.wait_for(draining, SOON_S)
        await until(lambda: connection.closed)
        await connection.close()


async def test_a_port_that_is_taken(asset):
    async with origin(asset.path) as server:
        with pytest.raises(TransportError, match="cannot be bound"):
            async with origin(asset.path, port=server.address[1]):
                pass


async def fetch(client, path):
    broadcast = await client.request_broadcast(path)
    return await broadcast.fetch_group("FP16", 0)


async def test_namespaces_that_are_none_of_ours_do_not_exist(asset):
    async with origin(asset.path) as server:
        url = f"moqt://localhost:{server.address[1]}/"
        async with moq.Client(url, tls_fingerprints=[server.fingerprint], reconnect=False) as client:
            root = moqlib.ROUTES[0]
            announced = client.announced(hidden=True)
            routes = {(await anext(announced)).prefix for _ in moqlib.ROUTES}
            assert routes == {route.rstrip("/") for route in moqlib.ROUTES}
            for path in ("something/else", f"{root}/model/nohex", f"{root}/{'x' * 9000}", root):
                with pytest.raises(moq.Error):
                    await asyncio.wait_for(fetch(client, path), SOON_S)


async def test_many_tracks_do_not_pile_up(asset, monkeypatch):
    monkeypatch.setattr(moqpeer, "MAX_TRACKS", 3)
    monkeypatch.setattr(moqpeer, "MISSING_S", 0.01)
    async with origin(asset.path) as server, await dialled(server) as connection:
        for number in range(8):
            other = TrackNamespace("test/model", f"{number:064x}")
            with pytest.raises(NotFoundError):
                await read_all(connection.fetch(other, "FP16", limit=BIG))
        assert await read_all(connection.fetch(asset.catalog.namespace, "FP16", limit=BIG))
        (peer,) = server.peers
        assert len(peer._broadcasts) <= 3
        assert len(peer._tracks) <= 3


@contextlib.asynccontextmanager
async def far_away(root, mbit):
    """An origin, and a connection to it over a link of so many Mbit/s."""
    async with origin(root) as server:
        with Shaper(server.address) as link:
            link.begin(Trace("flat", "flat", (0.0,), (mbit * BYTES_PER_MBIT,), 1000.0), 0.0, Conditions(rtt_s=0.02))
            async with await dialled(server, port=link.address[1]) as connection:
                yield server, connection


async def test_a_slow_path_does_not_wait_between_large_groups(tmp_path):
    asset = make_asset(tmp_path / "asset", list(range(16)), frame_bytes=5_000_000, levels=("FP16",))
    async with far_away(asset.path, 80) as (server, connection):
        namespace, ready = asset.catalog.namespace, 0
        downloads = [connection.fetch(namespace, "FP16", group, priority=group, limit=BIG) for group in range(4)]
        for group, download in enumerate(downloads):
            assert await read_all(download) == asset.frame(group, "FP16")
            ready += group < 3 and server.metrics.value("kvabr_groups_sent_total", track="FP16") > group + 1
        assert ready >= 2  # the next was there when one had ended


async def test_what_is_asked_for_after_a_cancel_does_not_wait_for_what_was_cancelled(tmp_path):
    asset = make_asset(tmp_path / "asset", list(range(12)), frame_bytes=8_000_000, levels=("FP16",))
    async with far_away(asset.path, 50) as (_, connection):
        namespace = asset.catalog.namespace
        first, second = (connection.fetch(namespace, "FP16", group, limit=BIG) for group in range(2))
        received = 0
        while received < 2_000_000:
            received += len(await first.read())
        first.cancel()
        second.cancel()
        later = connection.fetch(namespace, "FP16", 2, priority=200, limit=BIG)
        assert await asyncio.wait_for(later.read(), 3.0)
