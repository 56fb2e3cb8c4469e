"""Assets that are played while they are written: what a follower sees, also of a writer that fails or is killed."""

import fcntl
import hashlib
import os
from dataclasses import replace

import pytest

from kvabr.store import live as store_live
from kvabr.store.live import LIVE_NAME, LiveFollower, LiveWriter, new_key
from kvabr.store.local import LocalStore
from kvabr.store.locations import open_store
from kvabr.store.names import group_name
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


def news(group, key="0" * 16, names=("FP16", "Int4"), rest_s=None):
    data = {name: frame(group, name) for name in names}
    frames = {name: (len(one), hashlib.sha256(one).hexdigest()) for name, one in data.items()}
    return PublishedFrames(key, group, float(group), frames, rest_s)


def publish(writer, group, key, names=("FP16", "Int4"), rest_s=None):
    message = news(group, key, names, rest_s)
    for name, (_, digest) in message.frames.items():
        writer.frame(group, name, frame(group, name), digest)
    writer.announce(message)
    return message


def written(root):
    return LiveWriter(LocalStore(root), None)


def followed(root):
    """Follow the only production in a store."""
    (path,) = live_folders(root)
    return LiveFollower(LocalStore(root), path.name)


def opened(follower, group, track, size=None):
    data = frame(group, track)
    return follower.open_frame(len(data) if size is None else size, hashlib.sha256(data).hexdigest())


def test_a_follower_sees_what_is_published_and_reads_it_also_when_it_is_complete(tmp_path):
    key = new_key()
    with written(tmp_path) as writer:
        assert live_folders(tmp_path) == []
        writer.begin_live(live(key))
        follower = followed(tmp_path)
        assert follower.live == live(key)
        assert follower.read() == []
        assert follower.has_writer()
        told = [publish(writer, 0, key)]
        assert follower.read() == told
        reader = opened(follower, 0, "FP16")
        assert bytes(reader.read(0, SIZE)) == frame(0, "FP16")
        told = [publish(writer, group, key) for group in (1, 2)]
        writer.commit(final())
        writer.announce(LiveEnd(key))
        assert follower.read() == [*told, LiveEnd(key)]
        late = opened(follower, 2, "Int4")
        assert bytes(late.read(0, late.size)) == frame(2, "Int4")
        for one in (reader, late):
            one.close()
        assert follower.is_partial
    assert not follower.is_partial
    assert follower.is_published(GROUPS)
    asset = open_store(tmp_path).open()
    asset.check_parts()
    asset.check_frames()
    assert asset.catalog == final()
    assert live_folders(tmp_path) == []


@pytest.mark.parametrize(("limit", "value"), [("BATCH_MESSAGES", 2), ("BATCH_BYTES", 300)])
def test_a_follower_reads_a_few_messages_at_a_time(tmp_path, monkeypatch, limit, value):
    """A server reads them in its loop, and a producer may have left any number."""
    monkeypatch.setattr(store_live, limit, value)
    with written(tmp_path) as writer:
        writer.begin_live(live(key := new_key()))
        follower = followed(tmp_path)
        told = [publish(writer, group, key) for group in range(GROUPS)]
        assert [follower.read() for _ in range(3)] == [told[:2], told[2:], []]


def test_a_producer_that_fails_leaves_a_shorter_asset(tmp_path):
    key = new_key()
    with written(tmp_path) as writer:
        writer.begin_live(live(key))
        publish(writer, 0, key)
        publish(writer, 1, key)
        writer.announce(LiveEnd(key, "the engine ran out of memory"))
        writer.commit(final(2))
    assert [*open_store(tmp_path).list()] == [OFFER.chunks[1]]
    open_store(tmp_path).open().check_parts()


def test_what_a_producer_discards_stays_if_another_asset_may_name_it(tmp_path):
    key = new_key()
    with written(tmp_path) as writer:
        writer.begin_live(live(key))
        for group in range(GROUPS):
            publish(writer, group, key)
        writer.commit(final())
    with written(tmp_path) as writer:
        writer.begin_live(live(new_key()))
        for data in (frame(0, "FP16"), b"of this producer alone"):
            digest = hashlib.sha256(data).hexdigest()
            writer.frame(0, "FP16", data, digest)
            writer.discard(0, "FP16")
    assert not (tmp_path / group_name(digest)).exists()
    open_store(tmp_path).open().check_parts()


def test_a_producer_that_is_left_in_the_middle_leaves_nothing(tmp_path):
    with written(tmp_path / "new") as writer:
        writer.begin_live(live(key := new_key()))
        publish(writer, 0, key)
    assert not (tmp_path / "new").exists()


def test_a_pipe_in_place_of_the_live_catalog_is_not_opened(tmp_path):
    with written(tmp_path) as writer:
        writer.begin_live(live(new_key()))
        follower = followed(tmp_path)
        place = live_folders(tmp_path)[0] / LIVE_NAME
        place.unlink()
        os.mkfifo(place)
        with place.open("r+b", buffering=0) as pipe:  # with a writer, so that opening it would not wait
            fcntl.flock(pipe, fcntl.LOCK_EX)
            assert not follower.has_writer()


KILLED = """
import sys
from pathlib import Path
from tests.store.test_live import live, new_key, publish, written
with written(Path(sys.argv[1])) as writer:
    writer.begin_live(live(key := new_key()))
    publish(writer, 0, key)
    publish(writer, 1, key)
    print("published", flush=True)
    sys.stdin.read()
"""


def test_what_is_damaged_is_refused(tmp_path):
    key = new_key()
    with written(tmp_path) as writer:
        writer.begin_live(live(key))
        publish(writer, 0, key)
        (path,) = live_folders(tmp_path)
        follower = followed(tmp_path)
        with pytest.raises(AssetError):
            opened(follower, 0, "FP16", SIZE + 1)
        with pytest.raises(AssetError):
            opened(follower, 1, "FP16")
        (path / "0").write_bytes(b"nonsense")
        with pytest.raises(FormatError):
            followed(tmp_path).read()
        (path / "0").unlink()
        (path / "0").symlink_to("/etc/passwd")
        with pytest.raises(AssetError):
            followed(tmp_path).read()
        (path / LIVE_NAME).write_text("{}")
        with pytest.raises(FormatError):
            followed(tmp_path)
        (path / LIVE_NAME).write_text(live(new_key()).dumps())  # of another production
        with pytest.raises(FormatError):
            followed(tmp_path)
    with pytest.raises(AssetError):
        LiveFollower(LocalStore(tmp_path), key)
