"""What engines publish stays within a quota: outgrown turns and the least recently computed assets go."""

import os

import pytest

from kvabr.data import default_catalog
from kvabr.publish.publisher import Publisher, Slot
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.asset_store import AssetStore
from kvabr.store.local import LocalStore
from kvabr.store.quota import FolderQuota
from kvabr.types.naming import chain
from tests import kvdata
from tests.toymodel import SPEC

pytestmark = pytest.mark.slow


def tokens(number):
    return [number, *range(47)]


def name(number):
    return named(tokens(number))


def named(ids):
    return chain(ids, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens)[-1]


def offer(root, number, max_bytes=None, age_s=0.0):
    """Publish one cache, and say that it was ``age_s`` ago."""
    return offer_tokens(root, tokens(number), max_bytes, age_s)


def offer_tokens(root, ids, max_bytes=None, age_s=0.0):
    made = Publisher(root, SPEC, prior=default_catalog(), max_bytes=max_bytes)
    try:
        slot = made.reserve(ids)
        if isinstance(slot, Slot):
            slot.fill(kvdata.related(SPEC, len(ids)), lambda _outcome: None)
    finally:
        made.close()
    if age_s:
        found = (path := root / "a" / named(ids)).stat()
        os.utime(path, (found.st_mtime - age_s, found.st_mtime))
    return slot


def size(root, number=None):
    """Bytes of what is there, or of one asset."""
    store = AssetStore(LocalStore(root))
    names = store.list() if number is None else [name(number)]
    assets = [store.open(each) for each in names]
    return sum(sum(asset.objects.values()) + asset.catalog_size for asset in assets)


def there(root):
    return set(AssetStore(LocalStore(root)).list())


def test_what_was_computed_longest_ago_goes_first(tmp_path):
    for number, age_s in ((1, 300.0), (2, 200.0), (3, 100.0)):
        offer(tmp_path, number, age_s=age_s)
    offer(tmp_path, 4, max_bytes=32 * size(tmp_path, 1) // 10)
    assert there(tmp_path) == {name(2), name(3), name(4)}
    assert len(PublishedAssets(tmp_path).assets) == 3


def test_what_is_computed_again_stays(tmp_path):
    for number, age_s in ((1, 300.0), (2, 200.0)):
        offer(tmp_path, number, age_s=age_s)
    most = 22 * size(tmp_path, 1) // 10
    assert offer(tmp_path, 1, max_bytes=most) == "known"
    offer(tmp_path, 3, max_bytes=most)
    assert there(tmp_path) == {name(1), name(3)}


def room_for_all(root):
    """Bytes of a folder for what is there, and half of another asset."""
    return size(root) + size(root, 1) // 2


def test_the_outgrown_turn_of_a_conversation_goes_first(tmp_path):
    """It was used after the other prompt, but the longer asset has a copy of it."""
    for number, age_s in ((1, 300.0), (2, 200.0)):
        offer(tmp_path, number, age_s=age_s)
    longer = [*tokens(2), *range(48)]
    offer_tokens(tmp_path, longer, age_s=100.0)
    quota = FolderQuota(LocalStore(tmp_path), room_for_all(tmp_path))
    offer(tmp_path, 3)
    assert quota.make_room(name(3)) == 1
    assert there(tmp_path) == {name(1), name(3), named(longer)}


@pytest.mark.parametrize(("more", "outgrown"), [(1, False), (60, True)])
def test_a_turn_that_ends_within_a_group_is_outgrown_by_one_with_a_further_group(tmp_path, more, outgrown):
    turn = [*tokens(2), 7, 8]
    offer(tmp_path, 1, age_s=300.0)
    offer_tokens(tmp_path, turn, age_s=200.0)
    offer_tokens(tmp_path, [*turn, *range(more)], age_s=100.0)
    quota = FolderQuota(LocalStore(tmp_path), room_for_all(tmp_path))
    offer(tmp_path, 3)
    assert quota.make_room(name(3)) == 1
    assert (named(turn) in there(tmp_path)) != outgrown
    assert (name(1) in there(tmp_path)) == outgrown


def test_measured_assets_and_foreign_files_are_left_alone(tmp_path):
    offer(tmp_path, 1, age_s=300.0)
    measured = tmp_path / "a" / name(1)
    measured.write_text(measured.read_text().replace('"estimated": true', '"estimated": false'))
    (tmp_path / "notes").mkdir()
    (tmp_path / "a" / "notes").write_text("a file of somebody's")
    most = 11 * size(tmp_path, 1) // 10
    offer(tmp_path, 2, max_bytes=most, age_s=200.0)
    offer(tmp_path, 3, max_bytes=most)
    assert there(tmp_path) == {name(1), name(3)}
    assert (tmp_path / "a" / "notes").exists()
    assert (tmp_path / "notes").is_dir()


def test_one_that_is_larger_than_all_is_kept_alone(tmp_path):
    offer(tmp_path, 1, age_s=300.0)
    offer(tmp_path, 2, max_bytes=10)
    assert there(tmp_path) == {name(2)}


def test_a_full_folder_is_not_looked_at_for_each(tmp_path):
    """Some more than must be is removed, so the next ones fit without a look."""
    for number in range(1, 41):
        offer(tmp_path, number, age_s=1000.0 - number)
    one = size(tmp_path, 1)
    quota = FolderQuota(LocalStore(tmp_path), 40 * one)
    offer(tmp_path, 41)
    assert quota.make_room(name(41)) == 3
    offer(tmp_path, 42)
    assert quota.make_room(name(42)) == 0
    assert len(there(tmp_path)) == 39


def test_what_others_publish_is_counted_in_time(tmp_path):
    """Another process writes into the folder; this one notices after publishing a twentieth of the bound itself."""
    offer(tmp_path, 1)
    one = size(tmp_path, 1)
    quota = FolderQuota(LocalStore(tmp_path), 106 * one // 10)
    quota.make_room(name(1))
    for number in range(2, 14):
        offer(tmp_path, number, age_s=1000.0 - number)
    offer(tmp_path, 14)
    assert quota.make_room(name(14)) == 4
    assert there(tmp_path) == {name(1), *(name(number) for number in range(6, 15))}


def test_a_folder_that_is_gone_is_no_error(tmp_path):
    quota = FolderQuota(LocalStore(tmp_path / "gone"), 1)
    quota.touch(name(1))
    assert quota.make_room(name(1)) == 0
