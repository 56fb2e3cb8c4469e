"""A damaged asset is published again by whoever computes it again, whatever kind of store it is in."""

import secrets

import pytest

from kvabr.cli.main import main
from kvabr.data import default_catalog
from kvabr.publish.comparing import compare_tracks
from kvabr.publish.live_publisher import LivePublisher
from kvabr.publish.offer import TrackOffer
from kvabr.publish.publisher import Publisher, Slot
from kvabr.store.locations import open_asset, open_store
from kvabr.types.errors import FormatError
from kvabr.types.naming import chain
from kvabr.types.passage import PassageNotes
from tests import kvdata
from tests.assets import frame_file
from tests.client.classes import HYBRID, numbers
from tests.needs import ORDINARY_USER, may_read_everything
from tests.store.noise import objects, replace_object
from tests.store.publishing import outcome_of, publisher
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = list(prompt(48).tokens)
LONG_S = 300.0


def publish(place, **options):
    """Publish the prompt's cache; return what became of it, and the store's own name of the asset."""
    made = Publisher(place, SPEC, prior=default_catalog(), tracks=["FP16", "Int8"], **options)
    made._lookup._wait_s = made._lookup._check_s = LONG_S  # whatever this machine needs
    outcomes = []
    try:
        slot = made.reserve(TOKENS)
        if not isinstance(slot, Slot):
            return slot
        slot.fill(ToyModel().prefill(TOKENS), outcomes.append)
    finally:
        made.close()
    return outcomes[0].verdict


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


HARM = {
    "a damaged frame": lambda root: damage(frame_file(root, 1, "FP16")),
    "a lost frame": lambda root: frame_file(root, 1, "FP16").unlink(),
    "a lost page": lambda root: next((root / "i").iterdir()).unlink(),
    "a damaged catalog": lambda root: next((root / "a").iterdir()).write_bytes(bytes(300)),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_asset_of_a_folder_is_replaced(tmp_path, harm):
    root = tmp_path / "assets"
    assert [publish(root), publish(root)] == ["published", "known"]
    HARM[harm](root)
    assert [publish(root), publish(root)] == ["published", "known"]
    asset = open_store(root).open()
    asset.check_parts()
    asset.check_frames()


def test_an_asset_of_another_store_that_has_lost_a_frame_is_replaced():
    place = f"memory://{secrets.token_hex(6)}"
    assert [publish(place), publish(place)] == ["published", "known"]
    replace_object(place, objects(place, "g/")[0], None)
    assert [publish(place), publish(place)] == ["published", "known"]
    asset = open_store(place).open()
    asset.check_parts()
    asset.check_frames()


def test_a_damaged_asset_is_replaced_by_one_that_grows(tmp_path):
    root = tmp_path / "assets"
    assert publish(root) == "published"
    HARM["a damaged frame"](root)
    made = Publisher(root, SPEC, prior=default_catalog(), tracks=["FP16", "Int8"])
    made._lookup._wait_s = made._lookup._check_s = LONG_S
    live, outcomes = LivePublisher(made), []
    slot = live.begin(TOKENS, pace=[0.1] * SPEC.groups(len(TOKENS)), done=outcomes.append)
    assert not isinstance(slot, str)
    slot.groups(0, (ToyModel().prefill(TOKENS),))
    slot.end()
    live.close()
    assert outcomes[0].verdict == "published"
    assert publish(root) == "known"


@pytest.mark.parametrize("harm", ["newer", "closed"])
def test_what_cannot_be_judged_stays(tmp_path, harm):
    root = tmp_path / "assets"
    assert publish(root) == "published"
    if harm == "newer":
        (path,) = (root / "a").iterdir()
        path.write_text(path.read_text().replace("kvabr.catalog/", "kvabr.catalog/9"))
    elif may_read_everything():
        pytest.skip(ORDINARY_USER)
    else:
        (root / "g").chmod(0)
    assert publish(root) == "known"
    (root / "g").chmod(0o700)


COMPARED = list(range(40))
KV = kvdata.related(SPEC, 40)
TRACKS = ("Raw", "FP16", "BF16", "FP8", "Int8", "Int4")


def published(root, spec=SPEC, kv=KV, notes=None, tokens=COMPARED, **options):
    made = publisher(root, spec, tracks=TRACKS, **options)
    slot = made.reserve(tokens) if notes is None else made.reserve_passage(tokens, notes)
    assert outcome_of(made, slot, kv).verdict == "published"
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
    chunks = chain(COMPARED, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens)
    with open_store(tmp_path).writer(chunks[-1]) as writer:
        frames = offer.encoder(chunks, len(COMPARED), writer)
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
