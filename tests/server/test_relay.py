"""The relay: real sockets towards players; origins on QUIC, and in memory where they must misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import shlex
import socket
import sys
from asyncio.subprocess import PIPE

import pytest
import structlog
import structlog.testing

from kvabr.cli.relay import parse_size
from kvabr.moqt.codes import RequestCode
from kvabr.quic.connect import asset_of, connect, dial
from kvabr.quic.interface import read_all
from kvabr.quic.options import DialOptions
from kvabr.quic.reconnect import RedialledConnection, UnreachedConnection
from kvabr.server import relay_groups
from kvabr.server.certificates import check, development
from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.relay import Relay
from kvabr.server.relay_catalogs import Catalogs, check_small
from kvabr.server.server import Server
from kvabr.types.errors import (
    ConnectionLostError,
    FormatError,
    NotFoundError,
    RequestError,
    TransportError,
    UnauthorizedError,
    UsageError,
)
from kvabr.types.naming import (
    CATALOG_TRACK,
    MODELS_NAMESPACE,
    MODELS_TRACK,
    PROFILE_TRACK,
    TrackNamespace,
    chain,
    prefix_track,
)
from tests.assets import make_asset
from tests.memory_transport import Fault, MemoryConnection, MemoryLink

LOG = structlog.get_logger()
BIG = 1 << 24
LONG_S = 120.0
"""Where a test waits for what must happen, on any machine."""
ELSEWHERE = TrackNamespace("other/model", "0" * 64)
LIBRARIES = ("aioquic", "qh3")
REFUSED = "the origin refuses the relay's token"


@pytest.fixture
def asset(tmp_path):
    return make_asset(tmp_path / "asset", list(range(32)), frame_bytes=300_000)


@pytest.fixture
def small(tmp_path):
    return make_asset(tmp_path / "small", list(range(32)), frame_bytes=20_000)


@pytest.fixture(scope="module")
def tls():
    with development() as made:
        yield made


@pytest.fixture
def stale(monkeypatch):
    """Nothing is fresh: the origin is asked every time."""
    monkeypatch.setattr(Catalogs, "FRESH_S", 0.0)
    monkeypatch.setattr("kvabr.server.relay_catalogs._FRESH_PER_FETCH", 0.0)


@pytest.fixture
def fresh(monkeypatch):
    """What was told stays fresh, however slow the machine."""
    monkeypatch.setattr(Catalogs, "FRESH_S", 1e9)


@contextlib.asynccontextmanager
async def relaying(upstream, tls, *, quic="aioquic", limits=None, **more):
    """A relay in front of a connection, and its server."""
    metrics = Metrics()
    async with Relay(upstream, LOG, metrics, **more) as relay:
        server = Server(relay, "127.0.0.1", 0, tls, limits or ServerLimits(), LOG, metrics, quic=quic)
        async with server:
            server.fingerprint = check(tls).fingerprint
            yield server


@contextlib.asynccontextmanager
async def origin(root, tls, *, quic="aioquic", grants=None, port=0):
    """An origin on QUIC."""
    published = PublishedAssets(root, grants)
    async with Server(published, "127.0.0.1", port, tls, ServerLimits(), LOG, Metrics(), quic=quic) as server:
        server.fingerprint = check(tls).fingerprint
        yield server


@contextlib.asynccontextmanager
async def chain_of(root, tls, *, quic="aioquic", token=None, grants=None, **more):
    """An origin, and a relay in front of it."""
    async with origin(root, tls, quic=quic, grants=grants) as server:
        url = f"moqt://localhost:{server.address[1]}/"
        async with (
            connect(url, fingerprint=server.fingerprint, quic=quic, token=token) as upstream,
            relaying(upstream, tls, quic=quic, **more) as relay,
        ):
            yield server, relay


def options(server, **more):
    return DialOptions("localhost", **{"port": server.address[1], "fingerprint": server.fingerprint} | more)


async def dialled(server, library="aioquic", **more):
    return await dial(options(server, **more), library)


def in_memory(asset, **more):
    """A connection to an asset in this process."""
    return MemoryConnection(functools.partial(PublishedAssets(asset.path).find, EVERYTHING), **more)


def sent(server):
    """How many groups of each track the origin has sent."""
    samples = [sample for metric in server.metrics.registry.collect() for sample in metric.samples]
    return {one.labels["track"]: one.value for one in samples if one.name == "kvabr_groups_sent_total"}


async def get(connection, namespace, track, group=0):
    async with asyncio.timeout(LONG_S):
        return await read_all(connection.fetch(namespace, track, group, limit=BIG))


async def play(connection, asset, track="FP16"):
    """Fetch a catalog and all groups of a track, and check them."""
    namespace = asset.catalog.namespace
    assert await get(connection, namespace, CATALOG_TRACK) == (asset.path / "catalog.json").read_bytes()
    groups = range(asset.catalog.groups)
    got = await asyncio.gather(*(get(connection, namespace, track, group) for group in groups))
    assert got == [asset.frame(group, track) for group in groups]


async def until(condition):
    """Wait for something that must happen."""
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- what passes through


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_group_is_fetched_once_for_two_hundred_players(library, small, tls, fresh):
    async with chain_of(small.path, tls, quic=library) as (server, relay), contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(await dialled(relay, library)) for _ in range(20)]
        namespace = small.catalog.namespace
        fetches = [get(connection, namespace, "FP16", 3) for connection in connections for _ in range(10)]
        got = await asyncio.gather(*fetches)
        assert len(got) == 200
        assert set(got) == {small.frame(3, "FP16")}
        assert sent(server) == {CATALOG_TRACK: 1, "FP16": 1}
        await until(lambda: not relay.source.groups)
        assert relay.source.groups.bytes == 0


async def test_many_players_one_fetch_of_each_group(small, tls, fresh):
    async with chain_of(small.path, tls) as (server, relay):

        async def one(library):
            async with await dialled(relay, library) as connection:
                await play(connection, small)

        await asyncio.gather(*(one(LIBRARIES[number % 2]) for number in range(12)))
        assert sent(server) == {CATALOG_TRACK: 1, "FP16": small.catalog.groups}
        assert relay.source.store.memory.total_bytes == sum(
            len(small.frame(group, "FP16")) for group in range(small.catalog.groups)
        )


@pytest.mark.parametrize("draft", ["moqt-18", "moqt-16"])
@pytest.mark.parametrize("names", ["draft", "split"])
async def test_drafts_and_spellings_of_names(draft, names, asset, tls):
    async with chain_of(asset.path, tls) as (server, relay):
        async with await dialled(relay, drafts=(draft,), names=names) as connection:
            await play(connection, asset)
        async with await dialled(relay) as connection:
            await play(connection, asset)
        assert sent(server)["FP16"] == asset.catalog.groups


async def test_lookups_pass_through(asset, tls, fresh):
    spec = asset.catalog.spec
    digests = chain(list(range(48)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    async with chain_of(asset.path, tls) as (server, relay), await dialled(relay) as connection:
        for _ in range(2):
            found = await get(connection, TrackNamespace(spec.model, digests[0]), prefix_track(digests))
            assert found == (asset.path / "catalog.json").read_bytes()
        assert sent(server) == {"lookup": 1}
        assert await get(connection, asset.catalog.namespace, "Int4") == asset.frame(0, "Int4")
        assert sent(server) == {"lookup": 1, "Int4": 1}  # the lookup's answer was the catalog


async def test_the_list_of_models_passes_through(asset, tls, fresh):
    async with chain_of(asset.path, tls) as (server, relay), await dialled(relay) as connection:
        for _ in range(2):
            (model,) = json.loads(await get(connection, MODELS_NAMESPACE, MODELS_TRACK))["models"]
            assert model["model"] == asset.catalog.spec.model
        assert sent(server) == {MODELS_TRACK: 1}


async def test_what_does_not_exist_is_not_found_and_leaves_nothing(asset, tls):
    async with chain_of(asset.path, tls) as (server, relay), await dialled(relay) as connection:
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


async def test_names_that_do_not_exist_leave_no_state(asset, tls):
    """Thousands of them: nothing in the relay, its upstream connection or its server grows."""
    async with in_memory(asset) as upstream, relaying(upstream, tls) as server:
        relay, spec = server.source, asset.catalog.spec
        for number in range(3000):
            digest = hashlib.sha256(b"%d" % number).hexdigest()
            namespace = TrackNamespace(spec.model, digest)
            for track in (CATALOG_TRACK, prefix_track([digest, digest]), "FP16", PROFILE_TRACK):
                assert await relay.find_soon(EVERYTHING, namespace, track) is None
        assert len(relay.catalogs) == relay.catalogs.bytes == 0
        assert not relay.groups
        assert len(relay.store) == 0
        assert upstream.downloads == 0


async def test_names_that_exist_stay_within_the_bound(tmp_path):
    """As many lookups as one likes: what is kept of them has a bound."""
    made = make_asset(tmp_path / "asset", list(range(64)))
    spec = made.catalog.spec
    catalog = (made.path / "catalog.json").read_bytes()
    limit = 200 * (len(catalog) + 8192)
    async with in_memory(made) as upstream:
        catalogs = Catalogs(upstream, LOG, limit=limit)
        first = made.catalog.chunks[0]
        for number in range(1500):
            other = hashlib.sha256(b"%d" % number).hexdigest()
            lookup = TrackNamespace(spec.model, first), prefix_track([first, other])
            assert (await catalogs.get(*lookup)).publication.open(0).data == catalog
            assert 0 < catalogs.bytes <= limit
        assert 20 < len(catalogs) < 400
        catalogs.close()
        assert catalogs.bytes == 0


async def test_bytes_are_passed_on_as_they_come(asset, tls):
    stall = Fault(stall_after=100_000)
    upstream = in_memory(asset, faults=lambda ask: stall if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        download = connection.fetch(asset.catalog.namespace, "FP16", 2, limit=BIG)
        async with asyncio.timeout(LONG_S):
            while len(download.data) < 100_000:
                await download.read()
        assert bytes(download.data) == asset.frame(2, "FP16")[:100_000]
        assert len(relay.source.groups) == 1
        download.cancel()
        await until(lambda: not relay.source.groups)


async def test_a_player_that_comes_later_gets_what_has_come_and_what_comes(asset, tls):
    link = MemoryLink()
    stall = Fault(stall_after=100_000)
    upstream = in_memory(asset, path=link, faults=lambda ask: stall if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as one, await dialled(relay) as other:
        namespace = asset.catalog.namespace
        for connection in (one, other):
            download = connection.fetch(namespace, "FP16", 2, limit=BIG)
            async with asyncio.timeout(LONG_S):
                while len(download.data) < 100_000:
                    await download.read()
        assert upstream.downloads == 1


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
        (flight,) = upstream._downloads
        assert flight.priority == 200
        second = other.fetch(namespace, "FP16", 2, limit=BIG, priority=90)
        await until(lambda: flight.priority == 90)
        first.prioritise(10)
        await until(lambda: flight.priority == 10)
        first.cancel()
        await until(lambda: flight.priority == 90)
        second.cancel()


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


# ---------------------------------------------------------------- origins that come and go


async def test_a_group_goes_on_when_the_origin_comes_back(asset, tls):
    first = in_memory(asset, faults=lambda ask: Fault(stall_after=100_000) if ask.track == "FP16" else None)
    later = []

    async def again():
        later.append(in_memory(asset))
        return later[-1]

    redialled = RedialledConnection(first, again)
    async with redialled as upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        download = connection.fetch(asset.catalog.namespace, "FP16", 1, limit=BIG)
        async with asyncio.timeout(LONG_S):
            while len(download.data) < 100_000:
                await download.read()
        first.lose("killed")
        async with asyncio.timeout(LONG_S):
            assert await read_all(download) == asset.frame(1, "FP16")
        assert len(later) == 1


async def test_an_origin_that_stays_away_is_told(asset, tls, monkeypatch):
    monkeypatch.setattr(relay_groups, "PATIENCE_S", 0.1)
    first = in_memory(asset)

    async def again():
        raise TransportError("nobody there")

    redialled = RedialledConnection(first, again, patience_s=0.1)
    async with redialled as upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        namespace = asset.catalog.namespace
        assert await get(connection, namespace, "FP16", 0)
        first.lose("killed")
        with pytest.raises(RequestError) as away:
            await get(connection, namespace, "FP16", 1)
        assert away.value.code == RequestCode.TIMEOUT
        assert away.value.retry_after_s
        assert await get(connection, namespace, "FP16", 0) == asset.frame(0, "FP16")


async def test_it_survives_the_origin(asset, tls):
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(origin(asset.path, tls))
        port = server.address[1]
        connecting = connect(f"moqt://localhost:{port}/", fingerprint=server.fingerprint, quic="aioquic")
        upstream = await stack.enter_async_context(connecting)
        relay = await stack.enter_async_context(relaying(upstream, tls))
        connection = await stack.enter_async_context(await dialled(relay))
        namespace = asset.catalog.namespace
        assert await get(connection, namespace, "FP16", 0) == asset.frame(0, "FP16")
        await server.close()
        assert await get(connection, namespace, "FP16", 0) == asset.frame(0, "FP16")
        waiting = asyncio.create_task(get(connection, namespace, "FP16", 1))
        await until(lambda: len(relay.source.groups) == 1)
        second = await stack.enter_async_context(origin(asset.path, tls, port=port))
        assert await waiting == asset.frame(1, "FP16")
        assert sent(second)["FP16"] == 1


async def test_what_is_kept_is_served_while_the_origin_is_away(asset, tls, stale):
    """Also to players that come only then, by name and by prompt; and the log says so, once."""
    spec = asset.catalog.spec
    digests = chain(list(range(48)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    lookup = TrackNamespace(spec.model, digests[0]), prefix_track(digests)
    catalog = (asset.path / "catalog.json").read_bytes()
    with structlog.testing.capture_logs() as logs:
        async with chain_of(asset.path, tls) as (server, relay):
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
        assert refused.value.code == RequestCode.EXCESSIVE_LOAD
        assert refused.value.retry_after_s
        assert await get(connection, asset.catalog.namespace, "Int4") == asset.frame(0, "Int4")


async def test_a_transfer_that_breaks_off_breaks_off_here(asset, tls):
    upstream = in_memory(asset, faults=lambda ask: Fault(reset_after=150_000) if ask.track == "FP16" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        with pytest.raises(RequestError):
            await get(connection, asset.catalog.namespace, "FP16")
        assert relay.source.store.total_bytes == 0


# ---------------------------------------------------------------- what the origin takes back


async def test_a_removed_asset_is_gone_here_too(asset, tls, stale):
    gone = Fault(refuse=int(RequestCode.DOES_NOT_EXIST))
    removed = []
    upstream = in_memory(asset, faults=lambda _: gone if removed else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        await play(connection, asset)
        assert len(relay.source.store) == asset.catalog.groups
        removed.append(True)
        for track in ("FP16", CATALOG_TRACK):
            with pytest.raises(NotFoundError):
                await get(connection, asset.catalog.namespace, track)
        await until(lambda: len(relay.source.store) == 0)
        assert relay.source.catalogs.bytes == 0


async def test_a_replaced_asset_drops_the_old_groups(asset, tmp_path, tls, stale):
    namespace = asset.catalog.namespace
    async with chain_of(tmp_path, tls) as (_, relay), await dialled(relay) as connection:
        await play(connection, asset)
        old = set(asset.catalog.track("FP16").digests)
        assert all(digest in relay.source.store for digest in old)
        asset.path.rename(tmp_path / ".old")
        new = make_asset(tmp_path / "asset", list(range(32)), frame_bytes=200, seed=2)
        assert new.catalog.namespace == namespace
        await play(connection, new)
        await until(lambda: not any(digest in relay.source.store for digest in old))


def grant(token):
    return Grant(token, token_sha256=hashlib.sha256(token.encode()).hexdigest())


async def test_a_revoked_token_drops_everything_and_is_passed_on(asset, tls, stale):
    async with contextlib.AsyncExitStack() as stack:
        grants = Grants([grant("the relay's own token")])
        server = await stack.enter_async_context(origin(asset.path, tls, grants=grants))
        port = server.address[1]
        url = f"moqt://localhost:{port}/"
        connecting = connect(url, fingerprint=server.fingerprint, quic="aioquic", token="the relay's own token")  # noqa: S106
        upstream = await stack.enter_async_context(connecting)
        relay = await stack.enter_async_context(relaying(upstream, tls))
        connection = await stack.enter_async_context(await dialled(relay))
        await play(connection, asset)
        await server.close()
        await play(connection, asset)  # the origin is merely away
        await stack.enter_async_context(origin(asset.path, tls, grants=Grants([grant("another token")]), port=port))
        errors = []

        async def refused():
            # Until the relay has found out that the origin is back, it serves what it has.
            try:
                await get(connection, asset.catalog.namespace, "FP16")
            except RequestError as error:
                errors.append(error)

        with structlog.testing.capture_logs() as said:
            async with asyncio.timeout(LONG_S):
                while len(errors) < 3:
                    await refused()
        assert {error.code for error in errors} == {RequestCode.UNAUTHORIZED}
        assert sum(REFUSED in one["event"] for one in said if one["log_level"] == "warning") == 1
        await until(lambda: len(relay.source.store) == 0)
        assert relay.source.catalogs.bytes == 0


async def test_a_relay_that_has_nothing_yet_says_that_its_token_is_refused(asset, tls):
    refuse = Fault(refuse=int(RequestCode.UNAUTHORIZED))
    with structlog.testing.capture_logs() as said:
        upstream = in_memory(asset, faults=lambda _: refuse)
        async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
            for _ in range(3):
                with pytest.raises(RequestError):
                    await get(connection, asset.catalog.namespace, CATALOG_TRACK)
    assert sum(REFUSED in one["event"] for one in said if one["log_level"] == "warning") == 1


async def test_a_token_that_is_withdrawn_while_the_relay_is_connected(asset, tls, stale):
    grants = Grants([grant("the relay's own token")])
    with structlog.testing.capture_logs() as said:
        async with (
            chain_of(asset.path, tls, grants=grants, token="the relay's own token") as (server, relay),  # noqa: S106
            await dialled(relay) as connection,
        ):
            await play(connection, asset)
            server.source.regrant(Grants([grant("another token")]))
            for _ in range(2):
                with pytest.raises(RequestError) as error:
                    await get(connection, asset.catalog.namespace, CATALOG_TRACK)
                assert error.value.code == RequestCode.UNAUTHORIZED
            await until(lambda: len(relay.source.store) == 0)
    assert sum(REFUSED in one["event"] for one in said if one["log_level"] == "warning") == 1


async def test_a_request_refused_for_its_token_drops_everything(asset, tls):
    refused = Fault(refuse=int(RequestCode.UNAUTHORIZED))
    upstream = in_memory(asset, faults=lambda ask: refused if ask.track == "Int4" else None)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        await play(connection, asset)
        with pytest.raises(RequestError) as error:
            await get(connection, asset.catalog.namespace, "Int4")
        assert error.value.code == RequestCode.UNAUTHORIZED
        await until(lambda: len(relay.source.store) == 0)
        assert relay.source.catalogs.bytes == 0


# ---------------------------------------------------------------- origins that lie


WRONG = {
    "one bit": Fault(corrupt_at=1000),
    "short": Fault(truncate_to=299_000),
    "another group": Fault(replace=b"x" * 300_001),
    "more": Fault(endless=True),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_group_is_broken_off_and_not_kept(wrong, asset, tls, fresh):
    upstream = in_memory(asset, faults=lambda ask: WRONG[wrong] if ask.track == "FP16" and ask.attempt == 0 else None)
    async with upstream, relaying(upstream, tls) as relay:
        namespace = asset.catalog.namespace
        async with await dialled(relay) as connection:
            with pytest.raises(RequestError):
                await get(connection, namespace, "FP16", 3)
            assert relay.source.store.total_bytes == 0
            assert await get(connection, namespace, "FP16", 3) == asset.frame(3, "FP16")
        before = upstream.requests
        async with await dialled(relay) as other:
            assert await get(other, namespace, "FP16", 3) == asset.frame(3, "FP16")
        assert upstream.requests == before


async def test_a_wrong_catalog_is_refused_and_not_kept(asset, tmp_path, tls, stale):
    elsewhere = make_asset(tmp_path / "elsewhere", list(range(100, 132)))
    lies = [b"{}", b"no JSON", (elsewhere.path / "catalog.json").read_bytes(), b""]

    def fault(ask):
        return Fault(replace=lies[ask.attempt]) if ask.track == CATALOG_TRACK and ask.attempt < len(lies) else None

    upstream = in_memory(asset, faults=fault)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        namespace = asset.catalog.namespace
        for _ in lies:
            with pytest.raises(RequestError):
                await get(connection, namespace, CATALOG_TRACK)
            assert relay.source.catalogs.bytes == 0
        assert await get(connection, namespace, CATALOG_TRACK) == (asset.path / "catalog.json").read_bytes()


async def test_a_wrong_profile_is_refused(tmp_path, tls):
    asset = make_asset(tmp_path / "asset", list(range(32)), profile=b"a profile")
    fault = Fault(replace=b"another one")
    upstream = in_memory(asset, faults=lambda ask: fault if ask.track == PROFILE_TRACK and not ask.attempt else None)
    name = TrackNamespace(asset.catalog.spec.model, asset.catalog.profile)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        with pytest.raises(RequestError):
            await get(connection, name, PROFILE_TRACK)
        assert await get(connection, name, PROFILE_TRACK) == b"a profile"


@pytest.mark.parametrize(
    ("track", "change", "words"),
    [
        (CATALOG_TRACK, lambda value: value["chunks"].reverse(), "another prompt"),
        (CATALOG_TRACK, lambda value: value["tracks"][0]["digests"].__setitem__(0, "z" * 64), "not hex"),
        (CATALOG_TRACK, lambda value: value["tracks"][0]["digests"].__setitem__(0, "00"), "not a SHA-256"),
        ("prefix.", lambda value: value["chunks"].__setitem__(0, "00" * 32), "another prompt"),
    ],
)
def test_what_a_catalog_must_say(asset, track, change, words):
    data = (asset.path / "catalog.json").read_bytes()
    namespace = asset.catalog.namespace
    if track != CATALOG_TRACK:
        namespace = TrackNamespace(namespace.model, asset.catalog.chunks[0])
    facts = check_small(namespace, track, data)
    assert facts.sizes["Int4"][2] == len(asset.frame(2, "Int4"))
    assert facts.digest("Int4", 2) == hashlib.sha256(asset.frame(2, "Int4")).digest()
    value = json.loads(data)
    change(value)
    with pytest.raises(FormatError, match=words):
        check_small(namespace, track, json.dumps(value).encode())


# ---------------------------------------------------------------- small tracks


async def test_an_origin_that_says_nothing_is_waited_for_a_moment(asset, stale, monkeypatch):
    monkeypatch.setattr(Catalogs, "PATIENCE_S", 0.01)
    upstream = in_memory(asset, faults=lambda ask: Fault(stall_after=0) if ask.attempt else None)
    async with upstream:
        catalogs = Catalogs(upstream, LOG)
        first = await catalogs.get(asset.catalog.namespace, CATALOG_TRACK)
        for _ in range(3):
            assert await catalogs.get(asset.catalog.namespace, CATALOG_TRACK) is first
        assert upstream.requests == 2
        catalogs.close()


async def test_a_doubted_catalog_is_asked_for_again_and_kept_while_the_origin_is_away(asset, fresh):
    """As after a group that was wrong: then the origin lies, or has another asset by that name."""
    away = Fault(refuse=int(RequestCode.GOING_AWAY))
    upstream = in_memory(asset, faults=lambda ask: away if ask.attempt == 1 else None)
    async with upstream:
        catalogs, namespace = Catalogs(upstream, LOG), asset.catalog.namespace
        facts = (await catalogs.get(namespace, CATALOG_TRACK)).facts
        catalogs.doubt(namespace)
        assert (await catalogs.get(namespace, CATALOG_TRACK)).facts is facts
        assert upstream.requests == 2
        assert (await catalogs.get(namespace, CATALOG_TRACK)).facts is facts  # still in doubt, so asked for again
        assert upstream.requests == 3
        assert (await catalogs.get(namespace, CATALOG_TRACK)).facts is facts
        assert upstream.requests == 3
        catalogs.close()


async def test_a_lookup_that_finds_nothing_any_more_takes_nothing_with_it(asset, stale):
    spec = asset.catalog.spec
    digests = chain(list(range(48)), model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    gone = Fault(refuse=int(RequestCode.DOES_NOT_EXIST))
    upstream = in_memory(asset, faults=lambda ask: gone if ask.track != CATALOG_TRACK and ask.attempt else None)
    async with upstream:
        catalogs, namespace = Catalogs(upstream, LOG), asset.catalog.namespace
        lookup = TrackNamespace(spec.model, digests[0]), prefix_track(digests)
        facts = (await catalogs.get(namespace, CATALOG_TRACK)).facts
        await catalogs.get(*lookup)
        with pytest.raises(NotFoundError):
            await catalogs.get(*lookup)
        assert (await catalogs.get(namespace, CATALOG_TRACK)).facts is facts
        catalogs.close()


async def test_small_tracks_under_way_have_a_bound(asset):
    size = (asset.path / "catalog.json").stat().st_size
    async with in_memory(asset) as upstream:
        catalogs = Catalogs(upstream, LOG, limit=size // 2)
        with pytest.raises(RequestError, match="no room"):
            await catalogs.get(asset.catalog.namespace, CATALOG_TRACK)
        assert catalogs.bytes == catalogs._coming == 0


# ---------------------------------------------------------------- what is kept


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


async def test_a_group_larger_than_the_bound_passes_alone(tmp_path, tls):
    asset = make_asset(tmp_path / "asset", list(range(8)), frame_bytes=3_000_000)
    async with in_memory(asset) as upstream, relaying(upstream, tls, memory_bytes=1_000_000) as relay:
        async with await dialled(relay) as connection:
            await play(connection, asset)
        assert len(relay.source.store) == 0


# ---------------------------------------------------------------- players, and the end


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


def test_an_unauthorized_error_is_a_lost_connection():
    """So that players which know nothing of it do what they do when they lose their origin."""
    assert issubclass(UnauthorizedError, ConnectionLostError)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("text", "size"), [("67108864", 1 << 26), ("800MiB", 800 << 20), ("4g", 4 << 30), ("1TiB", 1 << 40)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "1.5GiB", "-1", "1MiB", "12XiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="--memory"):
        parse_size(text)


async def test_the_command(asset, tls, tmp_path):
    namespace = asset.catalog.namespace
    async with origin(asset.path, tls) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvabr", "relay", "--upstream",
            f"moqt://localhost:{server.address[1]}/#kvcache:{namespace.model}/{namespace.prompt}",
            "--upstream-fingerprint", server.fingerprint, "--bind", "127.0.0.1:0", "--dev", "--memory", "64MiB",
            "--disk", str(tmp_path / "cache"), "--disk-gib", "0.5", stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), LONG_S)).decode() for _ in range(3)]
            fingerprint = lines[1].split()[-1]
            assert lines[0].strip() in lines[2]
            words = shlex.split(lines[2].partition(": ")[2])
            assert words[:2] == ["kvabr", "fetch"]
            assert asset_of(words[2]) == namespace
            assert words[words.index("--fingerprint") + 1] == fingerprint
            async with connect(words[2], fingerprint=fingerprint) as connection:
                assert await get(connection, namespace, "FP16", 3) == asset.frame(3, "FP16")
            process.terminate()
            _, log = await asyncio.wait_for(process.communicate(), LONG_S)
            assert process.returncode == 0, log
            assert b"cannot be reached" not in log
            assert len(list((tmp_path / "cache").glob("*.group"))) == 1
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_command_starts_without_its_origin_and_works_once_it_is_there(asset, tls):
    namespace = asset.catalog.namespace
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvabr", "relay", "--upstream", f"moqt://127.0.0.1:{port}/",
            "--upstream-fingerprint", check(tls).fingerprint, "--bind", "127.0.0.1:0", "--dev", "--log-json",
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), LONG_S)).decode() for _ in range(2)]
            silent.close()
            async with connect(lines[0].strip(), fingerprint=lines[1].split()[-1]) as connection:
                asking = asyncio.create_task(get(connection, namespace, CATALOG_TRACK))
                async with origin(asset.path, tls, port=port):
                    assert await asking
                    await play(connection, asset)
            process.terminate()
            _, log = await asyncio.wait_for(process.communicate(), LONG_S)
            assert process.returncode == 0, log
            events = [json.loads(line) for line in log.splitlines()]
            assert [one["event"] for one in events if "cannot be reached" in one["event"]] == [
                "the origin cannot be reached"
            ]
            assert [one["event"] for one in events if one["event"] == "origin is back"] == ["origin is back"]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("wrong", ["certificate", "token"])
async def test_the_command_ends_if_its_origin_refuses_it(asset, tls, wrong):
    async with origin(asset.path, tls, grants=Grants([grant("the right token")])) as server:
        trust = [] if wrong == "certificate" else ["--upstream-fingerprint", server.fingerprint]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvabr", "relay", "--upstream", f"moqt://localhost:{server.address[1]}/",
            *trust, "--upstream-token", "a wrong token", "--bind", "127.0.0.1:0", "--dev", stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        out, log = await asyncio.wait_for(process.communicate(), LONG_S)
    assert process.returncode == 1
    assert not out
    assert f"{wrong} is" in log.decode()


async def test_requests_fail_for_now_while_the_origin_was_never_reached(asset, tls):
    upstream = RedialledConnection(UnreachedConnection("no answer"), unreachable, patience_s=0.0)
    async with upstream, relaying(upstream, tls) as relay, await dialled(relay) as connection:
        with pytest.raises(RequestError) as error:
            await get(connection, asset.catalog.namespace, CATALOG_TRACK)
    assert error.value.retry_after_s is not None


async def unreachable():
    raise TransportError("no answer")
