"""An asset on disk: what is missing, damaged, swapped or foreign is named, never believed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvabr.codec.fit import fit
from kvabr.replay.verify import load_profile
from kvabr.store.asset import Prompt
from kvabr.store.asset_folder import FolderAsset, FolderAssetWriter, frame_path
from kvabr.types.errors import AssetError, ForeignError, FormatError, UsageError
from tests import kvdata
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset


@pytest.fixture(scope="module")
def profile():
    caches = [ToyModel().prefill(prompt(200).tokens)]
    return fit(SPEC, lambda: iter(caches))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, profile):
    return toy_asset(tmp_path_factory.mktemp("toy") / "asset", ("FP16", "Int4", "AC-5x"), profile=profile)


@pytest.fixture
def asset(pristine, tmp_path):
    shutil.copytree(pristine.path, tmp_path / "copy")
    return FolderAsset.open(tmp_path / "copy")


def file_of(asset, group, track):
    return frame_path(asset.path, group, track)


def test_everything_comes_back(asset, profile):
    assert asset.catalog.groups == 5
    assert asset.catalog.group_tokens(4) == 6
    for track in asset.catalog.tracks:
        for group in range(5):
            assert len(asset.frame(group, track.name)) == track.bytes[group]
    assert load_profile(asset).digest == profile.digest == asset.catalog.profile
    assert asset.prompt() == prompt()


def test_no_asset_says_how_to_make_one(tmp_path):
    with pytest.raises(AssetError, match="kvabr encode"):
        FolderAsset.open(tmp_path / "nothing")
    with pytest.raises(AssetError, match="is this an asset"):
        FolderAsset.open(tmp_path)


def test_missing_group(asset):
    file_of(asset, 2, "Int4").unlink()
    with pytest.raises(AssetError, match=r"Int4/00002\.kvg: missing"):
        asset.frame(2, "Int4")
    assert asset.frame(2, "FP16")


def test_truncated_group(asset):
    path = file_of(asset, 1, "Int4")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FormatError, match=r"Int4/00001\.kvg: truncated"):
        asset.frame(1, "Int4")


def test_padded_group(asset):
    path = file_of(asset, 1, "Int4")
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(FormatError, match="longer than"):
        asset.frame(1, "Int4")


@pytest.mark.parametrize("where", [0, 40, 100, -1])
def test_flipped_bit(asset, where):
    path = file_of(asset, 0, "FP16")
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    with pytest.raises(FormatError, match="damaged"):
        asset.frame(0, "FP16")


@pytest.mark.parametrize("other", [(3, "FP16"), (1, "Int4"), (4, "FP16")])
def test_swapped_group_is_called_that(asset, other):
    file_of(asset, 1, "FP16").write_bytes(file_of(asset, *other).read_bytes())
    with pytest.raises(ForeignError, match=f"this is group {other[0]} of {other[1]}, not group 1 of FP16"):
        asset.frame(1, "FP16")


def test_unknown_track_and_group(asset):
    with pytest.raises(FormatError, match="no track 'Int2'"):
        asset.frame(0, "Int2")
    with pytest.raises(IndexError):
        asset.frame(5, "FP16")
    with pytest.raises(IndexError):
        asset.frame(-1, "FP16")


@pytest.mark.parametrize("name", ["../FP16", "/etc/passwd", "..", "a/b", "a\0b", ""])
def test_no_track_name_leads_out_of_the_folder(asset, name):
    with pytest.raises(FormatError, match="cannot be a track name"):
        frame_path(asset.path, 0, name)
    catalog = json.loads((asset.path / "catalog.json").read_text())
    catalog["tracks"][0]["name"] = name
    (asset.path / "catalog.json").write_text(json.dumps(catalog))
    with pytest.raises(FormatError, match="cannot be a track name"):
        FolderAsset.open(asset.path)


def test_newer_catalog(asset):
    path = asset.path / "catalog.json"
    path.write_text(path.read_text().replace("kvabr.catalog/1", "kvabr.catalog/9"))
    with pytest.raises(FormatError, match=r"catalog\.json: .*kvabr.catalog/1.*upgrade kvabr"):
        FolderAsset.open(asset.path)


def test_profile_of_another_model(asset):
    """Even one that the catalog names: its own spec says for what it was calibrated."""
    other = kvdata.profile(kvdata.spec(layers=3))
    catalog = json.loads((asset.path / "catalog.json").read_text())
    catalog["profile"], catalog["profile_bytes"] = other.digest, len(other.to_bytes())
    (asset.path / "catalog.json").write_text(json.dumps(catalog))
    (asset.path / "profile.safetensors").write_bytes(other.to_bytes())
    with pytest.raises(ForeignError, match="calibrated for"):
        load_profile(FolderAsset.open(asset.path))


def test_exchanged_damaged_and_missing_profile(asset):
    path = asset.path / "profile.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="not the profile that the catalog names"):
        load_profile(asset)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="truncated"):
        load_profile(asset)
    path.unlink()
    with pytest.raises(AssetError, match="missing"):
        load_profile(asset)


def test_an_asset_without_profile_has_none(tmp_path):
    assert load_profile(toy_asset(tmp_path / "plain", ("FP16",))) is None


def test_prompt_of_another_cache(asset):
    mine = asset.prompt()
    other = Prompt((*mine.tokens[:-1], mine.tokens[-1] ^ 1), mine.continuation)
    (asset.path / "prompt.json").write_text(other.dumps())
    with pytest.raises(FormatError, match="not the prompt"):
        asset.prompt()


def test_a_salted_asset_knows_its_prompt_and_keeps_no_salt(tmp_path):
    salt = b"thirty-two bytes, by no means more"
    salted = toy_asset(tmp_path / "salted", ("Int4",), salt=salt)
    plain = toy_asset(tmp_path / "plain", ("Int4",))
    assert not set(salted.catalog.chunks) & set(plain.catalog.chunks)
    assert salted.prompt().tokens == plain.prompt().tokens == prompt().tokens
    for path in salted.path.rglob("*"):
        assert path.is_dir() or not any(form in path.read_bytes() for form in (salt, salt.hex().encode()))
    # Neither other ids, nor the prompt of another name, nor one that claims to be unsalted.
    mine = salted.prompt()
    other = Prompt((*mine.tokens[:-1], mine.tokens[-1] ^ 1), mine.continuation)
    for forged in (
        Prompt(other.tokens, mine.continuation, mine.seal),
        Prompt(mine.tokens, mine.continuation[:-1], mine.seal),
        Prompt(mine.tokens, mine.continuation),
        mine.sealed(plain.catalog.namespace.prompt),
    ):
        (salted.path / "prompt.json").write_text(forged.dumps())
        with pytest.raises(FormatError, match="not the prompt"):
            salted.prompt()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"schema": "kvabr.prompt/9"}', "[" * 100_000]
    + [
        json.dumps({"schema": "kvabr.prompt/1", "tokens": tokens, "continuation": [1, 2]})
        for tokens in (None, "abc", [1.5], [True], [-1], [1 << 32], {"a": 1})
    ],
)
def test_hostile_prompt(asset, text):
    (asset.path / "prompt.json").write_text(text)
    with pytest.raises(FormatError, match=r"prompt\.json"):
        asset.prompt()


def test_a_fetched_asset_has_no_prompt(asset):
    (asset.path / "prompt.json").unlink()
    with pytest.raises(AssetError, match="only a publisher's asset"):
        asset.prompt()


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_an_asset_needs_a_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="name one in it"):
        FolderAssetWriter(Path(path))
