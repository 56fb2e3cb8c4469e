"""The group size comes from the spec everywhere: no part of the project assumes 128 tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kvabr.publish.encoder import publish
from kvabr.publish.frames import MemoryFrames
from kvabr.replay.verify import FetchStep, verify_play
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_asset, open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError
from tests.client.playing import play
from tests.memory_transport import MemoryConnection
from tests.toymodel import ToyModel, prompt

TOKENS = 300


@pytest.mark.slow
@pytest.mark.parametrize(("group_tokens", "groups"), [(64, 5), (256, 2)])
async def test_an_asset_is_encoded_served_played_and_verified(tmp_path, group_tokens, groups):
    model, made = ToyModel(), prompt(TOKENS)
    with open_store(tmp_path / "asset").writer() as writer:
        catalog = publish(model, made, ("FP16", "Int8", "AC-5x"), None, writer, group_tokens=group_tokens)
        writer.prompt(made)
        writer.commit(catalog)
    assert (catalog.groups, catalog.spec.group_tokens, len(catalog.chunks)) == (groups, group_tokens, groups)
    asset = open_asset(tmp_path / "asset")
    packed = tuple(replace(track, packs=()) for track in asset.catalog.tracks)
    assert replace(asset.catalog, tracks=packed) == catalog
    catalog = asset.catalog
    async with MemoryConnection(partial(PublishedAssets(tmp_path).find, EVERYTHING)) as link:
        played = await play(link, made.tokens, deadline=120.0, spec=catalog.spec, policy="fixed:FP16")
        more = {"engine": model, "prefill_cost": PrefillCost.from_rate(100.0)}
        with_engine = await play(link, made.tokens, deadline=120.0, spec=catalog.spec, **more)
    assert played.coverage == ("FP16",) * groups
    assert (with_engine.tokens, with_engine.catalog) == (TOKENS, catalog)
    exact = model.prefill(made.tokens)
    assert torch.allclose(played.kv.float(), exact, atol=2e-3 * float(exact.abs().max()))
    for track in catalog.tracks:
        verified = verify_play(asset, model, [FetchStep(group, track.name) for group in range(groups)])
        assert verified.kl == pytest.approx(track.measured.kl, rel=1e-4, abs=1e-12)


def test_a_group_has_at_least_one_token():
    with pytest.raises(FormatError, match="group_tokens is 0"):
        publish(ToyModel(), prompt(), ("FP16",), None, MemoryFrames(), group_tokens=0)
