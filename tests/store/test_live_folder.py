"""Assets that are played while they are written: what a follower sees, also of a writer that fails or is killed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from kvabr.store.asset_folder import FolderAsset, FolderAssetStore
from kvabr.store.live_folder import EDGE, LIVE, LiveFolder, LiveFolderWriter, new_key
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.live import UNKNOWN, LiveCatalog, LiveEnd, PublishedFrames
from kvabr.types.naming import TrackNamespace
from tests.assets import live_folders
from tests.catalogs import catalog

GROUPS, SIZE = 3, 100_000
OFFER = catalog(GROUPS)
TRACKS = tuple(track for track in OFFER.tracks if track.name in ("FP16", "Int4"))


def frame(group, track):
    return hashlib.shake_128(f"{group} {track}".encode()).digest(SIZE + group)


def final(groups=GROUPS):
    def listed(track):
        frames = [frame(group, track.name) for group in range(groups)]
        sums = tuple(hashlib.sha256(one).hexdigest() for one in frames)
        return replace(track, bytes=tuple(map(len, frames)), loss=track.loss[:groups], digests=sums)

    chunks = OFFER.chunks[:groups]
    tokens = min(OFFER.tokens, groups * OFFER.spec.group_tokens)
    space = TrackNamespace(OFFER.spec.model, chunks[-1])
    return replace(OFFER, namespace=space, tokens=tokens, chunks=chunks, tracks=tuple(map(listed, TRACKS)))


def live(key):
    tracks = tuple(replace(track, digests=(UNKNOWN,) * GROUPS) for track in TRACKS)
    return LiveCatalog(replace(OFFER, tracks=tracks), (1.0, 2.0, 3.0), key)


def publish(writer, group, key):
    frames = {}
    for track in TRACKS:
        data = frame(group, track.name)
        writer.frame(group, track.name, data)
        frames[track.name] = len(data), hashlib.sha256(data).hexdigest()
    writer.tell(message := PublishedFrames(key, group, float(group), frames))
    return message


def test_a_follower_sees_what_is_published_and_reads_it_also_after_the_folder_got_its_name(tmp_path):
    key = new_key()
    with LiveFolderWriter(tmp_path / "asset") as writer:
        assert list(live_folders(tmp_path)) == []
        writer.begin(live(key))
        (path,) = live_folders(tmp_path)
        with LiveFolder(path) as follower:
            assert follower.live == live(key)
            assert follower.read() == []
            assert follower.has_writer()
            told = [publish(writer, 0, key)]
            assert follower.read() == told
            reader = follower.open_frame(0, "FP16", SIZE)
            assert bytes(reader.read(0, SIZE)) == frame(0, "FP16")
            told = [publish(writer, group, key) for group in (1, 2)]
            writer.commit(final())
            writer.tell(LiveEnd(key))
            assert follower.read() == [*told, LiveEnd(key)]
            late = follower.open_frame(2, "Int4", SIZE + 2)
            assert bytes(late.read(0, late.size)) == frame(2, "Int4")
            for one in (reader, late):
                one.close()
    asset = FolderAsset.open(tmp_path / "asset")
    asset.check_parts()
    assert asset.catalog == final()
    assert sorted(path.name for path in (tmp_path / "asset").iterdir()) == ["catalog.json", "groups"]
    assert list(live_folders(tmp_path)) == []


def test_a_producer_that_fails_leaves_a_shorter_asset(tmp_path):
    key = new_key()
    with LiveFolderWriter(tmp_path / "long") as writer:
        writer.begin(live(key))
        publish(writer, 0, key)
        publish(writer, 1, key)
        writer.commit(final(2), tmp_path / "short")
        writer.tell(LiveEnd(key, "the engine ran out of memory"))
    assert [*FolderAssetStore(tmp_path).list().versions] == ["short"]
    FolderAsset.open(tmp_path / "short").check_parts()


def test_a_producer_that_is_left_in_the_middle_leaves_nothing(tmp_path):
    with LiveFolderWriter(tmp_path / "asset") as writer:
        writer.begin(live(key := new_key()))
        publish(writer, 0, key)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from tests.store.test_live_folder import LiveFolderWriter, live, new_key, publish
with LiveFolderWriter(Path(sys.argv[1])) as writer:
    writer.begin(live(key := new_key()))
    publish(writer, 0, key)
    print("published", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_a_writer_that_was_killed_is_known_by_its_lock(tmp_path):
    command = [sys.executable, "-c", KILLED, tmp_path / "asset"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603
        assert process.stdout.readline() == b"published\n"
        (path,) = live_folders(tmp_path)
        with LiveFolder(path) as follower:
            assert len(follower.read()) == 1
            assert follower.has_writer()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert not follower.has_writer()
            assert bytes(follower.open_frame(0, "FP16", SIZE).read(0, 10)) == frame(0, "FP16")[:10]


def test_half_a_line_is_read_once_it_is_whole(tmp_path):
    key = new_key()
    with LiveFolderWriter(tmp_path / "asset") as writer:
        writer.begin(live(key))
        (path,) = live_folders(tmp_path)
        line = LiveEnd(key).dumps() + b"\n"
        with LiveFolder(path) as follower:
            with (path / EDGE).open("ab") as file:
                file.write(line[:10])
                file.flush()
                assert follower.read() == []
                file.write(line[10:])
            assert follower.read() == [LiveEnd(key)]


def test_what_is_damaged_is_refused(tmp_path):
    key = new_key()
    with LiveFolderWriter(tmp_path / "asset") as writer:
        writer.begin(live(key))
        publish(writer, 0, key)
        (path,) = live_folders(tmp_path)
        with LiveFolder(path) as follower:
            with pytest.raises(AssetError, match="its catalog says"):
                follower.open_frame(0, "FP16", SIZE + 1)
            with pytest.raises(AssetError, match="cannot be read"):
                follower.open_frame(1, "FP16", SIZE)
            (path / EDGE).write_bytes(b"nonsense\n")
            with pytest.raises(FormatError, match="edge message"):
                LiveFolder(path).read()
        (path / EDGE).unlink()
        (path / EDGE).symlink_to("/etc/passwd")
        with pytest.raises(AssetError, match="cannot be followed"):
            LiveFolder(path)
        (path / LIVE).write_text("{}")
        with pytest.raises(FormatError, match="live catalog"):
            LiveFolder(path)
    with pytest.raises(AssetError, match="cannot be followed"):
        LiveFolder(path)
