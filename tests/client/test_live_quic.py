"""Plays of a cache that is being prefilled, over QUIC, from an origin that follows the folder of a producer."""

import asyncio
import hashlib
import json
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvabr.cli.main import main
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.link.moqt.connect import connect
from kvabr.server.certificates import check, development
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server, Watcher
from kvabr.store.live import LiveWriter, new_key
from kvabr.store.local import LocalStore
from kvabr.types.events import GroupsPublished
from kvabr.types.live import UNKNOWN, LiveCatalog, LiveEnd, PublishedFrames
from kvabr.types.peer import PeerOptions
from tests.client.live import GROUPS, TOKENS, right
from tests.client.served import Served
from tests.faults.common import LIMIT_S, QUIET
from tests.faults.test_guests import until
from tests.toymodel import SPEC

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def tls():
    return development()


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "root"
    made.mkdir()
    return made


class Writer:
    """A producer in a folder, which takes one step at a time, in a thread."""

    def __init__(self, asset, root):
        self.asset, self.key, self.next = asset, new_key(), 0
        self.folder = LiveWriter(LocalStore(root), None)

    async def __aenter__(self):
        return await asyncio.to_thread(self.begin)

    async def __aexit__(self, *given):
        await asyncio.to_thread(self.folder.__exit__, *given)

    def begin(self):
        catalog = self.asset.catalog
        tracks = tuple(replace(one, digests=(UNKNOWN,) * GROUPS, packs=(), measured=None) for one in catalog.tracks)
        seconds = tuple(0.001 * (group + 1) for group in range(GROUPS))
        self.folder.__enter__()
        self.folder.begin_live(LiveCatalog(replace(catalog, tracks=tracks, mixes=()), seconds, self.key))
        return self

    async def publish(self, groups=1):
        for _ in range(groups):
            await asyncio.to_thread(self.step)

    def step(self):
        frames = {}
        for track in self.asset.catalog.tracks:
            frame = self.asset.frame(self.next, track.name)
            frames[track.name] = len(frame), (digest := hashlib.sha256(frame).hexdigest())
            self.folder.frame(self.next, track.name, frame, digest)
        self.folder.announce(PublishedFrames(self.key, self.next, float(self.next), frames))
        self.next += 1

    async def end(self):
        await asyncio.to_thread(self.folder.announce, LiveEnd(self.key))
        await asyncio.to_thread(self.folder.commit, self.asset.catalog)

    async def fail(self, reason):
        await asyncio.to_thread(self.folder.announce, LiveEnd(self.key, reason))


@asynccontextmanager
async def origin(root, tls, port=0):
    metrics, published = Metrics(), PublishedAssets(root, None, QUIET)
    async with (
        asyncio.timeout(LIMIT_S),
        Watcher(published, QUIET, metrics),
        Server(published, "127.0.0.1", port, tls, ServerLimits(), QUIET, metrics) as server,
    ):
        yield server


def dial(server, tls, **options):
    return connect(
        f"moqt://127.0.0.1:{server.address[1]}/",
        PeerOptions(fingerprint=check(tls).fingerprint, timeout_s=LIMIT_S, **options),
    )


class Followed(Served):
    """An origin in a thread that looks for growing assets, as `kvabr serve` does."""

    def start(self):
        super().start()
        self._watcher = Watcher(self._server.source, QUIET, Metrics())
        self._loop.call(self._watcher.__aenter__())

    @property
    def peers(self):
        return list(self._server.peers)

    def kill(self):
        self._loop.call(self._watcher.__aexit__(None, None, None))
        super().kill()


class Seen(list):
    @property
    def edge(self):
        return max((event.edge for event in self if isinstance(event, GroupsPublished)), default=0)


def playing(client, **options):
    seen = Seen()
    how = PlayOptions(log=seen.append, wait_for_producer_s=LIMIT_S, **options)
    return asyncio.ensure_future(client.play(TOKENS, deadline=LIMIT_S, options=how)), seen


async def test_a_cache_is_played_while_it_is_prefilled(asset, root, tls):
    async with (
        origin(root, tls) as server,
        dial(server, tls) as link,
        AsyncClient(link, model=SPEC) as client,
        Writer(asset, root) as writer,
    ):
        play, seen = playing(client)
        for group in range(GROUPS):
            await writer.publish()
            await until(lambda group=group: seen.edge > group)
        played = await play
        await writer.end()
    assert right(played, asset)
    assert played.live.published == GROUPS


async def test_a_play_subscribes_again_after_the_origin_was_killed(asset, root, tls):
    async with Writer(asset, root) as writer:
        async with origin(root, tls) as server:
            port = server.address[1]
            client = AsyncClient(
                f"moqt://127.0.0.1:{port}/",
                PeerOptions(fingerprint=check(tls).fingerprint, timeout_s=LIMIT_S),
                model=SPEC,
            )
            play, seen = playing(client)
            await writer.publish(3)
            await until(lambda: seen.edge == 3)
        await writer.publish(2)
        async with origin(root, tls, port):
            await until(lambda: seen.edge == 5)
            await writer.publish(5)
            assert right(await play, asset)
            await client.close()


@pytest.mark.usefixtures("alone")
def test_fetch_plays_what_is_being_prefilled(asset, root, tmp_path, capsys):
    """The producer publishes each group when the player waits for it."""
    served = Followed(root, tmp_path)
    writer = Writer(asset, root).begin()
    over = threading.Event()

    def produce():
        for _ in range(GROUPS):
            while not over.wait(0.01) and not any(len(peer._subscriptions) for peer in served.peers):
                pass
            writer.step()
        writer.folder.announce(LiveEnd(writer.key))
        writer.folder.commit(asset.catalog)

    thread = threading.Thread(target=produce)
    thread.start()
    tokens, result, log = (tmp_path / name for name in ("tokens.json", "r.json", "l.jsonl"))
    tokens.write_text(json.dumps(TOKENS))
    words = ("fetch", served.url, "--ca", served.pem, "--timeout", 300, "--deadline", 300, "--prompt", tokens)
    try:
        assert main([str(word) for word in (*words, "--json", result, "--log", log, "--wait-for-producer", 200)]) == 0
        said = capsys.readouterr().out
        assert "160 of 160 tokens in place" in said
        assert "10 groups:" in said
        assert json.loads(result.read_text())["live"]["published"] == GROUPS
        edges = [event["edge"] for event in map(json.loads, log.read_text().splitlines()) if "edge" in event]
        assert edges[-1] == GROUPS
        thread.join()
        end = time.monotonic() + LIMIT_S  # the origin notices the finished asset by itself
        while main([str(word) for word in (*words, "--json", result, "--no-live")]):
            assert time.monotonic() < end
    finally:
        over.set()
        thread.join()
        writer.folder.__exit__(None, None, None)
        served.close()
    assert json.loads(result.read_text())["live"] is None
