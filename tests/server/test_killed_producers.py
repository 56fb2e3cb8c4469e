"""Producers that are killed: their tracks end with a reason, and earlier readers keep what was published."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from kvabr.server.grants import EVERYTHING
from kvabr.server.live_assets import LiveAssets
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.files import STALE_S
from kvabr.store.live import new_key
from kvabr.store.locations import open_asset
from kvabr.store.store_tree import StoreTree
from kvabr.types.live import LiveEnd
from kvabr.types.naming import EDGE_TRACK
from tests.assets import live_folders, whole
from tests.faults.common import QUIET
from tests.server.live import decoder, live_origin
from tests.store.test_live import GROUPS, KILLED, OFFER, TRACKS, final, frame, live, publish, written


@contextmanager
def killed(root, groups, *, after=lambda _: None):
    """A producer that ended without a word after some groups: its lock is free, its news are left."""
    writer = written(root)
    writer.__enter__()
    writer.begin_live(live(key := new_key()))
    yield writer, key
    for group in range(groups):
        publish(writer, group, key)
    after(writer)
    os.close(writer._lock)


async def settled(root):
    """What an origin makes of a folder."""
    source = PublishedAssets(root, None, QUIET)
    for step in (source.live.scan, source.live.check, source.live.notify):
        await step()
    return source


@pytest.mark.process
async def test_earlier_players_keep_what_a_killed_producer_published(root, tls):
    async with live_origin(root, tls) as server, decoder(server) as player, decoder(server) as late:
        command = [sys.executable, "-c", KILLED, root]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603, ASYNC220
            await player.found()
            following = asyncio.ensure_future(player.follow())
            assert (await late.news(1)).group == 1
            os.kill(process.pid, signal.SIGKILL)
            frames, reason = await following
            assert reason == "its process is gone"
            assert frames == {(at, track.name): frame(at, track.name) for at in (0, 1) for track in TRACKS}
        assert (await player.get("FP16")).data == frame(0, "FP16")
        assert (await late.get("FP16", 2)).code is not None


@pytest.mark.parametrize("groups", range(GROUPS + 1))
async def test_the_tracks_of_a_killed_producer_end_with_a_reason(root, groups):
    with killed(root, groups):
        pass
    source = await settled(root)
    (asset,) = source.live.assets
    assert (asset.over, asset.edge.failure, asset.chunks) == (True, "its process is gone", groups)
    assert (
        whole(source.find(EVERYTHING, OFFER.namespace, EDGE_TRACK).open(groups))
        == LiveEnd(asset.live.key, "its process is gone").dumps()
    )
    assert source.assets == []
    for level in asset.levels.values():
        assert [whole(level.open(group)) for group in range(groups)] == [
            frame(group, level.name) for group in range(groups)
        ]
    await source.live.scan()
    assert not asset.gone


async def test_a_producer_that_is_killed_after_it_named_the_asset_leaves_the_whole_asset(root):
    source = PublishedAssets(root, None, QUIET)
    with killed(root, GROUPS, after=lambda writer: writer.commit(final())):
        await source.live.scan()
    for step in (source.live.check, source.live.scan, source.live.notify):
        await step()
    (asset,) = source.live.assets
    assert (asset.over, asset.edge.failure, asset.gone) == (True, "", False)
    found = open_asset(root)
    found.check_parts()
    found.check_frames()
    assert found.catalog == final(GROUPS)
    assert len(source.assets) == 1


def test_the_next_producer_removes_the_news_of_a_killed_one_after_an_hour(root):
    with killed(root, 2) as (_, dead):
        pass
    with killed(root, 1) as (_, fresh), written(root) as running:
        running.begin_live(live(alive := new_key()))
        for key in (dead, alive):
            for path in (root / "l" / key).iterdir():
                os.utime(path, (0, path.stat().st_mtime - STALE_S - 1))
        with written(root) as writer:
            writer.begin_live(live(key := new_key()))
            assert {path.name for path in live_folders(root)} == {fresh, alive, key}


async def test_a_producer_that_lives_is_left_alone(root):
    source = LiveAssets(StoreTree(root), QUIET)
    with written(root) as writer:
        writer.begin_live(live(key := new_key()))
        publish(writer, 0, key)
        await source.scan()
        await source.check()
        (asset,) = source.assets
        assert not asset.over
        assert [path.name for path in live_folders(root)] == [key]
