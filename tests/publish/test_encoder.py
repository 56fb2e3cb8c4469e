"""Publishing a cache with the toy model: the catalog agrees with the frames, and with the model's measurements."""

import hashlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvabr.codec.fit import fit
from kvabr.codec.profile import Profile
from kvabr.player.assembler import Assembler
from kvabr.publish.encoder import ordered_tracks, publish
from kvabr.publish.frames import MemoryFrames
from kvabr.publish.reference import Reference
from kvabr.replay.verify import FetchStep, verify_play
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_asset, open_store
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ForeignError, FormatError, NotFiniteError, UsageError
from kvabr.types.loss import predicted_loss
from kvabr.types.naming import chain
from kvabr.types.passage import passage_chain
from tests import kvdata
from tests.client.playing import play
from tests.memory_transport import MemoryConnection
from tests.toymodel import SPEC, ToyModel, prompt, toy_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made():
    kept = MemoryFrames()
    seen = []
    catalog = publish(
        ToyModel(), prompt(), ("FP16", "Int8", "FP4", "Int4"), None, kept, source="a test",
        progress=lambda stage, done, total: seen.append((stage, done, total)),
    )  # fmt: skip
    return catalog, kept.frames, seen


def test_sizes_and_digests_are_those_of_the_frames(made):
    catalog, kept, _ = made
    assert len(kept) == 5 * 4
    for track in catalog.tracks:
        for group in range(5):
            frame = kept[group, track.name]
            assert (len(frame), hashlib.sha256(frame).hexdigest()) == (track.bytes[group], track.digests[group])
    assert catalog.chunks == tuple(
        chain(prompt().tokens, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens)
    )
    assert catalog.namespace.prompt == catalog.chunks[-1]
    assert (catalog.tokens, catalog.source, catalog.profile) == (70, "a test", None)


def test_losses_add_up_to_what_was_measured(made):
    for track in made[0].tracks:
        assert sum(track.loss) == pytest.approx(track.measured.loss, rel=1e-4)
        assert track.decode_s > 0
    kl = {track.name: track.measured.kl for track in made[0].tracks}
    assert kl["FP16"] < kl["Int8"] < kl["Int4"]


def test_mixes_are_predicted_within_a_factor_two(made):
    mixes = made[0].mixes
    assert len(mixes) >= 6
    assert sum(RECOMPUTED in mix.tracks for mix in mixes) >= 3
    for mix in mixes:
        assert len(set(mix.tracks)) > 1
        assert 0.5 < mix.predicted / mix.measured < 2.0, mix
        assert mix.predicted == pytest.approx(predicted_loss(made[0], mix.tracks), rel=1e-4)


def test_progress_reaches_the_end_of_every_stage(made):
    ends = {stage: (done, total) for stage, done, total in made[2]}
    assert list(ends) == ["prefill", "encode", "time", "measure", "groups", "mix"]
    assert all(done == total for done, total in ends.values())
    assert ends["prefill"][1] == 70


def test_without_a_profile_one_is_made_of_the_asset_and_published_with_it():
    kept = MemoryFrames()
    catalog = publish(ToyModel(), prompt(), ("FP16", "AC-L0", "AC-L1", "AC-5x"), None, kept)
    profile = Profile.from_bytes(kept.profile_data)
    assert (catalog.profile, catalog.profile_bytes) == (profile.digest, len(kept.profile_data))
    profile.check(catalog.spec)
    sizes = [catalog.track(name).total_bytes for name in ("FP16", "AC-L1", "AC-5x")]
    assert sizes[0] > 2 * sizes[2]
    assert catalog.track("AC-5x").measured.kl < 0.1
    assert catalog.track("AC-L1").measured.kl < catalog.track("AC-L0").measured.kl


class Wild(ToyModel):
    value = 0.0

    def prefill(self, tokens, before=None):
        kv = super().prefill(tokens, before)
        if before is None and len(tokens) > 20:
            kv[0, 1, 0, 20, 3] = self.value
        return kv


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_cache_that_is_not_finite_is_refused_before_anything_is_written(value):
    model, frames = Wild(), MemoryFrames()
    model.value = value
    with pytest.raises(NotFiniteError) as refused:
        publish(model, prompt(), ("BF16", "AC-5x"), None, frames)
    assert (refused.value.layer, refused.value.half, refused.value.first, refused.value.last) == (0, "values", 20, 20)
    assert not frames.frames
    assert frames.profile_data is None


def test_tracks_that_cannot_hold_a_number_are_left_out():
    model, told = Wild(), []
    model.value = 1e9
    catalog = publish(model, prompt(), ("FP16", "BF16", "Int8", "AC-L0"), None, MemoryFrames(), notify=told.append)
    assert [track.name for track in catalog.tracks] == ["BF16"]
    assert any("FP16, Int8, AC-L0" in line for line in told)
    with pytest.raises(FormatError):
        publish(model, prompt(), ("FP16", "AC-L0"), None, MemoryFrames())


def test_a_profile_of_another_model_is_refused_before_the_work():
    model = ToyModel()
    with pytest.raises(ForeignError, match="calibrated for"):
        publish(model, prompt(), ("AC-5x",), kvdata.profile(kvdata.spec(heads=3)), MemoryFrames())
    assert model.prefilled == 0


def test_the_profile_is_named_only_if_a_track_needs_it():
    cache = ToyModel().prefill(prompt(200).tokens)
    profile = fit(SPEC, lambda: iter([cache]))
    with_it = publish(ToyModel(), prompt(), ("Int4", "AC-5x"), profile, MemoryFrames())
    without = publish(ToyModel(), prompt(), ("Int4",), profile, MemoryFrames())
    assert (with_it.profile, with_it.profile_bytes) == (profile.digest, len(profile.to_bytes()))
    assert (without.profile, without.profile_bytes) == (None, 0)


def test_which_tracks():
    assert ordered_tracks(["Int4", "FP16"]) == ("Int4", "FP16")
    assert len(ordered_tracks(None)) >= 7
    with pytest.raises(FormatError, match="no codec for track 'Int2'"):
        ordered_tracks(["Int2"])
    with pytest.raises(UsageError, match="only once"):
        ordered_tracks(["Int4", "Int4"])
    with pytest.raises(UsageError, match="at least one"):
        ordered_tracks([])


def test_a_passage_is_published_as_it_is_long_and_measured_behind_a_neutral_text():
    model, made, kept = ToyModel(), prompt(), MemoryFrames()
    base = toy_base(made.tokens)
    tracks = ("FP16", "Int4", "AC-L0", "AC-L1")
    catalog = publish(model, made, tracks, None, kept, passage=base)
    assert Catalog.loads(catalog.dumps()) == catalog
    assert catalog.passage == base.notes
    assert catalog.position == 0
    assert catalog.chunks == tuple(
        passage_chain(made.tokens, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=16)
    )
    assert [catalog.group_tokens(group) for group in range(catalog.groups)] == [16] * 4 + [6]
    exact = base.at(3, SPEC)
    reference = Reference(model, torch.cat((base.before, exact), dim=3), made.continuation)
    profile = Profile.from_bytes(kept.profile_data)
    for track in tracks:
        play = Assembler(catalog.at(3), profile, dtype=torch.float32)
        for group in range(catalog.groups):
            for each in ("AC-L0", "AC-L1") if track == "AC-L1" else (track,):
                play.put(group, each, kept.frames[group, each])
        quality = reference.measure(torch.cat((base.before, play.take()), dim=3))
        assert catalog.track(track).measured.kl == pytest.approx(quality.kl, rel=1e-3, abs=1e-9)
    assert catalog.track("AC-L1").measured.kl < catalog.track("AC-L0").measured.kl


def test_a_model_whose_keys_cannot_be_moved_has_no_passages():
    model = ToyModel(SPEC.changed(rope=None))
    with pytest.raises(FormatError, match="rotated"):
        publish(model, prompt(), ("FP16",), None, MemoryFrames(), passage=toy_base(prompt().tokens))


def test_a_passages_cache_must_be_that_of_its_tokens():
    with pytest.raises(UsageError, match="got 40 and 70"):
        publish(ToyModel(), prompt(40), ("FP16",), None, MemoryFrames(), passage=toy_base(prompt().tokens))


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
    with pytest.raises(FormatError, match="group_tokens must be"):
        publish(ToyModel(), prompt(), ("FP16",), None, MemoryFrames(), group_tokens=0)
