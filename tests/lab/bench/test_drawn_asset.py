"""A drawn asset plays like a real one, and no two of its groups are alike."""

import torch

from kvabr.codec.profile import Profile
from kvabr.player.assembler import Assembler
from kvabr.store.locations import open_asset
from kvabr_lab.bench.coder_speed import CacheShape
from kvabr_lab.bench.drawn_asset import draw_asset, drawn_spec

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
