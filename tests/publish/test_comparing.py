"""Tracks of one asset are compared with each other: what is sound passes, another cache's track is damage."""

from __future__ import annotations

import pytest

from kvabr.cli.main import main
from kvabr.data import default_catalog
from kvabr.publish.comparing import compare_tracks
from kvabr.publish.offer import TrackOffer
from kvabr.publish.publisher import Publisher
from kvabr.store.locations import open_asset, open_store
from kvabr.types.errors import FormatError
from kvabr.types.naming import chain
from kvabr.types.passage import PassageNotes
from tests import kvdata
from tests.client.classes import HYBRID, numbers
from tests.toymodel import SPEC

TOKENS = list(range(40))
KV = kvdata.related(SPEC, 40)
TRACKS = ("Raw", "FP16", "BF16", "FP8", "Int8", "Int4")


def published(root, spec=SPEC, kv=KV, notes=None, tokens=TOKENS, **options):
    made, outcomes = Publisher(root, spec, prior=default_catalog(), tracks=TRACKS, **options), []
    slot = made.reserve(tokens) if notes is None else made.reserve_passage(tokens, notes)
    slot.fill(kv, outcomes.append)
    made.close()
    assert outcomes[0].verdict == "published", outcomes[0].why
    return open_asset(root / slot.chunks[-1])


def test_sound_assets_pass(tmp_path):
    asset = published(tmp_path / "plain")
    assert {track.name for track in asset.catalog.tracks} == set(TRACKS)
    compare_tracks(asset)
    compare_tracks(published(tmp_path / "passage", notes=PassageNotes("alone")))
    compare_tracks(published(tmp_path / "layers", profile=kvdata.profile(SPEC)))
    tokens = list(range(64))
    compare_tracks(published(tmp_path / "classes", HYBRID, tuple(numbers(HYBRID, tokens)), tokens=tokens))


@pytest.mark.parametrize("track", ["FP8", "Int8", "Int4"])
def test_a_track_of_another_cache_is_found_by_a_deep_check(tmp_path, capsys, track):
    offer = TrackOffer(SPEC, prior=default_catalog(), tracks=("FP16", track), profile=None, source="a test")
    chunks = chain(TOKENS, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens)
    with open_store(tmp_path).writer(chunks[-1]) as writer:
        frames = offer.encoder(chunks, len(TOKENS), writer)
        for group, unit in enumerate(frames.units):
            kv = KV[:, :, :, unit.first : unit.first + unit.tokens]
            frames.group(group, kv).encode("FP16")
            frames.group(group, 2 * kv if group == 1 else kv).encode(track)
        writer.commit(offer.catalog(frames))
    asset = open_asset(tmp_path / chunks[-1])
    asset.check_frames()
    with pytest.raises(FormatError, match=f"group 1 of {track}"):
        compare_tracks(asset)
    assert main(["store", "verify", str(tmp_path)]) == 0
    assert main(["store", "verify", str(tmp_path), "--deep"]) == 1
    assert f"{chunks[-1]}: group 1 of {track}" in capsys.readouterr().out
