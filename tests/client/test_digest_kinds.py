"""Assets whose groups have BLAKE3 digests: published, served, played and kept; or computed, but never believed."""

import sys
from functools import partial

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits
from kvabr.client.result import Played
from kvabr.codec.base import GroupContext
from kvabr.codec.group import decode_group
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types import digests
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, PlayError
from tests.client.playing import play
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

TOKENS = prompt(70).tokens
COST = PrefillCost(0.001, 0.001)


@pytest.fixture
def asset(tmp_path):
    return toy_asset(tmp_path / "asset", ("FP16", "Int4"), digest="blake3")


@pytest.fixture
def connect(asset):
    library = PublishedAssets(asset.store.folder)
    return lambda: MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e8, 0.02))


@virtual
async def test_a_play_and_the_same_again_from_the_store(connect, tmp_path):
    limits = Limits(disk=tmp_path / "kept", disk_bytes=1 << 20)
    async with AsyncClient(link := connect(), limits=limits) as client:
        first = await play(client, TOKENS, deadline=2.0, spec=SPEC)
        assert isinstance(first, Played)
        assert None not in first.coverage
        came = link.stats().bytes_received
        again = await play(client, TOKENS, deadline=2.0, spec=SPEC)
        assert again.kv.equal(first.kv)
    kept = sorted(path.name for path in (tmp_path / "kept").glob("g/*"))
    assert len(kept) >= 5
    assert all(name.startswith("b3-") for name in kept)
    async with AsyncClient(link := connect(), limits=limits) as client:
        third = await play(client, TOKENS, deadline=2.0, spec=SPEC)
        assert third.kv.equal(first.kv)
        assert link.stats().bytes_received < came  # a new process found them on the disk


@virtual
async def test_without_the_package_the_prompt_is_computed(connect, monkeypatch):
    digests._hasher.cache_clear()
    monkeypatch.setitem(sys.modules, "blake3", None)
    try:
        async with connect() as link:
            played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=COST)
        assert set(played.coverage) == {"recomputed"}
        async with connect() as link:
            with pytest.raises(PlayError, match=r"cannot be played: .*'\.\[fast\]'"):
                await play(link, TOKENS, deadline=2.0, spec=SPEC)
    finally:
        digests._hasher.cache_clear()


def test_a_damaged_frame_is_refused(asset):
    frame = bytearray(asset.frame(0, "Int4"))
    frame[-1] ^= 1
    with pytest.raises(FormatError, match="checksum"):
        _decode(asset, bytes(frame))
    with pytest.raises(FormatError, match="its BLAKE3 is not the one in the catalog"):
        _decode(asset, asset.frame(0, "Int4"), digests.unknown("blake3"))


def _decode(asset, frame, digest=None):
    catalog = asset.catalog
    out = ToyModel().prefill(TOKENS[:16])
    context = GroupContext(catalog.spec, 0, 16)
    digest = digest or catalog.track("Int4").digests[0]
    decode_group(frame, "Int4", context, catalog.chunks[0], 0, out, digest=digest)
