"""Folders that cannot be looked into, and names that are no UTF-8, are named and counted, and stop nothing else."""

from __future__ import annotations

import os

import pytest

from kvabr.cli.main import main
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_store
from kvabr.types.errors import AssetError
from tests.assets import frame_file
from tests.client.served import LOG
from tests.needs import ORDINARY_USER, may_read_everything
from tests.store.admin.assets import publish

ODD = os.fsdecode(b"caf\xe9")
TOKENS = list(range(20))


@pytest.fixture
def root(tmp_path):
    publish(tmp_path / "assets", TOKENS)
    publish(tmp_path / "assets", TOKENS[1:])
    return tmp_path / "assets"


@pytest.fixture
def names(root):
    return sorted(open_store(root).list().versions)


def shut(path):
    """Let nobody look into a folder, not even root."""
    catalog = path / "catalog.json"
    catalog.unlink()
    catalog.symlink_to(catalog)


def store(*words):
    return main(["store", *map(str, words)])


def test_a_folder_that_cannot_be_looked_into_is_left_out_and_named(root, names, capsys):
    shut(root / names[0])
    listing = open_store(root).list()
    assert set(listing.versions) == {names[1]}
    assert set(listing.unreadable) == {names[0]}
    served = PublishedAssets(root, None, LOG)
    assert [asset.name for asset in served.assets] == [names[1]]
    assert served.damaged == 1
    assert store("ls", root) == 0
    assert f"{names[0]}: cannot be read: {root / names[0]}: cannot be looked into" in capsys.readouterr().out
    assert store("verify", root) == 1
    assert "it may be undamaged" in capsys.readouterr().out
    assert store("verify", root, "--repair") == 1  # and it is still there
    assert store("rm", root, "--unnamed") == 0
    assert (root / names[0]).is_dir()
    for call in (lambda: open_store(root).open(names[0]), lambda: open_store(root).version(names[0])):
        with pytest.raises(AssetError, match="cannot be looked into"):
            call()
    assert main(["inspect", str(root / names[0])]) == 1
    assert "cannot be looked into" in capsys.readouterr().err


@pytest.mark.skipif(may_read_everything(), reason=ORDINARY_USER)
def test_what_another_user_keeps_to_himself_is_named_with_what_to_do(root, names):
    (root / names[0]).chmod(0)
    try:
        assert "chmod g+s" in open_store(root).list().unreadable[names[0]]
    finally:
        (root / names[0]).chmod(0o700)


@pytest.mark.skipif(may_read_everything(), reason=ORDINARY_USER)
def test_groups_that_cannot_be_looked_into_are_no_damage(root, names, capsys):
    (root / names[0] / "groups").chmod(0)
    try:
        assert store("verify", root, "--repair") == 1
        assert "it may be undamaged" in capsys.readouterr().out
        assert set(open_store(root).list().versions) == set(names)
    finally:
        (root / names[0] / "groups").chmod(0o700)


def test_names_that_are_no_utf_8_are_managed_as_others(root, names, tmp_path):
    (root / names[0]).rename(root / ODD)
    assert store("ls", root, "--json", tmp_path / "out.json") == 0
    assert store("rm", root, names[1]) == 0
    assert set(open_store(root).list().versions) == {ODD}
    assert store("verify", root, "--deep") == 0
    assert store("copy", root, tmp_path / "copy") == 0
    assert store("rm", root, ODD) == 0
    assert not open_store(root).list().versions


def test_a_repair_removes_what_lacks_a_part_and_a_deep_one_what_is_damaged(root, names, capsys):
    frame = frame_file(root / names[0], 0, "FP16")
    content = frame.read_bytes()
    frame.write_bytes(bytes(len(content)))
    assert store("verify", root, "--repair") == 0
    assert "the bytes of frames were not read" in capsys.readouterr().out
    assert len(open_store(root).list().versions) == 2
    assert store("verify", root, "--deep") == 1
    assert len(open_store(root).list().versions) == 2
    assert store("verify", root, "--deep", "--repair") == 0
    assert set(open_store(root).list().versions) == {names[1]}
    frame_file(root / names[1], 0, "FP16").unlink()
    assert store("verify", root, "--repair") == 0
    assert not open_store(root).list().versions


def test_a_copy_replaces_what_lacks_a_part(root, names, tmp_path):
    target = tmp_path / "copy"
    assert store("copy", root, target) == 0
    name = min(open_store(target).list().versions)
    frame_file(target / name, 0, "FP16").unlink()
    assert store("copy", root, target) == 0
    assert store("verify", target, "--deep") == 0
