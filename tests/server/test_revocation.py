"""Tokens that expire or are taken back, and assets that go: at the origin, at a relay, and at one behind it."""

import contextlib
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvabr.link.moqt.connect import connect
from kvabr.server import server as server_module
from kvabr.server.client_connection import ClientConnection
from kvabr.server.grants import Grants
from kvabr.server.relay_catalogs import Catalogs
from kvabr.transfer.interface import read_all
from kvabr.types.errors import (
    NotFoundError,
    Reason,
    RequestError,
    TransportError,
    UnauthorizedError,
)
from kvabr.types.naming import CATALOG_TRACK
from kvabr.types.peer import PeerOptions
from tests.assets import make_asset
from tests.memory_transport import Fault
from tests.server.relays import (
    BIG,
    LONG_S,
    chain_of,
    dialled,
    get,
    grant,
    in_memory,
    origin,
    play,
    relay_before,
    relaying,
    restartable,
    says_unauthorized,
    sent,
    until,
    url_of,
)

pytestmark = pytest.mark.process

FAR_S = time.time() + 1e6
MINE, OTHER = "the token of this test", "a token of somebody else"


@pytest.fixture
def stuck(monkeypatch):
    """Requests are accepted, and nothing is sent."""
    accept = ClientConnection._may_send
    monkeypatch.setattr(ClientConnection, "_may_send", lambda peer, job: accept(peer, job) and False)


def hold(peer):
    """Have a connection accept requests and send nothing."""
    peer._queue._may_send = lambda job: peer._may_send(job) and False


@contextlib.asynccontextmanager
async def two_relays(root, tls, *, quic="aioquic", token=None, grants=None):
    """An origin, a relay, and a relay behind it; both relays listen."""
    async with (
        chain_of(root, tls, quic=quic, token=token, grants=grants) as (first, one),
        contextlib.AsyncExitStack() as stack,
    ):
        two = await relay_before(stack, one, tls, quic=quic)
        yield first, one, two


async def gone(download):
    """The error with which a download ends."""
    with pytest.raises(TransportError) as error:
        await read_all(download)
    return error.value


async def test_an_expired_token_is_refused(asset, tls):
    grants = Grants([replace(grant(MINE), expires_s=time.time() - 1), replace(grant(OTHER), expires_s=FAR_S)])
    namespace = asset.catalog.namespace
    async with origin(asset.store.folder, tls, grants=grants) as server:
        with pytest.raises(UnauthorizedError, match=r"EXPIRED_AUTH_TOKEN.*the token has expired; .*--token-file"):
            async with await dialled(server, token=MINE) as connection:
                await get(connection, namespace, CATALOG_TRACK)
        assert server.metrics.value("kvabr_connections_total", result="expired") == 1
        async with await dialled(server, token=OTHER) as connection:
            assert await get(connection, namespace, CATALOG_TRACK)


async def test_a_token_that_expires_ends_what_is_open(asset, tls, stuck):
    grants = Grants([replace(grant(MINE), expires_s=FAR_S, token_id="mine.1"), grant(OTHER)])  # noqa: S106
    namespace = asset.catalog.namespace
    async with (
        origin(asset.store.folder, tls, grants=grants) as server,
        await dialled(server, token=MINE) as mine,
        await dialled(server, token=OTHER) as other,
    ):
        downloads = [one.fetch(namespace, "FP16", 0, limit=BIG) for one in (mine, other)]
        await until(lambda: server.requests == 2)
        server.reconsider(FAR_S - 1)
        assert not mine.closed
        server.reconsider(FAR_S)
        error = await gone(downloads[0])
        assert isinstance(error, UnauthorizedError)
        assert "expired" in str(error)
        with pytest.raises(UnauthorizedError):
            await get(mine, namespace, "FP16", 1)
        await until(lambda: server.requests == 1)
        assert not other.closed
        assert server.metrics.value("kvabr_token_requests_total", token="mine.1") == 1  # noqa: S106
        downloads[1].cancel()


@pytest.mark.parametrize("how", ["removed", "replaced", "not opened"])
async def test_what_is_being_sent_of_an_asset_that_goes_breaks_off(asset, tmp_path, tls, how, stuck):
    other = make_asset(tmp_path / "other", range(100, 116))
    async with (
        origin(tmp_path, tls, grants=Grants([grant(MINE)])) as server,
        await dialled(server, token=MINE) as connection,
    ):
        downloads = [connection.fetch(one.catalog.namespace, "FP16", 0, limit=BIG) for one in (asset, other)]
        await until(lambda: sum(job.stream is not None for peer in server.peers for job in peer._queue) == 2)
        if how == "not opened":
            server.source.regrant(Grants([replace(grant(MINE), assets=("other/*",))]))
        else:
            shutil.rmtree(asset.store.folder)
            if how == "replaced":
                make_asset(asset.store.folder, range(32), seed=2)
            server.source.refresh()
        error = await gone(downloads[0])
        assert isinstance(error, RequestError)
        assert error.reason == Reason.INTERNAL
        await until(lambda: server.requests == 1)
        assert not connection.closed
        downloads[1].cancel()


async def test_a_reset_is_not_taken_for_a_refused_token(asset, tls, fresh):
    """CANCELLED of streams and UNAUTHORIZED of requests are the same number."""
    async with (
        origin(asset.store.folder, tls) as server,
        connect(
            url_of(server), PeerOptions(fingerprint=server.fingerprint, quic="aioquic", timeout_s=LONG_S)
        ) as upstream,
        relaying(upstream, tls) as relay,
        await dialled(relay) as connection,
    ):
        await play(connection, asset)
        for peer in server.peers:
            hold(peer)
        download = connection.fetch(asset.catalog.namespace, "Int4", 0, limit=BIG)
        await until(lambda: server.requests == 1)
        for peer in server.peers:
            for job in peer._queue:
                await until(lambda: job.stream is not None)  # noqa: B023
                peer.session.responder.break_off(job.request.number, 1)
            peer.settle_and_send()
        assert (await gone(download)).reason == Reason.INTERNAL
        assert not relay.source.catalogs.revoked
        assert len(relay.source.store) == asset.catalog.groups


async def refused_soon(player, asset):
    """The error of a request for a group that the relay holds, once the relay has noticed."""
    while True:
        try:
            await get(player, asset.catalog.namespace, "FP16")
        except TransportError as error:
            return error


async def test_relays_notice_a_withdrawn_token_at_the_next_request(asset, tls, stale):
    async with two_relays(asset.store.folder, tls, token=MINE, grants=Grants([grant(MINE)])) as servers:
        server, one, two = servers
        async with await dialled(two) as player, await dialled(two) as idle:
            await play(player, asset)
            server.source.regrant(Grants([grant(OTHER)]))
            assert says_unauthorized(await refused_soon(player, asset))
            await until(lambda: len(one.source.store) == len(two.source.store) == 0)
            assert one.source.catalogs._answers.currsize == two.source.catalogs._answers.currsize == 0
            await until(lambda: player.closed and idle.closed)
        async with await dialled(two) as player:
            with pytest.raises(TransportError) as error:
                await get(player, asset.catalog.namespace, CATALOG_TRACK)
            assert "token" in str(error.value)


async def test_relays_recover_when_the_token_is_accepted_again(asset, tls, stale):
    async with two_relays(asset.store.folder, tls, token=MINE, grants=Grants([grant(MINE)])) as servers:
        server, one, two = servers
        async with await dialled(two) as player:
            await play(player, asset)
            server.source.regrant(Grants([grant(OTHER)]))
            await refused_soon(player, asset)
        await until(lambda: one.source.catalogs.revoked and two.source.catalogs.revoked)
        server.source.regrant(Grants([grant(MINE)]))

        async def plays():
            # Until both relays have connected again, they refuse.
            with contextlib.suppress(TransportError):
                async with await dialled(two) as player:
                    await play(player, asset)
                    return True
            return False

        while not await plays():
            pass
        assert not one.source.catalogs.revoked
        assert not two.source.catalogs.revoked


async def test_relays_notice_a_removed_asset_when_its_catalog_is_no_longer_fresh(
    asset, tmp_path, tls, fresh, monkeypatch
):
    """By a request for a group that they hold; another asset that shares it is served on."""
    other = make_asset(tmp_path / "other", range(16), levels=("FP16",), frame_bytes=300_000)
    assert other.catalog.track("FP16").digests == asset.catalog.track("FP16").digests[:4]
    async with two_relays(tmp_path, tls) as (server, one, two), await dialled(two) as player:
        await play(player, asset)
        await play(player, other)
        asked = sent(server)
        (peer,) = two.peers
        hold(peer)
        download = player.fetch(asset.catalog.namespace, "FP16", 0, limit=BIG)
        await until(lambda: [job.stream is not None for job in peer._queue] == [True])
        shutil.rmtree(asset.store.folder)
        server.source.refresh()
        async with await dialled(two) as another:
            assert await get(another, asset.catalog.namespace, "FP16") == other.frame(0, "FP16")
            assert sent(server) == asked
            monkeypatch.setattr(Catalogs, "FRESH_S", 0.0)
            monkeypatch.setattr("kvabr.server.relay_catalogs._FRESH_PER_FETCH", 0.0)
            assert isinstance(await refused_soon(another, asset), NotFoundError)
        assert isinstance(await gone(download), RequestError)
        assert {relay.source.catalogs.last(asset.catalog.namespace, CATALOG_TRACK) for relay in (one, two)} == {None}
        assert not player.closed
        peer._queue._may_send = peer._may_send
        assert await get(player, other.catalog.namespace, "FP16", 1) == other.frame(1, "FP16")


async def test_what_went_while_the_origin_was_away_is_noticed_when_it_is_back(asset, tmp_path, tls, stale):
    async with restartable(tmp_path, tls) as (server, relay, connection, again):
        await play(connection, asset)
        await server.close()
        await play(connection, asset)
        shutil.rmtree(asset.store.folder)
        await again()
        assert isinstance(await refused_soon(connection, asset), NotFoundError)
        assert relay.source.catalogs._answers.currsize == 0


async def test_a_relay_with_a_new_token_keeps_what_it_has(asset, tmp_path, tls, fresh):
    file = tmp_path / "token"
    file.write_text(f"{MINE}\n")
    async with origin(tmp_path, tls, grants=Grants([grant(MINE), grant(OTHER)])) as server:
        connecting = connect(
            url_of(server),
            PeerOptions(fingerprint=server.fingerprint, quic="aioquic", token_file=file, timeout_s=LONG_S),
        )
        async with connecting as upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
            await play(connection, asset)
            for refused in ("a token that nobody knows", ""):
                file.write_text(refused)
                with contextlib.suppress(UnauthorizedError):
                    await upstream.renew()  # without a token in the file, with the one before
                assert await get(connection, asset.catalog.namespace, "Int4", len(refused) % 2)
            file.write_text(OTHER)
            await upstream.renew()
            server.source.regrant(Grants([grant(OTHER)]))
            await until(lambda: len(server.peers) == 1)
            assert len(relay.source.store) >= asset.catalog.groups
            assert not relay.source.catalogs.revoked
            assert await get(connection, asset.catalog.namespace, "Int4", 3) == asset.frame(3, "Int4")


async def test_players_of_a_relay_lose_a_token_that_is_replaced(asset, tls):
    stall = Fault(stall_after=100_000)
    upstream = in_memory(asset, faults=lambda ask: stall if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls, token=MINE) as relay, await dialled(relay, token=MINE) as player:
        download = player.fetch(asset.catalog.namespace, "FP16", 0, limit=BIG)
        assert await download.read()
        relay.source.regrant(MINE)
        relay.source.regrant(OTHER)
        assert isinstance(await gone(download), UnauthorizedError)
        await until(lambda: not relay.source.groups)
        async with await dialled(relay, token=OTHER) as other:
            assert await get(other, asset.catalog.namespace, "Int4")


async def test_a_server_notices_by_itself_that_a_token_expires(asset, tls, monkeypatch):
    grants = Grants([replace(grant(MINE), expires_s=FAR_S)])
    root = asset.store.folder
    async with origin(root, tls, grants=grants) as server, await dialled(server, token=MINE) as connection:
        assert await get(connection, asset.catalog.namespace, CATALOG_TRACK)
        later = SimpleNamespace(time=lambda: FAR_S + 1, monotonic=time.monotonic, thread_time=time.thread_time)
        monkeypatch.setattr(server_module, "time", later)
        await until(lambda: connection.closed)
