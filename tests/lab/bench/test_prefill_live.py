"""Producer, origin, link and decoder as processes, with a tiny model; and an asset that is drawn instead."""

import asyncio
from statistics import fmean

import pytest
import torch

from kvabr.codec.profile import Profile
from kvabr.player.assembler import Assembler
from kvabr.store.locations import open_asset
from kvabr.types.errors import KvabrError
from kvabr_lab.bench.coder_speed import CacheShape
from kvabr_lab.bench.drawn_asset import draw_asset, drawn_spec
from kvabr_lab.bench.passage_reuse import NAMINGS, Collection, reuse
from kvabr_lab.bench.prefill_live import Decoder, Link, PrefillJob, PrefillProducer, run
from kvabr_lab.live.origin import LiveOrigin
from kvabr_lab.live.shaper import Shaper
from tests import tinymodels

IDS = tuple(index * 7 % 256 for index in range(600))


@pytest.mark.model
@pytest.mark.process
@pytest.mark.slow
def test_a_cache_is_played_while_another_process_computes_it(tmp_path):
    model, assets = tinymodels.save(tmp_path / "tiny"), tmp_path / "assets"
    assets.mkdir()
    with (
        PrefillProducer(str(model), assets, ("FP16", "Int4"), IDS[:200]) as producer,
        LiveOrigin(str(assets), "aioquic", follow=True) as origin,
        Shaper(origin.address) as shaper,
        Decoder(f"moqt://127.0.0.1:{shaper.address[1]}/", origin.fingerprint, "aioquic", producer.spec) as decoder,
    ):
        Link(50.0, 0.02).begin(shaper)
        for kind, tokens in (("live", IDS[1:513]), ("end", IDS[2:514])):
            prefill, (decoded,) = run(PrefillJob(tokens, kind, 128, 300.0), producer, [decoder])
            assert [done for done, _ in prefill.runs] == [128, 256, 384, 512]
            assert len(prefill.published_s) == len(prefill.whole_s) == (4 if kind == "live" else 0)
            assert all(base_s <= all_s for base_s, all_s in zip(prefill.published_s, prefill.whole_s, strict=True))
            assert 0 <= prefill.idle_s <= prefill.encoding_s
            assert len(decoded.coverage) == len(decoded.groups_s) == 4
            assert set(decoded.coverage) <= {"FP16", "Int4"}
            assert decoded.ready_s > prefill.ended_s
            assert decoded.bytes_fetched > 0
        prefill, played = run(PrefillJob(IDS[3:515], "alone"), producer, [decoder])
        assert played == []
        with pytest.raises(KvabrError, match="not published: known"):
            run(PrefillJob(IDS[1:513]), producer)


SHAPE = CacheShape("small", 4, 2, 16, 2, 2, 8)


def test_its_groups_decode_on_every_layer(tmp_path):
    tokens = list(range(3 * 128))
    draw_asset(tmp_path / "asset", SHAPE, tokens, bits=0.3, depths=3)
    asset = open_asset(str(tmp_path / "asset"))
    catalog = asset.catalog
    assert catalog.spec == drawn_spec(SHAPE)
    assert [track.name for track in catalog.tracks] == ["AC-L0", "AC-L1", "AC-L2"]
    assert len({digest for track in catalog.tracks for digest in track.digests}) == 9
    profile = Profile.from_bytes(asset.profile_bytes())
    assembler = Assembler(catalog, profile)
    for track in catalog.tracks:
        for group, size in enumerate(track.bytes):
            assembler.put(group, track.name, asset.open_frame(group, track.name).read(0, size))
    kv, _ = assembler.take_prefix()
    assert torch.isfinite(kv[0].float()).all()
    assert float(kv[0].float().std()) > 0


SMALL = Collection(documents=8, queries=24, each=3)


def test_documents_are_found_by_their_content_for_ever_and_not_so_by_prefixes():
    found = {naming: asyncio.run(reuse(SMALL, naming)) for naming in NAMINGS}
    assert found["content"] == [1.0] * 24
    assert found["both"][0] == 1.0
    assert fmean(found["both"][-8:]) < 0.8
    assert fmean(found["prefix"]) < 0.5
