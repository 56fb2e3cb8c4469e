"""Stores of all kinds, and folders of stores, are managed alike."""

import asyncio
import secrets
import time
import zlib

import pytest

from kvabr.cli.main import main
from kvabr.link.objects.index import StoreIndex
from kvabr.server.published_assets import PublishedAssets
from kvabr.store import removing
from kvabr.store.admin import (
    REPAIR,
    REWRITE,
    copy_assets,
    find_damage,
    full_name,
    inventory,
    names_in,
    remove,
    rewrite,
    total_bytes,
)
from kvabr.store.locations import open_objects, open_store
from kvabr.store.store_tree import StoreTree
from kvabr.types.errors import AssetError, NotFoundError, UsageError
from tests.assets import digests, spec
from tests.client.served import LOG
from tests.needs import ORDINARY_USER, may_read_everything
from tests.store.noise import LEVELS, LONG, names, objects, publish, read_object, replace_object


@pytest.fixture
def place(small_place):
    return small_place


def damage(place):
    return find_damage(StoreTree(place), deep=True)


def put(place, tokens, **options):
    return publish(place, tokens, **options)[0]


def found(place, tokens):
    """How many tokens of a prompt a player finds."""

    async def find():
        prefix = await StoreIndex(open_objects(place)).find(spec(), digests(tokens), any_dtype=False)
        return 0 if prefix is None else prefix.catalog.tokens

    return asyncio.run(find())


def test_assets_are_listed_with_what_they_take(place):
    first, second = put(place, LONG[:128]), put(place, LONG, measured=True)
    other = put(place, LONG[:20], model="test/other")
    held = {each.name: each for each in inventory(StoreTree(place)).holdings}
    assert held.keys() == {first, second, other}
    assert [held[name].tokens for name in (first, second, other)] == [128, 200, 20]
    assert held[other].model == "test/other"
    assert held[second].measured
    assert not held[first].measured
    assert held[first].tracks == dict.fromkeys(LEVELS, 32 * 200)
    assert held[first].bytes > 2 * 32 * 200
    assert all(abs(time.time() - each.created_s) < 3600 for each in held.values())
    shared = held[first].bytes + held[second].bytes - total_bytes([held[first], held[second]])
    assert shared == 2 * 32 * 200
    listed = names_in(StoreTree(place))
    assert full_name(listed, first) == full_name(listed, first[:12]) == first
    for text in ("", "x"):
        with pytest.raises(NotFoundError):
            full_name(listed, text)


def test_damage_is_found_and_removed_and_published_again(place):
    good, bad, short = put(place, LONG[:20]), put(place, LONG[100:130]), put(place, LONG[150:190])
    assert damage(place) == []
    own = {name: sorted(open_store(place).open(name).objects) for name in (bad, short)}
    data = bytearray(read_object(place, own[bad][0]))
    data[-1] ^= 1
    replace_object(place, own[bad][0], bytes(data))
    replace_object(place, own[short][0], None)
    (lacks,) = find_damage(StoreTree(place))
    assert lacks.name == short
    both = damage(place)
    assert {each.name for each in both} == {bad, short}
    assert all(each.advice == REPAIR for each in both)
    remove(StoreTree(place), [each.name for each in both])
    assert names(place) == {good}
    assert damage(place) == []
    assert put(place, LONG[100:130]) == bad
    assert damage(place) == []


LOST = {"a page": ("i/", 1), "all pages": ("i/", None), "the model": ("m/", None)}


@pytest.mark.parametrize("lost", LOST)
def test_lost_lookups_are_found_and_written_again(place, lost):
    kept = put(place, LONG[:84])
    prefix, count = LOST[lost]
    for name in objects(place, prefix)[:count]:
        replace_object(place, name, None)
    (lacks,) = find_damage(StoreTree(place))
    assert (lacks.name, lacks.advice) == (kept, REWRITE)
    assert prefix in lacks.what
    rewrite(StoreTree(place), [kept])
    assert damage(place) == []
    assert all(found(place, LONG[:tokens]) >= tokens for tokens in (84, 80, 64, 40, 4))


@pytest.mark.parametrize("data", [b"", None, b"cut"])
def test_a_damaged_page_is_found_by_a_deep_check(place, data):
    kept = put(place, LONG[:84])
    page = objects(place, "i/")[0]
    replace_object(place, page, read_object(place, page)[:-5] if data == b"cut" else data)
    assert len(find_damage(StoreTree(place))) == (data != b"cut")
    (bad,) = damage(place)
    assert (bad.name, bad.advice) == (kept, REWRITE)
    rewrite(StoreTree(place), [kept])
    assert damage(place) == []


def test_a_page_of_a_newer_version_is_left_alone(place):
    kept = put(place, LONG[:84])
    page = objects(place, "i/")[0]
    newer = zlib.compress(zlib.decompress(read_object(place, page)).replace(b"kvabr.page/1", b"kvabr.page/9"))
    replace_object(place, page, newer)
    assert damage(place) == []
    rewrite(StoreTree(place), [kept])
    assert read_object(place, page) == newer


def test_copies_between_all_kinds(place, tmp_path):
    published = {put(place, LONG[:100]), put(place, LONG)}
    for target in (str(tmp_path / "warm"), f"memory://{secrets.token_hex(6)}"):
        done = copy_assets(StoreTree(place), open_store(target, create=True))
        assert set(done.assets) == published
        assert done.bytes == (25 + 50) * 2 * 200
        assert damage(target) == []
        for name in published:
            assert open_store(target).open(name).catalog == open_store(place).open(name).catalog
        again = copy_assets(StoreTree(place), open_store(target))
        assert (again.assets, set(again.kept)) == ([], published)
    target = open_store(tmp_path / "other", create=True)
    assert copy_assets(StoreTree(place), target, model="unknown").assets == []
    with pytest.raises(UsageError):
        copy_assets(StoreTree(place), target, names=["nothing"])


def test_a_folder_of_stores_is_managed_as_one(tmp_path):
    one, two = put(tmp_path / "one", LONG[:20]), put(tmp_path / "teams" / "two", LONG[:40])
    tree = StoreTree(tmp_path)
    assert names_in(tree).keys() == {f"one/{one}", f"teams/two/{two}"}
    assert {each.name for each in inventory(tree).holdings} == names_in(tree).keys()
    target = open_store(tmp_path / "all", create=True)
    assert copy_assets(tree, target).assets == [f"one/{one}", f"teams/two/{two}"]
    assert set(target.list()) == {one, two}
    remove(StoreTree(tmp_path), [f"one/{one}"])
    assert names_in(StoreTree(tmp_path)).keys() == {f"all/{one}", f"all/{two}", f"teams/two/{two}"}
    with pytest.raises(AssetError):
        StoreTree(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b"kvabr.catalog/1", b"kvabr.catalog/9"),
        (b'"tokens": 20', b'"tokens": 1%s' % (b"0" * 400)),
        (b'"tokens": 20', b'"tokens": -20'),
        (b'"bytes": [', b'"bytes": [1%s, ' % (b"0" * 400)),
        (b'"bytes": [', b'"bytes": [-5, '),
    ],
)
def test_a_catalog_that_cannot_be_read_hides_no_other_and_keeps_what_it_may_name(place, good, bad, monkeypatch):
    kept, name = put(place, LONG[100:130]), put(place, LONG[:20])
    data = read_object(place, f"a/{name}")
    assert good in data
    replace_object(place, f"a/{name}", data.replace(good, bad))
    seen = inventory(StoreTree(place))
    assert seen.damaged.keys() == {name}
    assert [each.name for each in seen.holdings] == [kept]
    (told,) = damage(place)
    assert (told.name, told.advice == REPAIR) == (name, b"catalog" not in good)
    monkeypatch.setattr(removing, "_GRACE_S", -3600.0)
    before = objects(place, "g/")
    remove(StoreTree(place), [kept], unreferenced=True)
    assert objects(place, "g/") == before


def test_removed_assets_leave_what_others_share(place):
    short, long = put(place, LONG[:128], profile=b"shared"), put(place, LONG, profile=b"shared")
    tree = StoreTree(place)
    before = total_bytes(inventory(tree).holdings)
    freed = remove(tree, [long])
    assert names(place) == {short}
    assert damage(place) == []
    left = total_bytes(inventory(tree).holdings)
    assert freed >= before - left > 0
    assert remove(tree, [long]) == 0
    assert remove(tree, [short]) >= left
    assert objects(place) == ["m/0"]
    assert put(place, LONG, profile=b"shared") == long
    assert damage(place) == []


def test_a_prompt_is_still_found_when_a_longer_one_that_begins_so_is_removed(place):
    """The pages of its groups were those of the longer one, which was there first."""
    long = put(place, LONG)
    kept = put(place, LONG[:84])
    remove(StoreTree(place), [long])
    for tokens in (84, 80, 72, 64, 40):
        assert found(place, LONG[:tokens]) >= tokens
    assert damage(place) == []
    remove(StoreTree(place), [kept])
    assert objects(place, "i/") == objects(place, "g/") == []


def test_what_no_asset_names_goes_once_it_is_an_hour_old(place, monkeypatch):
    dead, kept = put(place, LONG[100:130]), put(place, LONG[:20])
    replace_object(place, f"a/{dead}", None)  # as if its publisher had been killed
    replace_object(place, "g/" + "ab" * 32, b"12345")
    tree = StoreTree(place)
    assert inventory(tree).unreferenced_bytes == 8 * 2 * 200 + 5
    assert remove(tree, [], unreferenced=True) == 0
    assert found(place, LONG[100:130]) == 30  # until then it can be played
    monkeypatch.setattr(removing, "_GRACE_S", -3600.0)
    assert remove(tree, [], unreferenced=True) >= 8 * 2 * 200 + 5
    seen = inventory(tree)
    assert ([each.name for each in seen.holdings], seen.unreferenced_bytes) == ([kept], 0)
    assert damage(place) == []
    assert found(place, LONG[100:130]) == 0


TOKENS = list(range(20))


@pytest.fixture
def root(tmp_path):
    publish(tmp_path / "assets" / "one", TOKENS)
    publish(tmp_path / "assets" / "two", TOKENS[1:])
    return tmp_path / "assets"


@pytest.fixture
def listed(root):
    return sorted(names_in(StoreTree(root)))


def store(*words):
    return main(["store", *map(str, words)])


@pytest.mark.skipif(may_read_everything(), reason=ORDINARY_USER)
def test_what_another_user_keeps_to_himself_is_named_with_what_to_do(root, listed, capsys):
    (root / "one").chmod(0)
    try:
        found, unreadable = StoreTree(root).find()
        assert set(found) == {"", "two/"}
        assert "chmod g+s" in unreadable["one"]
        served = PublishedAssets(root, None, LOG)
        assert [asset.name for asset in served.assets] == listed[1:]
        assert served.damaged == 1
        assert store("ls", root) == 0
        assert store("verify", root, "--repair") == 1
        assert "it may be undamaged" in capsys.readouterr().out
    finally:
        (root / "one").chmod(0o700)


@pytest.mark.skipif(may_read_everything(), reason=ORDINARY_USER)
def test_frames_that_cannot_be_read_are_no_damage(root, listed, capsys):
    (root / "one" / "g").chmod(0)
    try:
        assert store("verify", root, "--repair") == 1
        assert "it may be undamaged" in capsys.readouterr().out
        assert sorted(names_in(StoreTree(root))) == listed
    finally:
        (root / "one" / "g").chmod(0o700)


def test_a_copy_replaces_what_lacks_a_part(root, tmp_path):
    target = tmp_path / "copy"
    assert store("copy", root, target) == 0
    for prefix in ("g/", "i/", "m/"):
        replace_object(target, objects(target, prefix)[0], None)
        assert store("copy", root, target) == 0
        assert store("verify", target, "--deep") == 0


def test_repair_writes_lost_pages_again_and_removes_no_asset(root, listed, capsys):
    for page in objects(root / "one", "i/"):
        replace_object(root / "one", page, None)
    assert store("verify", root) == 1
    said = capsys.readouterr().out
    assert f"{root / 'one' / 'i'}" in said
    assert "is missing, and 4 more; write it again with --repair" in said
    assert store("verify", root, "--repair") == 0
    assert "1 written again, no other object is missing" in capsys.readouterr().out
    assert sorted(names_in(StoreTree(root))) == listed
    assert store("verify", root, "--deep") == 0


def test_a_store_under_a_name_that_stores_use_inside_is_named(tmp_path):
    for name in ("g", "team"):
        publish(tmp_path / name, LONG)
    found, unreadable = StoreTree(tmp_path).find()
    assert set(found) == {"", "team/"}
    assert set(unreadable) == {"g"}
    assert str(tmp_path / "g") in unreadable["g"]
