"""What an origin serves: the asset's own bytes, cut into objects that a receiver can put together."""

import hashlib
import os
import shutil

import pytest
import torch

from kvabr.codec.base import payload_layout
from kvabr.player.assembler import Assembler
from kvabr.publish.frames import FrameEncoder
from kvabr.server.publication import LevelPublication
from kvabr.store.locations import open_asset, open_store
from kvabr.types.catalog import Catalog, Track
from kvabr.types.errors import AssetError
from kvabr.types.naming import TrackNamespace, chain
from tests.assets import frame_file
from tests.kvdata import cache, spec

TRACKS = ("FP16", "FP8", "Int8", "FP4", "Int4")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two groups of a model as large as SmolLM2, the second one short; what they cost is not measured."""
    shape, tokens = spec(30, 3, 64), 170
    kv = cache(shape, tokens)
    chunks = chain(range(tokens), model=shape.model, tokenizer=shape.tokenizer)
    path = tmp_path_factory.mktemp("wide") / "asset"
    with open_store(path).writer(live=True) as writer:
        frames = FrameEncoder(shape, chunks, tokens, TRACKS, None, writer)
        frames.encode((kv,))
        tracks = [Track(name, tuple(frames.bytes[name]), (0.1, 0.1), tuple(frames.digests[name])) for name in TRACKS]
        writer.commit(Catalog(TrackNamespace(shape.model, chunks[-1]), shape, tokens, tuple(chunks), tuple(tracks)))
    return open_asset(path)


@pytest.fixture
def asset(pristine, tmp_path):
    shutil.copytree(pristine.store.folder, tmp_path / "copy")
    return open_asset(tmp_path / "copy")


@pytest.mark.parametrize("track", TRACKS)
def test_the_objects_end_to_end_are_the_frame(pristine, track):
    level = LevelPublication(pristine, track)
    offer, shape = pristine.catalog.track(track), pristine.catalog.spec
    assembler = Assembler(pristine.catalog)
    assert level.groups == pristine.catalog.groups
    for group in range(level.groups):
        found = level.open(group)
        assert level.size(group) == found.size == offer.bytes[group]
        frame = b"".join(found.read(span.begin, span.end) for span in found.objects)
        assert frame == frame_file(pristine.store.folder, group, track).read_bytes()
        assert found.digest == hashlib.sha256(frame).hexdigest()
        first, last = shape.group_range(group, pristine.catalog.tokens)
        ids = [span.object_id for span in found.objects]
        assert len(ids) > 1
        assert ids[0] == first
        assert all(first < one < last for one in ids[1:])
        unit = payload_layout(track, shape, last - first).unit_tokens
        assert all((one - first) % unit == 0 for one in ids)
        assembler.put(group, track, frame)
    assert bool(torch.isfinite(assembler.take()).all())


def test_a_file_that_is_cut_short_while_it_is_sent(asset):
    """Were it mapped into memory, reading it would end the process."""
    found = LevelPublication(asset, "FP16").open(0)
    assert found.read(0, 1000)
    os.truncate(frame_file(asset.store.folder, 0, "FP16"), 5000)
    assert len(found.read(1000, 5000)) == 4000
    with pytest.raises(AssetError, match="has become shorter than 5001 bytes"):
        found.read(1000, 5001)
    found.close()


@pytest.mark.parametrize("place", ["frame", "folder"])
def test_a_link_is_not_followed(asset, tmp_path, place):
    """Not even one that took a good file's place after the asset was looked at."""
    level = LevelPublication(asset, "Int4")
    path = frame_file(asset.store.folder, 1, "Int4")
    path = path if place == "frame" else path.parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AssetError, match="cannot be read"):
        level.open(1)
