"""Producers that are killed: what they have published becomes the asset of a shorter prompt, once, and checked."""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import structlog
from structlog.testing import capture_logs

from kvabr.server.grants import EVERYTHING
from kvabr.server.live_assets import LiveAssets
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.live import new_key
from kvabr.store.locations import open_asset
from kvabr.store.names import group_name
from kvabr.store.store_tree import StoreTree
from kvabr.types.catalog import Catalog
from kvabr.types.live import LiveEnd
from kvabr.types.naming import EDGE_TRACK
from tests.assets import live_folders, whole
from tests.faults.common import QUIET
from tests.server.live import decoder, live_origin
from tests.store.test_live import GROUPS, KILLED, OFFER, TRACKS, final, frame, live, publish, written


@contextmanager
def killed(root, groups, *, after=lambda _: None):
    """A producer that is no more after some groups: its lock is free, its news are left."""
    writer = written(root)
    writer.__enter__()
    writer.begin_live(live(key := new_key()))
    yield writer, key
    for group in range(groups):
        publish(writer, group, key)
    after(writer)
    os.close(writer._lock)


async def settled(root, log=QUIET):
    """What an origin makes of a folder."""
    source = PublishedAssets(root, None, log)
    for step in (source.live.scan, source.live.check, source.live.tell):
        await step()
    return source


def check(root, groups):
    asset = open_asset(root)
    asset.check_parts()
    asset.check_frames()
    assert asset.catalog == final(groups)
    assert live_folders(root) == []


@pytest.mark.process
async def test_a_producer_that_is_killed_leaves_a_shorter_asset(root, tls):
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
        shorter = final(2)
        catalog = Catalog.loads(await late.complete(shorter.namespace))
        assert catalog == shorter
        check(root, 2)
        # A late one finds it by the lookup of the longer prompt; those who began before still have the old names.
        growing, ordinary = await late.lookups()
        assert Catalog.loads(ordinary) == shorter
        assert growing is not None
        assert (await player.get("FP16")).data == frame(0, "FP16")
        assert (await late.get("FP16", namespace=shorter.namespace)).data == frame(0, "FP16")
        assert (await late.get("FP16", 2)).code is not None


@pytest.mark.parametrize("groups", range(GROUPS + 1))
async def test_what_was_published_is_kept_under_the_name_of_the_prompt_that_it_is(root, groups):
    with killed(root, groups):
        pass
    source = await settled(root)
    (asset,) = source.live.assets
    assert (asset.over, asset.edge.failure) == (True, "its process is gone")
    assert (
        whole(source.find(EVERYTHING, OFFER.namespace, EDGE_TRACK).open(groups))
        == LiveEnd(asset.live.key, "its process is gone").dumps()
    )
    if not groups:
        assert live_folders(root) == source.assets == []
        return
    check(root, groups)
    assert [one.catalog for one in source.assets] == [final(groups)]
    for level in asset.levels.values():
        assert whole(level.open(0)) == frame(0, level.name)
    await source.live.scan()
    assert not asset.gone


def lose(writer):
    """Frames that never reached the disk."""
    frame_of(writer, 2, "FP16").write_bytes(b"")
    changed = frame_of(writer, 1, "Int4")
    changed.write_bytes(bytes(changed.stat().st_size))


def frame_of(writer, group, track):
    return writer.store.path(group_name(hashlib.sha256(frame(group, track)).hexdigest()))


def damage(writer):
    (path,) = live_folders(writer.store.folder)
    (path / "2").write_bytes(b"nonsense")


@pytest.mark.parametrize(
    ("after", "groups", "kept", "why"),
    [(lose, 3, 1, "its process is gone"), (damage, 2, 2, "edge message")],
    ids=["lost", "damaged"],
)
async def test_only_what_was_published_and_is_whole_is_kept(root, after, groups, kept, why):
    with killed(root, groups, after=after):
        pass
    source = await settled(root)
    assert why in source.live.assets[0].edge.failure
    check(root, kept)


@pytest.mark.parametrize("named", [False, True])
async def test_a_producer_that_is_killed_at_its_very_end_leaves_the_whole_asset(root, named):
    """Between its last word and the asset's name, or behind the name: then the end was not told, but is known."""
    source = PublishedAssets(root, None, QUIET)

    def end(writer):
        if named:
            writer.commit(final())
        else:
            writer.tell(LiveEnd(source.live.assets[0].live.key))

    with killed(root, GROUPS, after=end):
        await source.live.scan()
    for step in (source.live.check, source.live.scan, source.live.tell):
        await step()
    (asset,) = source.live.assets
    assert (asset.over, asset.edge.failure, asset.gone) == (True, "", False)
    check(root, GROUPS)
    assert len(source.assets) == 1


async def test_two_origins_of_one_folder_keep_it_once(root):
    with killed(root, 2):
        pass
    with capture_logs() as entries:
        sources = [PublishedAssets(root, None, structlog.get_logger()) for _ in range(2)]
        for source in sources:
            await source.live.scan()
        await asyncio.gather(*(source.live.check() for source in sources))
        for source in sources:
            await source.live.scan()
            source.refresh()
            assert [asset.catalog for asset in source.assets] == [final(2)]
            (asset,) = source.live.assets
            assert whole(asset.levels["FP16"].open(1)) == frame(1, "FP16")
    assert [entry["event"] for entry in entries].count("live asset kept") == 1
    check(root, 2)


async def test_a_folder_that_cannot_be_made_an_asset_is_served_all_the_same(root):
    with killed(root, 2):
        pass
    (root / "a").write_text("no folder")
    with capture_logs() as entries:
        source = await settled(root, structlog.get_logger())
    assert [entry["event"] for entry in entries if entry["log_level"] == "warning"] == [
        "live asset ended",
        "live asset not kept",
    ]
    (asset,) = source.live.assets
    assert whole(asset.levels["FP16"].open(1)) == frame(1, "FP16")
    assert len(live_folders(root)) == 1
    await source.live.check()
    assert asset.settled


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
