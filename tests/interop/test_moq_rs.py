"""kvabr against moq-rs, an independent implementation in Rust: as client of our origin, as relay, and as origin."""

import asyncio
import contextlib
import hashlib
from itertools import product

import pytest
import structlog
import torch

from kvabr.link.moqt.connect import dial
from kvabr.link.moqt.options import DialOptions
from kvabr.moqt.wire import DRAFTS, by_alpn
from kvabr.player.assembler import Assembler
from kvabr.replay.verify import load_profile
from kvabr.server.certificates import development
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from kvabr.transfer.interface import read_all
from kvabr.types.errors import NotFoundError
from kvabr.types.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace
from kvabr.types.peer import PeerOptions
from tests.client.playing import play_asset

moq = pytest.importorskip("moq", reason="moq-rs is not installed: tools/setup-venv")
pytestmark = pytest.mark.model  # the assets are of the real model

LIBRARIES = ("aioquic", "qh3")
ALPNS = tuple(draft.alpn for draft in DRAFTS)


@contextlib.asynccontextmanager
async def our_origin(asset, library, drafts=DRAFTS):
    tls = development()
    found = PublishedAssets(asset.store)
    arguments = (found, "127.0.0.1", 0, tls, ServerLimits(), structlog.get_logger(), Metrics())
    async with Server(*arguments, quic=library, drafts=drafts) as server:
        yield server


@contextlib.asynccontextmanager
async def accepting(server):
    """Let it take every connection; how each ends does not matter."""

    async def one(request):
        session = await request.accept()
        with contextlib.suppress(moq.Error):
            await session.closed()

    async def run():
        async for request in server:
            sessions.add(asyncio.create_task(one(request)))

    sessions = set()
    task = asyncio.create_task(run())
    try:
        yield
    finally:
        for each in (task, *sessions):
            each.cancel()


def path_of(namespace):
    return "/".join(field.decode() for field in namespace.split_fields())


async def routed(client, path):
    """A broadcast, once our announcement has reached the client."""
    async for _ in client.announced(hidden=True):
        with contextlib.suppress(moq.Error):
            return await client.request_broadcast(path)
    raise AssertionError("the connection ended")


async def group_of(broadcast, track, index):
    group = await broadcast.fetch_group(track, index)
    return b"".join([frame.payload async for frame in group])


def exact(asset, track):
    """The cache that a play on one track must bring."""
    whole = Assembler(asset.catalog, load_profile(asset))
    for group in range(asset.catalog.groups):
        whole.put(group, track, asset.frame(group, track))
    return whole.take()


@pytest.mark.parametrize(("library", "alpn"), list(product(LIBRARIES, ALPNS)))
async def test_its_client_fetches_from_our_origin(asset, library, alpn):
    async with asyncio.timeout(300), our_origin(asset, library, (by_alpn(alpn),)) as server:
        url = f"moqt://localhost:{server.address[1]}/"
        async with moq.Client(url, tls_verify=False, bind="127.0.0.1:0") as client:
            broadcast = await routed(client, path_of(asset.catalog.namespace))
            for track in asset.catalog.tracks:
                for index, digest in enumerate(track.digests):
                    data = await group_of(broadcast, track.name, index)
                    assert hashlib.sha256(data).hexdigest() == digest
            with pytest.raises(moq.Error.NotFound):
                await group_of(broadcast, "no-such-track", 0)


@pytest.mark.parametrize("alpn", ALPNS)
@pytest.mark.parametrize("library", LIBRARIES)
async def test_our_player_plays_from_our_origin_through_its_relay(asset, library, alpn):
    between = moq.OriginProducer()
    async with asyncio.timeout(300), contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(our_origin(asset, library))
        relay = moq.Server("127.0.0.1:0", tls_generate=["localhost"], publish=between, subscribe=between)
        await stack.enter_async_context(relay)
        await stack.enter_async_context(accepting(relay))
        url = f"moqt://localhost:{server.address[1]}/"
        upstream = moq.Client(url, tls_verify=False, bind="127.0.0.1:0", subscribe=between)
        await stack.enter_async_context(upstream)
        await routed(upstream, path_of(asset.catalog.namespace))
        port = int(relay.local_addr.rsplit(":", 1)[1])
        connection = await dial(
            DialOptions("127.0.0.1", port, how=PeerOptions(insecure=True, timeout_s=300.0), drafts=(alpn,)), library
        )
        async with connection:
            assert connection.protocol == alpn
            played = await play_asset(connection, asset.catalog.namespace, deadline=300.0, policy="fixed:AC-5x")
            assert torch.equal(played.kv, exact(asset, "AC-5x"))
            with pytest.raises(NotFoundError):
                await read_all(connection.fetch(asset.catalog.namespace, "no-such-track", limit=100))


@pytest.mark.parametrize("alpn", ALPNS)
@pytest.mark.parametrize("library", LIBRARIES)
async def test_our_player_plays_from_its_origin(asset, library, alpn):
    its_server = moq.Server("127.0.0.1:0", tls_generate=["localhost"])
    async with asyncio.timeout(300), its_server as server, accepting(server):
        catalog = asset.catalog
        tracks = {track.name: [asset.frame(g, track.name) for g in range(catalog.groups)] for track in catalog.tracks}
        tracks[CATALOG_TRACK], profile = [catalog.dumps().encode()], {PROFILE_TRACK: [asset.profile_bytes()]}
        published = [
            publish(server, catalog.namespace, tracks),
            publish(server, TrackNamespace(catalog.spec.model, catalog.profile), profile),
        ]
        port = int(server.local_addr.rsplit(":", 1)[1])
        options = DialOptions(
            "127.0.0.1", port, how=PeerOptions(insecure=True, timeout_s=300.0), drafts=(alpn,), names="split"
        )
        async with await dial(options, library) as connection:
            played = await play_asset(connection, catalog.namespace, deadline=300.0, policy="fixed:Int8")
            assert torch.equal(played.kv, exact(asset, "Int8"))
            assert played.coverage == ("Int8",) * catalog.groups
        del published


def publish(server, namespace, tracks):
    """Publish groups in frames of 64 KiB; returns what must be kept for them to stay."""
    broadcast = server.create_broadcast(path_of(namespace))
    kept = [broadcast]
    for name, groups in tracks.items():
        track = broadcast.publish_track(name)
        for index, data in enumerate(groups):
            group = track.create_group(index)
            for at in range(0, len(data), 1 << 16):
                group.write_frame(bytes(data[at : at + (1 << 16)]))
            group.finish()
        kept.append(track)
    broadcast.announce()
    return kept
