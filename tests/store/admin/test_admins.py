"""Folders and buckets are managed alike."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

import kvabr.store.admin.survey as survey_module
from kvabr.link.objects.index import StoreIndex
from kvabr.store.admin import bucket_admin
from kvabr.store.admin.checking import find_damage
from kvabr.store.admin.copying import copy_assets
from kvabr.store.admin.opening import open_admin, open_admins
from kvabr.store.admin.protocol import REPAIR, full_name, total_bytes
from kvabr.store.asset_folder import frame_path
from kvabr.store.files import STALE_S
from kvabr.store.locations import open_store
from kvabr.store.objects.bucket import Bucket
from kvabr.types.errors import AssetError, NotFoundError, UsageError
from tests.assets import digests, spec
from tests.store.admin.assets import LEVELS, LONG, names, new_place, publish


@pytest.fixture(params=["folder", "memory", "file"])
def place(request, tmp_path):
    return new_place(request.param, tmp_path)


def damage(place):
    return find_damage(open_store(place), deep=True)


def is_bucket(place):
    return "://" in str(place)


async def test_assets_are_listed_with_what_they_take(place):
    first, second = publish(place, LONG[:128]), publish(place, LONG, measured=True)
    other = publish(place, LONG[:20], model="test/other")
    admin = open_admin(place)
    assert admin.tenant == ("default" if is_bucket(place) else "")
    found = await admin.inventory()
    held = {each.name: each for each in found.holdings}
    assert held.keys() == {first, second, other}
    assert [held[name].tokens for name in (first, second, other)] == [128, 200, 20]
    assert held[other].model == "test/other"
    assert held[second].measured
    assert not held[first].measured
    assert held[first].tracks == dict.fromkeys(LEVELS, 32 * 200)
    assert held[first].bytes > 2 * 32 * 200
    assert all(abs(time.time() - each.created_s) < 3600 for each in held.values())
    shared = held[first].bytes + held[second].bytes - total_bytes([held[first], held[second]])
    assert shared > 2 * 32 * 200 if is_bucket(place) else shared == 0
    listed = await admin.names()
    assert set(listed) == held.keys()
    assert full_name(listed, first) == full_name(listed, first[:12]) == first
    for text, what in (("", "3 assets"), ("x", "no asset")):
        with pytest.raises(NotFoundError, match=what):
            full_name(listed, text)


async def test_damage_is_found_and_removed(place):
    good, bad, short = publish(place, LONG[:20]), publish(place, LONG[100:130]), publish(place, LONG[150:190])
    admin = open_admin(place)
    assert damage(place) == []
    if is_bucket(place):
        bucket = Bucket.open(place)
        manifest = {each.name: min(each.parts) for each in (await admin.inventory()).holdings}
        data = bytearray(bucket.get_sync(manifest[bad], limit=1 << 20))
        data[-1] ^= 1
        bucket.put_sync(manifest[bad], bytes(data))
        bucket.delete_sync([manifest[short]])
    else:
        path = frame_path(Path(place) / bad, 3, "FP16")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        frame_path(Path(place) / short, 1, "Int4").unlink()
    found = find_damage(open_store(place))
    assert [each.name for each in found] == [short]
    assert "missing" in found[0].what
    found = damage(place)
    assert {each.name for each in found} == {bad, short}
    assert all(each.advice == REPAIR for each in found)
    await admin.remove([each.name for each in found])
    assert names(place) == {good}
    assert damage(place) == []
    assert publish(place, LONG[100:130]) == bad  # what was damaged is not adopted
    assert damage(place) == []


async def test_copies_between_all_kinds(place, tmp_path):
    published = {publish(place, LONG[:100]), publish(place, LONG)}
    for target in (tmp_path / "warm", f"file://{tmp_path}/cold?layout=objects"):
        done = copy_assets(open_store(place), open_store(target, create=True))
        assert set(done.assets) == published
        assert done.bytes == (25 + 50) * 2 * 200
        assert damage(target) == []
        for name in published:
            assert open_store(target).open(name).catalog.tracks == open_store(place).open(name).catalog.tracks
        again = copy_assets(open_store(place), open_store(target))
        assert (again.assets, set(again.kept)) == ([], published)
        shutil.rmtree(tmp_path / ("warm" if isinstance(target, Path) else "cold"))
    target = open_store(tmp_path / "other", create=True)
    assert copy_assets(open_store(place), target, model="unknown").assets == []
    with pytest.raises(UsageError, match="has no asset nothing"):
        copy_assets(open_store(place), target, names=["nothing"])


async def test_a_damaged_frame_is_not_copied(tmp_path):
    source = tmp_path / "source"
    name, good = publish(source, LONG[:20]), publish(source, LONG[:40])
    path = frame_path(source / name, 1, "FP16")
    path.write_bytes(bytes(len(path.read_bytes())))
    done = copy_assets(open_store(source), open_store(f"memory://{tmp_path.name}", create=True))
    assert done.assets == [good]
    assert "SHA-256" in done.failed[name]


def test_a_repair_would_leave_what_a_newer_version_wrote(place):
    name = publish(place, LONG[:20])
    publish(place, LONG[100:130])
    if is_bucket(place):
        bucket = Bucket.open(place)
        data = bytes(bucket.get_sync(f"a/{name}", limit=1 << 20))
        bucket.put_sync(f"a/{name}", data.replace(b"kvabr.catalog/", b"kvabr.catalog/9"))
    else:
        path = Path(place) / name / "catalog.json"
        path.write_bytes(path.read_bytes().replace(b"kvabr.catalog/", b"kvabr.catalog/9"))
    (bad,) = damage(place)
    assert bad.name == name
    assert bad.advice != REPAIR


async def test_a_catalog_that_is_too_large_is_damaged(tmp_path, monkeypatch):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:20])
    monkeypatch.setattr(survey_module, "MAX_STORED_CATALOG_BYTES", 10)
    (what,) = (await open_admin(place).inventory()).damaged.values()
    assert "more than the 10" in what


def test_tenants_are_those_that_can_be_named(tmp_path):
    place = new_place("file", tmp_path)
    publish(place, LONG[:20])
    publish(place + "&tenant=other", LONG[:20])
    bucket = Bucket.open(place)
    folder = Path(bucket.where.bucket) / "v1"
    (folder / "Not a tenant").mkdir()
    (folder / "Not a tenant" / "file").write_bytes(b"")
    (folder / "file").write_bytes(b"")
    assert [admin.tenant for admin in open_admins(place)] == ["default", "other"]


@pytest.mark.parametrize("place", ["memory"], indirect=True)
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"tokens": 20', b'"tokens": 1%s' % (b"0" * 400)),
        (b'"tokens": 20', b'"tokens": -20'),
        (b'"bytes": [', b'"bytes": [1%s, ' % (b"0" * 400)),
        (b'"bytes": [', b'"bytes": [-5, '),
    ],
)
async def test_a_catalog_with_numbers_that_cannot_be_is_damaged(place, good, bad):
    """Nothing in one asset's catalog hides the others."""
    kept, name = publish(place, LONG[100:130]), publish(place, LONG[:20])
    bucket = Bucket.open(place)
    data = bytes(bucket.get_sync(f"a/{name}", limit=1 << 20))
    assert good in data
    bucket.put_sync(f"a/{name}", data.replace(good, bad))
    admin = open_admin(place)
    found = await admin.inventory()
    assert found.damaged.keys() == {name}
    assert [each.name for each in found.holdings] == [kept]


async def test_removed_assets_leave_what_others_share(place):
    short, long = publish(place, LONG[:128], profile=b"shared"), publish(place, LONG, profile=b"shared")
    admin = open_admin(place)
    before = total_bytes((await admin.inventory()).holdings)
    freed = await admin.remove([long])
    assert names(place) == {short}
    assert damage(place) == []
    left = total_bytes((await admin.inventory()).holdings)
    assert freed >= before - left > 0
    assert await admin.remove([long]) == 0
    assert await admin.remove([short]) >= left
    assert names(place) == set()
    if is_bucket(place):
        assert [found.key for found in Bucket.open(place).list_sync("")] == ["o/0"]
    assert publish(place, LONG, profile=b"shared") == long
    assert damage(place) == []


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_prompt_is_still_found_when_a_longer_one_that_begins_so_is_removed(tmp_path, kind):
    """The pointers of its groups were those of the longer one, which was there first."""
    place = new_place(kind, tmp_path)
    long = publish(place, LONG)
    kept, admin, bucket = publish(place, LONG[:84]), open_admin(place), Bucket.open(place)
    await admin.remove([long])
    for tokens in (84, 80, 72, 64, 40):
        index = StoreIndex(bucket)
        assert (await index.find(spec(), digests(LONG[:tokens]), any_dtype=False)).catalog.tokens >= tokens
    assert damage(place) == []
    await admin.remove([kept])
    assert not [found.key for found in bucket.list_sync("i/")]


async def test_what_no_asset_names_goes_once_it_is_an_hour_old(tmp_path, monkeypatch):
    place = new_place("memory", tmp_path)
    dead, kept = publish(place, LONG[100:130]), publish(place, LONG[:20])
    admin, bucket = open_admin(place), Bucket.open(place)
    await bucket.delete([f"a/{dead}"])  # as if its publisher had been killed
    await bucket.put("g/ab/abc", b"12345")
    found = await admin.inventory()
    assert (found.unnamed_bytes > 0, found.cached_bytes) == (True, 5)
    assert await admin.remove([], unnamed=True) == 0
    monkeypatch.setattr(bucket_admin, "_GRACE_S", -3600.0)
    assert await admin.remove([], unnamed=True) >= found.unnamed_bytes
    found = await admin.inventory()
    assert ([each.name for each in found.holdings], found.unnamed_bytes) == ([kept], 0)
    assert damage(place) == []
    assert found.cached_bytes == 5  # a lifecycle rule removes these


@pytest.mark.parametrize("newer", ["a/" + "f" * 64, "o/1"])
async def test_nothing_but_catalogs_goes_while_a_newer_version_may_name_it(tmp_path, monkeypatch, newer):
    place = new_place("memory", tmp_path)
    name = publish(place, LONG[:20])
    admin, bucket = open_admin(place), Bucket.open(place)
    await bucket.put(newer, b'{"schema":"kvabr.offer/2"}\n{"schema":"kvabr.catalog/99"}')
    monkeypatch.setattr(bucket_admin, "_GRACE_S", -3600.0)
    parts = [found.key for found in bucket.list_sync("") if found.key[0] in "sip"]
    await admin.remove([name], unnamed=True)
    assert names(place) <= {"f" * 64}
    assert [found.key for found in bucket.list_sync("") if found.key[0] in "sip"] == parts


async def test_a_folder_that_is_one_asset_is_not_removed(tmp_path):
    name = publish(tmp_path / "assets", LONG[:20])
    with pytest.raises(UsageError, match="is one asset; give the folder"):
        await open_admin(tmp_path / "assets" / name).remove(["."])
    with pytest.raises(AssetError, match="no such folder"):
        open_admin(tmp_path / "nowhere")


async def test_what_a_killed_process_was_removing_goes_later(tmp_path):
    place = tmp_path / "assets"
    name = publish(place, LONG[:20])
    left = place / f".{name}.0000.partial"
    shutil.copytree(place / name, left)
    admin = open_admin(place)
    await admin.remove([], unnamed=True)
    assert left.exists()
    old_s = time.time() - STALE_S - 60.0
    for path in [left, *left.rglob("*")]:
        os.utime(path, (old_s, old_s))
    await admin.remove([], unnamed=True)
    assert not left.exists()
    assert names(place) == {name}
