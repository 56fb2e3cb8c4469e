"""Origins of a relay that go away, take back what they had, or lie."""

import asyncio
import shutil

import pytest
import structlog
import structlog.testing

from kvabr.client.lookup import fetch_catalog, find_prefix
from kvabr.moqt.codes import RequestCode
from kvabr.server.grants import Grants
from kvabr.transfer.interface import read_all
from kvabr.transfer.peer import Peer
from kvabr.types.errors import Reason, RequestError, TransportError
from kvabr.types.naming import CATALOG_TRACK, LIVE_TRACK, TrackNamespace, chain, prefix_track
from tests.assets import make_asset
from tests.memory_transport import Dials, Fault
from tests.server.relays import (
    BIG,
    ELSEWHERE,
    LONG_S,
    REFUSED,
    chain_of,
    dialled,
    get,
    grant,
    in_memory,
    play,
    relaying,
    restartable,
    says_unauthorized,
    until,
)

pytestmark = pytest.mark.process


async def test_a_group_goes_on_when_the_origin_comes_back(asset, tls):
    first = in_memory(asset, faults=lambda ask: Fault(stall_after=100_000) if ask.track == "FP16" else None)
    later = []

    async def again():
        later.append(in_memory(asset))
        return later[-1]

    redialled = Peer(Dials(again, first=first))
    async with redialled as upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        download = connection.fetch(asset.catalog.namespace, "FP16", 1, limit=BIG)
        async with asyncio.timeout(LONG_S):
            while len(download.data) < 100_000:
                await download.read()
        first.lose("killed")
        async with asyncio.timeout(LONG_S):
            assert await read_all(download) == asset.frame(1, "FP16")
        assert len(later) == 1


async def test_a_lookup_is_made_again_if_its_connection_is_lost(asset, tls):
    """All players of a crowd wait for the one lookup of their relay."""
    asked = asyncio.Event()

    def silent(_ask):
        asked.set()
        return Fault(stall_after=0)

    first = in_memory(asset, faults=silent)

    async def again():
        return in_memory(asset)

    redialled = Peer(Dials(again, first=first))
    async with redialled as upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        waiting = asyncio.create_task(get(connection, asset.catalog.namespace, CATALOG_TRACK))
        await asyncio.wait_for(asked.wait(), LONG_S)
        first.lose("killed")
        assert await waiting == asset.catalog_bytes()


async def test_what_is_not_known_fails_soon_while_the_origin_is_away(asset, tls):
    """A player that does not have much time gets the reason, and what the relay has is there at once."""
    first = in_memory(asset)

    async def again():
        raise TransportError("nobody there")

    redialled = Peer(Dials(again, first=first), patience_s=LONG_S)
    async with redialled as upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        namespace = asset.catalog.namespace
        await play(connection, asset)
        first.lose("killed")
        for track in (CATALOG_TRACK, "FP16", LIVE_TRACK):
            with pytest.raises(RequestError) as away:
                await get(connection, ELSEWHERE, track)
            assert away.value.reason == Reason.AWAY
            assert "the relay cannot reach its origin" in str(away.value)
        found = await fetch_catalog(connection, namespace, live=True)
        assert found.catalog == asset.catalog
        tokens = list(range(asset.catalog.tokens))
        with pytest.raises(RequestError) as away:
            await find_prefix(connection, tokens[::-1], asset.catalog.spec, live=True)
        assert away.value.reason == Reason.AWAY


async def test_what_is_kept_is_served_while_the_origin_is_away(asset, tls, stale):
    """Also to players that come only then, by name and by prompt; and the log says so, once."""
    spec = asset.catalog.spec
    digests = chain(list(range(48)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    lookup = TrackNamespace(spec.model, digests[0]), prefix_track(digests)
    catalog = asset.catalog_bytes()
    with structlog.testing.capture_logs() as logs:
        async with chain_of(asset.store.folder, tls) as (server, relay):
            async with await dialled(relay) as connection:
                assert await get(connection, *lookup) == catalog
                await play(connection, asset)
            await server.close()
            async with await dialled(relay) as connection:
                await play(connection, asset)
                assert await get(connection, *lookup) == catalog
    away = [line for line in logs if line["event"] == "origin away"]
    assert len(away) == 1
    assert away[0]["log_level"] == "warning"


async def test_a_refusal_is_passed_on(asset, tls):
    fault = Fault(refuse=int(RequestCode.EXCESSIVE_LOAD))
    upstream = in_memory(asset, faults=lambda ask: fault if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        with pytest.raises(RequestError) as refused:
            await get(connection, asset.catalog.namespace, "FP16")
        assert refused.value.reason == Reason.BUSY
        assert refused.value.retry_after_s
        assert await get(connection, asset.catalog.namespace, "Int4") == asset.frame(0, "Int4")


async def test_a_replaced_asset_is_served_in_its_new_form(asset, tmp_path, tls, stale):
    namespace = asset.catalog.namespace
    async with chain_of(tmp_path, tls) as (_, relay), await dialled(relay) as connection:
        await play(connection, asset)
        shutil.rmtree(asset.store.folder)
        new = make_asset(tmp_path / "asset", list(range(32)), frame_bytes=200, seed=2)
        assert new.catalog.namespace == namespace
        await play(connection, new)


async def test_a_revoked_token_drops_everything_and_is_passed_on(asset, tls, stale):
    mine = "the relay's own token"
    starting = restartable(asset.store.folder, tls, grants=Grants([grant(mine)]), token=mine)
    async with starting as (server, relay, connection, again):
        await play(connection, asset)
        await server.close()
        await play(connection, asset)  # the origin is merely away
        await again(Grants([grant("another token")]))
        errors = []

        async def refused():
            # Until the relay has found out that the origin is back, it serves what it has.
            try:
                async with await dialled(relay) as connection:
                    await get(connection, asset.catalog.namespace, "FP16")
            except TransportError as error:
                errors.append(error)

        with structlog.testing.capture_logs() as said:
            async with asyncio.timeout(LONG_S):
                while len(errors) < 3:
                    await refused()
        assert all(map(says_unauthorized, errors)), errors
        await until(lambda: connection.closed)
        assert sum(REFUSED in one["event"] for one in said if one["log_level"] == "warning") == 1
        await until(lambda: len(relay.source.store) == 0)
        assert relay.source.catalogs._answers.currsize == 0
