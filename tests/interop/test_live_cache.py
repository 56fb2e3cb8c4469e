"""A cache that is being prefilled, and another MoQT stack: moq-rs subscribes to ours, and our relay to its."""

import asyncio
import contextlib
import hashlib
import sys

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.link.moqt.connect import dial
from kvabr.link.moqt.options import DialOptions
from kvabr.moqt.wire import DRAFTS
from kvabr.store.locations import open_store
from kvabr.types.live import LiveEnd, PublishedFrames
from kvabr.types.naming import EDGE_TRACK, LIVE_PREFIX_TRACK, LIVE_TRACK, PREFIX_TRACK, TrackNamespace, prefix_track
from kvabr.types.peer import PeerOptions
from tests.client.live import KEY, TOKENS, Producer, right
from tests.faults.common import LIMIT_S
from tests.faults.test_guests import until
from tests.server.conftest import tls  # noqa: F401  # a fixture
from tests.server.relays import relaying
from tests.server.test_relay_live import chain
from tests.toymodel import SPEC, toy_asset

moq = pytest.importorskip("moq", reason="moq-rs is not installed: tools/setup-venv")
from tests.interop.test_moq_rs import accepting, exact, group_of, path_of, routed  # noqa: E402  # it needs moq

BASE = "AC-L0"


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    """10 groups on three tracks; Int4 is the base."""
    return toy_asset(tmp_path_factory.mktemp("live") / "asset", ("FP16", "Int8", "Int4"), tokens=160)


@pytest.mark.model
async def test_its_subscribers_decode_what_we_prefill(tmp_path, tls):  # noqa: F811
    """`kvabr prefill` computes the cache of a real model; moq-rs gets its base, from the origin and from a relay."""
    text, root = tmp_path / "text", tmp_path / "root"
    text.write_text("The relay forwards what it is sent, and keeps it. " * 200)
    root.mkdir()
    words = ("prefill", "--model", "smollm2", "--text", text, "--tokens", "384", "--out", root, "--live")
    async with asyncio.timeout(LIMIT_S), chain(root, tls) as (origin, relay):
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvabr", *map(str, words))
        try:
            await until(lambda: origin.source.live.assets)
            (live,) = origin.source.live.assets
            both = await asyncio.gather(*(subscribed(server, live) for server in (origin, relay)))
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    store = open_store(root)
    (name,) = store.list()
    asset = store.open(name)
    for frames in both:
        assert {group: hashlib.sha256(data).hexdigest() for group, data in frames.items()} == dict(
            enumerate(asset.catalog.by_name[BASE].digests)
        )
        assert torch.equal(exact(Received(asset, frames), BASE), exact(asset, BASE))


async def subscribed(server, live):
    """Return the frames of the base, by group."""
    frames, count = {}, len(live.catalog.chunks)
    async with one_broadcast(server, live) as broadcast:
        consumer = await broadcast.subscribe_track(BASE)
        while count - 1 not in frames and (group := await consumer.next_group()) is not None:
            with contextlib.suppress(moq.Error):  # it may give up a group for a newer one
                frames[group.sequence] = b"".join([frame.payload async for frame in group])
    for earlier in set(range(count)) - frames.keys():
        frames[earlier] = await fetched(server, live, earlier)
    return frames


async def fetched(server, live, group):
    """Return a group of the base once the asset is complete.

    moq-rs fetches by a subscription: it finds a group only if the subscription begins with it, which ours does when
    the track is complete, and a connection remembers a track that has ended without it.
    """
    while True:
        async with one_broadcast(server, live) as broadcast:
            with contextlib.suppress(moq.Error):
                return await group_of(broadcast, BASE, group)
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def one_broadcast(server, live):
    url = f"moqt://localhost:{server.address[1]}/"
    async with moq.Client(url, tls_verify=False, bind="127.0.0.1:0") as client:
        yield await routed(client, path_of(live.namespace))


class Received:
    """An asset whose frames are those that were received."""

    def __init__(self, asset, frames) -> None:
        self._asset, self._frames = asset, frames

    def __getattr__(self, name):
        return getattr(self._asset, name)

    def frame(self, group, track):
        assert track == BASE
        return self._frames[group]


@pytest.mark.process
@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.alpn)
async def test_our_relay_forwards_what_its_publisher_computes(growing, tls, draft):  # noqa: F811
    """moq-rs publishes the tracks of a cache that grows; a player behind our relay plays it at its edge."""
    its_server = moq.Server("127.0.0.1:0", tls_generate=["localhost"])
    async with asyncio.timeout(LIMIT_S), its_server as server, accepting(server), contextlib.AsyncExitStack() as stack:
        asset = growing
        producer = Producer(asset)
        first = TrackNamespace(SPEC.model, asset.catalog.chunks[0])
        lookup = prefix_track(asset.catalog.chunks).replace(PREFIX_TRACK, LIVE_PREFIX_TRACK, 1)
        cache = server.create_broadcast(path_of(asset.catalog.namespace))
        names = server.create_broadcast(path_of(first)) if first != asset.catalog.namespace else cache
        texts = [names.publish_track(lookup), cache.publish_track(LIVE_TRACK)]  # kept, or they would be gone
        for track in texts:
            group_into(track, 0, producer.live.dumps().encode())
        edge, levels = cache.publish_track(EDGE_TRACK), {name: cache.publish_track(name) for name in producer.levels}
        cache.announce()
        names.announce()
        port = int(server.local_addr.rsplit(":", 1)[1])
        options = DialOptions(
            "127.0.0.1", port, how=PeerOptions(insecure=True, timeout_s=LIMIT_S), drafts=(draft.alpn,), names="split"
        )
        upstream = await stack.enter_async_context(await dial(options, "aioquic"))
        relay = await stack.enter_async_context(relaying(upstream, tls))
        peer = PeerOptions(fingerprint=relay.fingerprint, timeout_s=LIMIT_S)
        client = await stack.enter_async_context(AsyncClient(f"moqt://127.0.0.1:{relay.address[1]}/", peer, model=SPEC))
        how = PlayOptions(wait_for_producer_s=LIMIT_S / 2)
        play = asyncio.ensure_future(client.play(TOKENS, deadline=LIMIT_S, options=how))
        for chunk in range(len(asset.catalog.chunks)):
            await until(lambda: len(relay.source.live._assets) or play.done())
            told = {}
            for name, frame in producer.frames(chunk).items():
                group_into(levels[name], chunk, frame)
                told[name] = len(frame), hashlib.sha256(frame).hexdigest()
            group_into(edge, chunk, PublishedFrames(KEY, chunk, float(chunk), told).dumps())
        group_into(edge, len(asset.catalog.chunks), LiveEnd(KEY).dumps())
        assert right(await play, asset)


def group_into(track, number, data):
    group = track.create_group(number)
    for at in range(0, len(data), 1 << 16):
        group.write_frame(bytes(data[at : at + (1 << 16)]))
    group.finish()
