"""What an engine computed is published in the background, as an asset like any other."""

import threading
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from kvabr.codec.group import encode_payload, payload_of
from kvabr.data import default_catalog
from kvabr.player.assembler import Assembler
from kvabr.publish.live_publisher import LivePublisher
from kvabr.publish.published_lookup import PublishedLookup
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot
from kvabr.replay.verify import load_profile
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_asset, open_store
from kvabr.telemetry.kv_events.announced import prompt_of
from kvabr.types.errors import AssetError, ForeignError, TransportError, UsageError
from kvabr.types.media import MediaTokens, Medium
from kvabr.types.naming import LAYERS, chain
from tests import kvdata
from tests.store.publishing import outcome_of, publisher
from tests.toymodel import SPEC, prompt

TOKENS = list(range(48))
KV = kvdata.related(SPEC, 48)


def publish(made, tokens=TOKENS, kv=KV):
    slot = made.reserve(tokens)
    return outcome_of(made, slot, kv) if isinstance(slot, Slot) else slot


def test_an_asset_that_an_origin_serves_and_a_player_decodes(tmp_path):
    outcome = publish(publisher(tmp_path))
    assert isinstance(outcome, PublishOutcome)
    assert outcome.verdict == "published"
    assert PublishedAssets(tmp_path).assets[0].catalog.tokens == 48
    name = chain(TOKENS, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=16)[-1]
    asset = open_asset(tmp_path / name)
    assert [track.name for track in asset.catalog.tracks] == ["FP16", "Int8", "Int4"]
    assert outcome.bytes == sum(track.total_bytes for track in asset.catalog.tracks)
    assembler = Assembler(asset.catalog, dtype=torch.float32)
    for group in range(3):
        assembler.put(group, "FP16", asset.frame(group, "FP16"))
    assert torch.allclose(assembler.take(), KV, rtol=1e-3, atol=1e-3)


def test_token_ids_are_kept_only_if_wanted_and_only_of_prompts_that_they_name_alone(tmp_path):
    publish(publisher(tmp_path / "plain"))
    publish(publisher(tmp_path / "kept", keep_tokens=True))
    salted = publisher(tmp_path / "salted", keep_tokens=True)
    slot = salted.reserve(TOKENS, b"a tenant")
    slot.fill(KV, lambda _: None)
    for tokens, model in ((TOKENS, "adapted"), (MediaTokens(TOKENS, [Medium(3, 5, "ab" * 32)]), None)):
        other = salted.reserve(tokens, model=model)
        assert other.prompt is None
        other.leave()
    salted.close()
    live = publisher(tmp_path / "live", keep_tokens=True)
    growing = LivePublisher(live).begin(TOKENS, pace=[1.0, 2.0, 3.0], done=lambda _: None)
    growing.groups(0, KV)
    growing.end()
    live.close()
    found = {name: PublishedAssets(tmp_path / name).assets[0] for name in ("plain", "kept", "salted", "live")}
    assert {name for name, asset in found.items() if asset.has_prompt()} == {"kept", "live"}
    for name in ("kept", "live"):
        told = prompt_of(found[name])
        assert list(told.tokens) == TOKENS
        assert (tmp_path / name / "private" / found[name].name).stat().st_mode & 0o077 == 0


def test_a_piece_of_a_prompt_has_the_layers_of_its_place(tmp_path):
    """A group is coded as in the whole prompt, and a player decodes it by the position in the catalog."""
    side = kvdata.profile(SPEC)
    publish(publisher(tmp_path / "whole", profile=side))
    whole = PublishedAssets(tmp_path / "whole").assets[0]
    assert whole.catalog.position == 0
    made, outcomes = publisher(tmp_path / "piece", profile=side), []
    made.reserve_named(["ab" * 32, "cd" * 32], 32, 16).fill(KV[:, :, :, 16:], outcomes.append)
    made.close()
    (piece,) = PublishedAssets(tmp_path / "piece").assets
    assert piece.catalog.position == 16
    assert [track.name for track in piece.catalog.tracks] == ["FP16", "Int8", "Int4", *LAYERS]
    caches = []
    for asset, groups in ((whole, 3), (piece, 2)):
        assembler = Assembler(asset.catalog, side, dtype=torch.float32)
        for group in range(groups):
            for track in LAYERS:
                assembler.put(group, track, asset.frame(group, track))
        caches.append(assembler.take())
    for group in range(2):
        for track in LAYERS:
            assert payload_of(piece.frame(group, track)) == payload_of(whole.frame(group + 1, track))
    assert torch.equal(caches[1], caches[0][:, :, :, 16:])
    with pytest.raises(ForeignError, match="first token"):
        Assembler(replace(piece.catalog, position=0), side).put(0, "AC-L0", piece.frame(0, "AC-L0"))


def test_without_a_position_there_are_no_layers(tmp_path):
    made, outcomes = publisher(tmp_path, profile=kvdata.profile(SPEC)), []
    made.reserve_named(["ab" * 32], 16, None).fill(KV[:, :, :, 16:32], outcomes.append)
    made.close()
    (asset,) = PublishedAssets(tmp_path).assets
    assert [track.name for track in asset.catalog.tracks] == ["FP16", "Int8", "Int4"]
    assert (asset.catalog.profile, asset.catalog.position) == (None, 0)


@pytest.mark.parametrize("groups", [1, 2, 3, 16])
def test_no_layer_is_said_to_make_a_group_worse(tmp_path, groups):
    """However the losses of each are laid out: a layer that betters nothing would not be put in place."""
    tokens = [index % 90 for index in range(16 * groups)]
    made = publisher(tmp_path, profile=kvdata.profile(SPEC), tracks=LAYERS)
    publish(made, tokens, kvdata.related(SPEC, len(tokens)))
    (asset,) = PublishedAssets(tmp_path).assets
    assembler = Assembler(asset.catalog, load_profile(asset))
    for group in range(groups):
        for track in LAYERS:
            assembler.put(group, track, asset.frame(group, track))
    assert assembler.coverage == ("AC-L3",) * groups


def test_what_finds_no_room_is_refused_at_once(tmp_path):
    made = publisher(tmp_path, queue=1)
    slot = made.reserve(TOKENS)
    assert isinstance(slot, Slot)
    assert made.reserve(TOKENS) == "known"
    assert made.reserve(TOKENS[1:]) == "full"
    slot.leave()
    other = made.reserve(TOKENS[1:])
    assert isinstance(other, Slot)
    other.leave()
    made.close()
    assert made.reserve(TOKENS) == "full"


def test_a_cache_that_cannot_be_written_is_told_and_leaves_its_place(tmp_path):
    made = publisher(tmp_path / "assets", queue=1)
    (tmp_path / "assets").rmdir()
    (tmp_path / "assets").write_text("a file where the folder was")
    done = threading.Event()
    outcomes = []
    made.reserve(TOKENS).fill(KV, lambda outcome: (outcomes.append(outcome), done.set()))
    assert done.wait(300)
    assert outcomes[0].verdict == "failed"
    assert "assets" in outcomes[0].why
    assert isinstance(made.reserve(TOKENS), Slot)


def test_a_folder_that_cannot_be_looked_at_is_not_the_engines_trouble(tmp_path):
    # A name that is too long: what no user may look at, root as well.
    (tmp_path / "a").mkdir()
    made = publisher(tmp_path)
    assert made.reserve_named(["f" * 300], 64) == "failed"
    made.close()


def test_a_cache_of_another_shape_is_refused(tmp_path):
    outcome = publish(publisher(tmp_path), kv=KV[:, :, :1])
    assert outcome.verdict == "failed"
    assert "cannot encode" in outcome.why
    assert not list(tmp_path.iterdir())


def test_tracks_that_cannot_be_made(tmp_path):
    with pytest.raises(UsageError, match="codec profile"):
        publisher(tmp_path, tracks=["AC-L0"])
    with pytest.raises(UsageError, match=r"the loss of track .* is unknown"):
        publisher(tmp_path, tracks=["FP4"])


def test_a_conversation_that_goes_on_is_encoded_once(tmp_path, monkeypatch):
    encoded = []
    monkeypatch.setattr("kvabr.publish.frames.encode_payload", partial(noted, encoded))
    kv, tokens = kvdata.related(SPEC, 128), list(range(128))
    made = publisher(tmp_path, tracks=("FP16", "Int4"))
    forked = [*tokens[:64], *reversed(tokens[:16])]
    for turn, own in ((tokens[:32], 2), (tokens[:64], 2), (tokens[:128], 4), (forked, 1)):
        encoded.clear()
        outcomes = SimpleQueue()
        made.reserve(turn).fill(kv[:, :, :, : len(turn)].contiguous(), outcomes.put)
        assert outcomes.get(timeout=60).tokens == len(turn)
        assert len(encoded) == 2 * own
    assert made.reserve(tokens[:64]) == "known"  # the longer one has it
    made.close()
    assets = PublishedAssets(tmp_path).assets
    assert sorted(asset.catalog.tokens for asset in assets) == [32, 64, 80, 128]
    for asset in assets:
        asset.check_frames()
    assert len({asset.catalog.track("Int4").digests[:2] for asset in assets}) == 1


def turn(made, tokens, kv):
    """Publish a prompt, and wait for it."""
    outcomes = SimpleQueue()
    made.reserve(tokens).fill(kv, outcomes.put)
    outcome = outcomes.get(timeout=60)
    assert outcome.verdict == "published", outcome.why


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_what_is_not_sound_is_encoded_again(tmp_path, damage):
    kv = kvdata.related(SPEC, 64)
    made = publisher(tmp_path, tracks=("FP16",))
    outcomes = SimpleQueue()
    made.reserve(list(range(32))).fill(kv[:, :, :, :32].contiguous(), outcomes.put)
    outcomes.get(timeout=60)
    (frame,) = (tmp_path / "g").iterdir()
    frame.unlink() if damage == "gone" else frame.write_bytes(frame.read_bytes()[:-1] + b"?")
    made.reserve(list(range(64))).fill(kv, outcomes.put)
    assert outcomes.get(timeout=60).verdict == "published"
    made.close()
    longer = max(PublishedAssets(tmp_path).assets, key=lambda asset: asset.catalog.tokens)
    longer.check_frames()
    assert longer.catalog.tokens == 64


def noted(calls, *args, work=encode_payload):
    """Encode, and note that it was done."""
    calls.append(args[1])
    return work(*args)


LONG_S = 300.0


def nothing(_name):
    return None


def test_answers_are_passed_on_and_what_is_there_is_touched():
    touched = threading.Event()
    lookup = PublishedLookup({"a": True, "b": False}.__getitem__, lambda _name: touched.set(), wait_s=LONG_S)
    assert lookup.exists("b") is False
    assert not touched.is_set()
    assert lookup.exists("a") is True
    assert touched.wait(LONG_S)


def test_a_silent_store_is_left_alone_until_it_has_answered():
    asked, answers = [], threading.Event()

    def published(name):
        asked.append(name)
        answers.wait(LONG_S)
        return True

    lookup = PublishedLookup(published, nothing, wait_s=0.01, pause_s=0.0)
    assert [lookup.exists(name) for name in "abc"] == [None, None, None]
    assert asked == ["a"]
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "kvabr-lookup":
            thread.join(LONG_S)
    lookup.exists("d")  # in time or not
    assert "d" in asked


def test_a_store_that_fails_is_left_alone_for_a_while():
    asked = []

    def published(name):
        asked.append(name)
        raise AssetError("no")

    lookup = PublishedLookup(published, nothing, wait_s=LONG_S, pause_s=LONG_S)
    assert [lookup.exists(name) for name in "abc"] == [None, None, None]
    assert asked == ["a"]


@pytest.mark.process
def test_an_engine_starts_although_its_store_is_out_of_reach(monkeypatch, caplog):
    pytest.importorskip("obstore", reason="obstore is not installed: tools/setup-venv")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    place = "s3://bucket/x?endpoint=http://127.0.0.1:9"
    with pytest.raises(AssetError, match="cannot be reached") as caught:
        open_store(place, create=True)
    assert isinstance(caught.value.__cause__, TransportError)
    publisher = Publisher(place, SPEC, prior=default_catalog(), tracks=("FP16",))
    assert "cannot be reached (connection refused); publishing starts when the store answers" in caplog.text
    assert publisher.reserve(prompt(48).tokens) == "failed"
    publisher.close()
