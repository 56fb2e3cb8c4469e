"""Folders that cannot be read are named and counted, and stop nothing else."""

from __future__ import annotations

import pytest

from kvabr.cli.main import main
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.admin import names_in
from kvabr.store.store_tree import StoreTree
from tests.client.served import LOG
from tests.needs import ORDINARY_USER, may_read_everything
from tests.store.noise import objects, publish, read_object, replace_object

TOKENS = list(range(20))


@pytest.fixture
def root(tmp_path):
    publish(tmp_path / "assets" / "one", TOKENS)
    publish(tmp_path / "assets" / "two", TOKENS[1:])
    return tmp_path / "assets"


@pytest.fixture
def names(root):
    return sorted(names_in(StoreTree(root)))


def store(*words):
    return main(["store", *map(str, words)])


@pytest.mark.skipif(may_read_everything(), reason=ORDINARY_USER)
def test_what_another_user_keeps_to_himself_is_named_with_what_to_do(root, names, capsys):
    (root / "one").chmod(0)
    try:
        found, unreadable = StoreTree(root).find()
        assert set(found) == {"", "two/"}
        assert "chmod g+s" in unreadable["one"]
        served = PublishedAssets(root, None, LOG)
        assert [asset.name for asset in served.assets] == names[1:]
        assert served.damaged == 1
        assert store("ls", root) == 0
        assert store("verify", root, "--repair") == 1
        assert "it may be undamaged" in capsys.readouterr().out
    finally:
        (root / "one").chmod(0o700)


@pytest.mark.skipif(may_read_everything(), reason=ORDINARY_USER)
def test_frames_that_cannot_be_read_are_no_damage(root, names, capsys):
    (root / "one" / "g").chmod(0)
    try:
        assert store("verify", root, "--repair") == 1
        assert "it may be undamaged" in capsys.readouterr().out
        assert sorted(names_in(StoreTree(root))) == names
    finally:
        (root / "one" / "g").chmod(0o700)


def test_a_repair_removes_what_lacks_a_part_and_a_deep_one_what_is_damaged(root, names, capsys):
    one = root / "one"
    frame = objects(one, "g/")[0]
    replace_object(one, frame, bytes(len(read_object(one, frame))))
    assert store("verify", root, "--repair") == 0
    assert "the bytes of frames were not read" in capsys.readouterr().out
    assert store("verify", root, "--deep") == 1
    assert sorted(names_in(StoreTree(root))) == names
    assert store("verify", root, "--deep", "--repair") == 0
    assert sorted(names_in(StoreTree(root))) == names[1:]
    replace_object(root / "two", objects(root / "two", "g/")[0], None)
    assert store("verify", root, "--repair") == 0
    assert not names_in(StoreTree(root))


def test_a_copy_replaces_what_lacks_a_part(root, tmp_path):
    target = tmp_path / "copy"
    assert store("copy", root, target) == 0
    replace_object(target, objects(target, "g/")[0], None)
    assert store("copy", root, target) == 0
    assert store("verify", target, "--deep") == 0
