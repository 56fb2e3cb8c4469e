"""Producers that are killed: what they have published becomes the asset of a shorter prompt, once, and checked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import structlog
from kvabr.store.live_folder import EDGE, LiveFolderWriter, new_key
from structlog.testing import capture_logs

from kvabr.server.grants import EVERYTHING
from kvabr.server.live_assets import LiveAssets
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.asset import CATALOG, PROMPT
from kvabr.store.locations import open_asset
from kvabr.types.catalog import Catalog
from kvabr.types.live import LiveEnd
from kvabr.types.naming import EDGE_TRACK
from tests.assets import frame_file, live_folders, whole
from tests.faults.common import QUIET
from tests.faults.test_guests import until
from tests.server.live import decoder, live_origin
from tests.store.test_live_folder import GROUPS, KILLED, OFFER, TRACKS, final, frame, live, publish


@contextmanager
def killed(path, groups, *, after=lambda _: None):
    """A producer that is no more after some groups: its lock is free, its folder is left."""
    writer = LiveFolderWriter(path)
    writer.__enter__()
    writer.begin(live(key := new_key()))
    yield writer, key
    for group in range(groups):
        publish(writer, group, key)
    after(writer)
    os.close(writer._edge)
    os.close(writer._partial._handle)


async def settled(root, log=QUIET):
    """What an origin makes of a folder."""
    source = PublishedAssets(root, None, log)
    for step in (source.live.look, source.live.check, source.live.tell):
        await step()
    return source


def check(path, groups):
    asset = open_asset(path)
    asset.check_parts()
    assert asset.catalog == final(groups)
    assert sorted(inner.name for inner in path.iterdir()) == [CATALOG, "groups"]
    for track in TRACKS:
        assert [asset.frame(group, track.name) for group in range(groups)] == [
            frame(at, track.name) for at in range(groups)
        ]


@pytest.mark.process
async def test_a_producer_that_is_killed_leaves_a_shorter_asset(root, tls):
    async with live_origin(root, tls) as server, decoder(server) as player, decoder(server) as late:
        command = [sys.executable, "-c", KILLED, root / "asset"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603, ASYNC220
            await player.found()
            following = asyncio.ensure_future(player.follow())
            assert (await late.news(0)).group == 0
            os.kill(process.pid, signal.SIGKILL)
            frames, reason = await following
            assert reason == "its process is gone"
            assert frames == {(0, track.name): frame(0, track.name) for track in TRACKS}
        shorter = final(1)
        catalog = Catalog.loads(await late.complete(shorter.namespace))
        assert catalog == shorter
        check(root / shorter.namespace.prompt, 1)
        # A late one finds it by the lookup of the longer prompt; those who began before still have the old names.
        growing, ordinary = await late.lookups()
        assert Catalog.loads(ordinary) == shorter
        assert growing is not None
        assert (await player.get("FP16")).data == frame(0, "FP16")
        assert (await late.get("FP16", namespace=shorter.namespace)).data == frame(0, "FP16")
        assert (await late.get("FP16", 1)).code is not None


@pytest.mark.parametrize("groups", range(GROUPS + 1))
async def test_what_was_published_is_kept_under_the_name_of_the_prompt_that_it_is(root, groups):
    with killed(root / "asset", groups):
        pass
    source = await settled(root)
    (asset,) = source.live.assets
    assert (asset.over, asset.edge.failure) == (True, "its process is gone")
    assert (
        whole(source.find(EVERYTHING, OFFER.namespace, EDGE_TRACK).open(groups))
        == LiveEnd(asset.live.key, "its process is gone").dumps()
    )
    if not groups:
        assert list(root.iterdir()) == []
        return
    name = "asset" if groups == GROUPS else OFFER.chunks[groups - 1]
    assert [path.name for path in root.iterdir()] == [name]
    check(root / name, groups)
    assert [one.catalog for one in source.assets] == [final(groups)]
    for level in asset.levels.values():
        assert whole(level.open(0)) == frame(0, level.name)
    await source.live.look()
    assert not asset.gone


def more(writer):
    """What the producer writes besides."""
    folder = writer._open_partial()
    (folder / PROMPT).write_text("{}")
    (folder / CATALOG).write_text('{"half')
    with (folder / EDGE).open("ab") as file:
        file.write(b'{"key": "0123')


def lose(writer):
    """Frames that never reached the disk."""
    folder = writer._open_partial()
    frame_file(folder, 2, "FP16").write_bytes(b"")
    changed = frame_file(folder, 1, "Int4")
    changed.write_bytes(bytes(changed.stat().st_size))


def damage(writer):
    """The end of the news."""
    with (writer._open_partial() / EDGE).open("ab") as file:
        file.write(b"nonsense\n")


@pytest.mark.parametrize(
    ("after", "groups", "kept", "why"),
    [(more, 2, 2, "its process is gone"), (lose, 3, 1, "its process is gone"), (damage, 2, 2, "edge message")],
    ids=["more", "lost", "damaged"],
)
async def test_only_what_was_published_and_is_whole_is_kept(root, after, groups, kept, why):
    with killed(root / "asset", groups, after=after):
        pass
    source = await settled(root)
    assert why in source.live.assets[0].edge.failure
    check(root / OFFER.chunks[kept - 1], kept)


async def test_a_producer_that_is_killed_after_its_asset_got_its_name(root):
    """The end was not told, but is known."""
    source = PublishedAssets(root, None, QUIET)
    with killed(root / "asset", GROUPS, after=lambda writer: writer.commit(final())):
        await source.live.look()
    for step in (source.live.check, source.live.look, source.live.tell):
        await step()
    (asset,) = source.live.assets
    assert (asset.over, asset.edge.failure, asset.gone) == (True, "", False)
    check(root / "asset", GROUPS)
    assert len(source.assets) == 1


async def test_a_producer_that_is_killed_between_its_last_word_and_the_name(root):
    source = PublishedAssets(root, None, QUIET)

    def end(writer):
        writer.tell(LiveEnd(source.live.assets[0].live.key))

    with killed(root / "asset", GROUPS, after=end):
        await source.live.look()
    source.live.poll()
    (asset,) = source.live.assets
    assert (asset.over, asset.edge.failure, asset.settled) == (True, "", False)
    await source.live.check()
    check(root / "asset", GROUPS)


async def test_two_origins_of_one_folder_keep_it_once(root):
    with killed(root / "asset", 2):
        pass
    with capture_logs() as entries:
        sources = [PublishedAssets(root, None, structlog.get_logger()) for _ in range(2)]
        for source in sources:
            await source.live.look()
        await asyncio.gather(*(source.live.check() for source in sources))
        for source in sources:
            await source.live.look()
            source.refresh()
            assert [asset.catalog for asset in source.assets] == [final(2)]
            (asset,) = source.live.assets
            assert whole(asset.levels["FP16"].open(1)) == frame(1, "FP16")
    assert [entry["event"] for entry in entries].count("live asset kept") == 1
    check(root / OFFER.chunks[1], 2)


async def test_a_folder_that_cannot_be_made_an_asset_is_served_all_the_same(root):
    def spoil(writer):
        (writer._open_partial() / CATALOG).mkdir()

    with killed(root / "asset", 2, after=spoil):
        pass
    with capture_logs() as entries:
        source = await settled(root, structlog.get_logger())
    assert [entry["event"] for entry in entries if entry["log_level"] == "warning"] == [
        "live asset ended",
        "live asset not kept",
    ]
    (asset,) = source.live.assets
    assert whole(asset.levels["FP16"].open(1)) == frame(1, "FP16")
    assert len(list(live_folders(root))) == 1
    await source.live.check()
    assert asset.settled


async def test_a_producer_that_lives_is_left_alone(root):
    source = LiveAssets(root, QUIET)
    with LiveFolderWriter(root / "asset") as writer:
        writer.begin(live(key := new_key()))
        publish(writer, 0, key)
        await source.look()
        await source.check()
        (asset,) = source.assets
        assert asset.folder.rescue(asset.news()) is None
        assert not asset.over
        assert list(live_folders(root)) == [asset.folder.path]
    await until(lambda: not list(root.iterdir()))
