"""Folders and buckets are managed alike."""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvabr.store.admin.survey as survey_module
from kvabr.link.objects.index import StoreIndex
from kvabr.store.admin.bucket_admin import BucketAdmin
from kvabr.store.admin.copying import copy_assets
from kvabr.store.admin.opening import open_admin, open_admins
from kvabr.store.admin.protocol import full_name
from kvabr.store.admin.rules import Rules, total_bytes
from kvabr.store.asset_folder import FolderAssetStore, frame_path
from kvabr.store.folder_notes import folder_time
from kvabr.store.locations import open_store
from kvabr.store.objects.bucket import Bucket
from kvabr.store.objects.leases import LeaseTiming
from kvabr.types.errors import AssetError, FormatError, NotFoundError, UsageError
from tests.assets import digests, spec
from tests.store.admin.assets import LEVELS, LONG, MODEL, names, new_place, publish

NOTHING_STAYS = Rules(grace_s=0.0, ttl_s=0.0)


@pytest.fixture(params=["folder", "memory", "file"])
def place(request, tmp_path):
    return new_place(request.param, tmp_path)


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
    assert all(abs(found.now_s - each.created_s) < 3600 for each in held.values())
    shared = held[first].bytes + held[second].bytes - total_bytes([held[first], held[second]])
    assert shared > 2 * 32 * 200 if is_bucket(place) else shared == 0
    listed = await admin.names()
    assert set(listed) == held.keys()
    assert full_name(listed, first) == full_name(listed, first[:12]) == first
    for text, what in (("", "3 assets"), ("x", "no asset")):
        with pytest.raises(NotFoundError, match=what):
            full_name(listed, text)


async def test_pins_keep_what_the_rules_do_not(place):
    first, second = publish(place, LONG[:128]), publish(place, LONG)
    admin = open_admin(place)
    until_s = await admin.pin(first, 3600.0)
    found = await admin.inventory()
    assert {each.name for each in found.holdings if each.is_pinned(found.now_s)} == {first}
    assert 3500 < until_s - found.now_s <= 3601
    dry = await admin.collect(NOTHING_STAYS, dry_run=True)
    assert [each.holding.name for each in dry.evicted] == [second]
    assert names(place) == {first, second}
    done = await admin.collect(NOTHING_STAYS)
    assert [(each.holding.name, each.reason) for each in done.evicted] == [(second, "unused")]
    assert done.kept == 1
    assert done.bytes == dry.bytes > 0
    assert names(place) == {first}
    open_store(place).open(first).check_parts()
    assert await admin.unpin(first)
    assert not await admin.unpin(first)
    await admin.collect(NOTHING_STAYS)
    assert names(place) == set()
    with pytest.raises(NotFoundError, match=first):
        await admin.pin(first, 60.0)


async def test_use_renews_a_lease(place):
    name = publish(place, LONG[:20])
    store, admin = open_store(place), open_admin(place)
    before = (await admin.inventory()).holdings[0].used_s
    if not is_bucket(place):
        os.utime(Path(place) / name, (before - 1000, before - 1000))
    store.touch(name)
    store.touch("f" * 64)
    assert (await admin.inventory()).holdings[0].used_s >= before


async def test_an_expired_model_goes_and_is_not_published_again(place):
    old, other = publish(place, LONG[:20]), publish(place, LONG[:20], model="test/other")
    admin = open_admin(place)
    await admin.pin(old, 3600.0)
    at_s = await admin.expire(MODEL, (await admin.inventory()).now_s + 3600.0)
    assert await admin.expired() == {MODEL: at_s}
    done = await admin.collect(Rules())
    assert [(each.holding.name, each.reason) for each in done.evicted] == [(old, "expired")]
    assert names(place) == {other}
    with pytest.raises(AssetError, match=r"from before its expiry|of a model that expired"):
        publish(place, LONG[:40])
    assert names(place) == {other}
    assert await admin.expire(MODEL, 5.0) == at_s
    with pytest.raises(UsageError, match="name the model"):
        await admin.expire("")


async def test_damage_is_found_and_removed(place):
    good, bad, short = publish(place, LONG[:20]), publish(place, LONG[100:130]), publish(place, LONG[150:190])
    admin = open_admin(place)
    assert await admin.verify(deep=True) == []
    if is_bucket(place):
        bucket = Bucket.open(place)
        manifest = {each.name: each.parts[0].key for each in (await admin.inventory()).holdings}
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
    await admin.pin(short, 60.0)
    found = await admin.verify()
    assert [each.name for each in found] == [short]
    assert "missing" in found[0].what
    found = await admin.verify(deep=True)
    assert {each.name for each in found} >= {bad, short}
    assert not any(each.repaired for each in found)
    found = await admin.verify(deep=True, repair=True)
    assert all(each.repaired for each in found)
    assert names(place) == {good}
    assert await admin.verify(deep=True) == []
    assert publish(place, LONG[100:130]) == bad  # what was damaged is not adopted
    assert await admin.verify(deep=True) == []


async def test_copies_between_all_kinds(place, tmp_path):
    published = {publish(place, LONG[:100]), publish(place, LONG)}
    for target in (tmp_path / "warm", f"file://{tmp_path}/cold?layout=objects"):
        done = copy_assets(open_store(place), open_store(target, create=True))
        assert set(done.assets) == published
        assert done.bytes == (25 + 50) * 2 * 200
        assert await open_admin(target).verify(deep=True) == []
        for name in published:
            assert open_store(target).open(name).catalog.tracks == open_store(place).open(name).catalog.tracks
        again = copy_assets(open_store(place), open_store(target))
        assert (again.assets, set(again.kept)) == ([], published)
        shutil.rmtree(tmp_path / ("warm" if isinstance(target, Path) else "cold"))
    target = open_store(tmp_path / "other", create=True)
    assert copy_assets(open_store(place), target, model="unknown").assets == []
    assert copy_assets(open_store(place), target, expired={MODEL: 1e12}).expired == sorted(published)
    with pytest.raises(UsageError, match="has no asset nothing"):
        copy_assets(open_store(place), target, names=["nothing"])


async def test_what_expires_during_a_copy_is_not_copied(place, tmp_path):
    """The target is told before the catalog is written, and after the copy began."""
    publish(place, LONG[:100])
    source = open_store(place)
    for target in (tmp_path / "warm", f"file://{tmp_path}/cold?layout=objects"):
        store, admin = open_store(target, create=True), open_admin(target)

        class Expiring:
            def __getattr__(self, name, store=store):
                return getattr(store, name)

            def writer(self, *names_, store=store, admin=admin, **options):
                made = store.writer(*names_, **options)
                commit = made.commit

                def expire_and_commit(catalog):
                    finish(admin.expire(MODEL))
                    commit(catalog)

                made.commit = expire_and_commit
                return made

        done = copy_assets(source, Expiring())
        assert not done.assets
        assert all("before its expiry" in why for why in done.failed.values())
        assert len(done.failed) == 1
        assert await admin.names() == []


def finish(work):
    """Run a coroutine to its end in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


async def test_a_damaged_frame_is_not_copied(tmp_path):
    source = tmp_path / "source"
    name, good = publish(source, LONG[:20]), publish(source, LONG[:40])
    path = frame_path(source / name, 1, "FP16")
    path.write_bytes(bytes(len(path.read_bytes())))
    done = copy_assets(open_store(source), open_store(f"memory://{tmp_path.name}", create=True))
    assert done.assets == [good]
    assert "SHA-256" in done.failed[name]


async def test_a_bucket_keeps_what_others_share(tmp_path):
    place = new_place("memory", tmp_path)
    short, long = publish(place, LONG[:128]), publish(place, LONG)
    admin, bucket = open_admin(place), Bucket.open(place)
    await admin.pin(short, 3600.0)
    done = await admin.collect(NOTHING_STAYS)
    assert [each.holding.name for each in done.evicted] == [long]
    assert done.spans == 2
    assert done.pointers > 0
    left = [found.key async for found in bucket.list("s/")]
    assert len(left) == 2
    assert await admin.verify(deep=True) == []
    await admin.unpin(short)
    done = await admin.collect(NOTHING_STAYS)
    assert done.spans == 2
    assert [found.key async for found in bucket.list("")] == ["o/0"]


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_prompt_is_still_found_when_a_longer_one_that_begins_so_is_gone(tmp_path, kind):
    """The pointers of its groups were those of the longer one, which was there first."""
    place = new_place(kind, tmp_path)
    publish(place, LONG)
    kept, admin, bucket = publish(place, LONG[:84]), open_admin(place), Bucket.open(place)
    await admin.pin(kept, 1000.0)
    done = await admin.collect(NOTHING_STAYS)
    assert (len(done.evicted), done.spans) == (1, 3)
    for tokens, found in ((84, 84), (80, 80), (72, 72), (64, 64), (40, 40)):
        index = StoreIndex(bucket)
        assert (await index.find(spec(), digests(LONG[:tokens]), any_dtype=False)).catalog.tokens >= found
    assert await admin.verify(deep=True) == []
    assert await admin.unpin(kept)
    assert (await admin.collect(NOTHING_STAYS)).spans == 2
    assert not [found.key for found in bucket.list_sync("i/")]


async def test_a_quota_of_a_bucket_counts_shared_spans_once(tmp_path):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:128])
    publish(place, LONG)
    admin = open_admin(place)
    total = total_bytes((await admin.inventory()).holdings)
    assert (await admin.collect(Rules(grace_s=0.0, max_bytes=total))).evicted == []
    done = await admin.collect(Rules(grace_s=0.0, max_bytes=total - 1, order="lru"))
    assert [each.reason for each in done.evicted] == ["over the quota"]
    assert total_bytes((await admin.inventory()).holdings) < total


async def test_old_cached_groups_go(tmp_path):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:20])
    await Bucket.open(place).put("g/ab/abc", b"12345")
    admin = open_admin(place)
    assert (await admin.inventory()).cached_bytes == 5
    assert (await admin.collect(Rules(), cache_ttl_s=3600.0)).groups == 0
    assert (await admin.collect(Rules(), cache_ttl_s=0.0)).groups == 1
    assert (await admin.inventory()).cached_bytes == 0


async def test_a_second_collector_stands_back(tmp_path):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:20])
    await Bucket.open(place).put("l/gc", b'{"schema":"kvabr.note/1"}')
    with pytest.raises(UsageError, match=r"another collector .* in 1?[0-9]?[0-9] s, or run .*--take-over"):
        await open_admin(place).collect(Rules())
    assert (await open_admin(place).collect(Rules(), take_over=True)).kept == 1
    assert (await open_admin(place).collect(Rules())).kept == 1


async def test_repairs_leave_what_a_newer_version_wrote(place):
    names_ = [publish(place, LONG[:20]), publish(place, LONG[100:130])]
    admin = open_admin(place)
    if is_bucket(place):
        bucket = Bucket.open(place)
        data = bytes(bucket.get_sync(f"a/{names_[0]}", limit=1 << 20))
        bucket.put_sync(f"a/{names_[0]}", data.replace(b"kvabr.catalog/", b"kvabr.catalog/9"))
        span = next(found.key for found in bucket.list_sync("s/") if names_[1][:16] in found.key)
        data = bytes(bucket.get_sync(span, limit=1 << 20))
        bucket.put_sync(span, data[:4] + b"\x09" + data[5:])
    else:
        for name in names_:
            path = Path(place) / name / "catalog.json"
            path.write_bytes(path.read_bytes().replace(b"kvabr.catalog/", b"kvabr.catalog/9"))
    bad = await admin.verify(deep=True, repair=True)
    assert {each.name for each in bad} == set(names_)
    assert not any(each.repaired for each in bad)
    assert all("upgrade" in each.advice for each in bad)
    assert names(place) == set(names_)


async def test_a_catalog_that_is_too_large_is_damaged(tmp_path, monkeypatch):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:20])
    monkeypatch.setattr(survey_module, "MAX_STORED_CATALOG_BYTES", 10)
    (what,) = (await open_admin(place).inventory()).damaged.values()
    assert "more than the 10" in what


async def test_what_tries_of_conditional_writes_left_goes(tmp_path):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:20])
    bucket = Bucket.open(place)
    await bucket.put("probe/0123456789abcdef", b"0")
    timing = LeaseTiming(intent_s=0.0)
    assert (await BucketAdmin(bucket, timing=timing).collect(Rules())).kept == 1
    assert list(bucket.list_sync("probe/")) == []


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


async def test_a_quota_that_cannot_be_kept_says_by_how_much(place):
    name = publish(place, LONG[:20])
    admin = open_admin(place)
    await admin.pin(name, 3600.0)
    total = total_bytes((await admin.inventory()).holdings)
    for dry_run in (True, False):
        done = await admin.collect(Rules(grace_s=0.0, max_bytes=10), dry_run=dry_run)
        assert done.excess == total - 10


async def test_a_folder_that_cannot_be_collected_says_so(tmp_path):
    name = publish(tmp_path / "assets", LONG[:20])
    one = open_admin(tmp_path / "assets" / name)
    with pytest.raises(UsageError, match="is one asset; give the folder"):
        await one.collect(Rules())
    with pytest.raises(UsageError, match="no single groups"):
        await one.collect(Rules(), cache_ttl_s=1.0)
    with pytest.raises(AssetError, match="no such folder"):
        open_admin(tmp_path / "nowhere")


async def test_a_writer_notices_that_its_model_expired_while_it_committed(tmp_path, monkeypatch):
    """The tombstone comes between the writer's first look and the asset's name."""
    place = tmp_path / "assets"
    place.mkdir()
    plain = Path.rename

    def rename(path, target):
        moved = plain(path, target)
        if str(target).startswith(str(place)) and len(Path(target).name) == 64:
            monkeypatch.setattr(Path, "rename", plain)
            asyncio.run(open_admin(place).expire(MODEL, folder_time(place) + 60.0))
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(AssetError, match="from before its expiry"):
        await asyncio.to_thread(publish, place, LONG[:20])
    assert names(place) == set()


async def test_a_damaged_pin_keeps_and_a_damaged_tombstone_stops(tmp_path):
    place = tmp_path / "assets"
    name = publish(place, LONG[:20])
    admin = open_admin(place)
    await admin.pin(name, 60.0)
    (pin,) = (place / ".kvabr" / "pin").iterdir()
    for damaged in (b"{", b'{"until_s": NaN}', b'{"until_s": 1%s}' % (b"0" * 400)):
        pin.write_bytes(damaged)
        assert (await admin.collect(NOTHING_STAYS)).evicted == []
    await admin.expire(MODEL, 5.0)
    (tombstone,) = (place / ".kvabr" / "expired").iterdir()
    for damaged in (b"[]", b'{"before_s": NaN}', b'{"before_s": 1%s}' % (b"0" * 400)):
        tombstone.write_bytes(damaged)
        with pytest.raises(FormatError, match="not a note"):
            await admin.collect(NOTHING_STAYS)


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
    """Nothing that stands in one asset's catalog keeps a collector from the others."""
    kept, name = publish(place, LONG[100:130]), publish(place, LONG[:20])
    bucket = Bucket.open(place)
    data = bytes(bucket.get_sync(f"a/{name}", limit=1 << 20))
    assert good in data
    bucket.put_sync(f"a/{name}", data.replace(good, bad))
    admin = open_admin(place)
    assert (await admin.inventory()).damaged.keys() == {name}
    done = await admin.collect(Rules(grace_s=0.0, max_bytes=0))
    assert [each.holding.name for each in done.evicted] == [kept]
    assert done.damaged.keys() == {f"a/{name}"}


async def test_what_a_killed_collector_was_removing_goes_after_the_grace(tmp_path):
    place = tmp_path / "assets"
    name = publish(place, LONG[:20])
    left = place / f".{name}.0000.old"
    shutil.copytree(place / name, left)
    admin = open_admin(place)
    await admin.collect(Rules())
    assert left.exists()
    os.utime(left, (1.0, 1.0))
    await admin.collect(Rules())
    assert not left.exists()
    assert FolderAssetStore(place).list().versions.keys() == {name}


async def test_a_span_from_before_the_expiry_is_not_reused(tmp_path):
    place = new_place("memory", tmp_path)
    publish(place, LONG[:128])
    admin = open_admin(place)
    await admin.expire(MODEL, (await admin.inventory()).now_s)
    with pytest.raises(AssetError, match="finish that with: kvabr store gc"):
        publish(place, LONG)
    done = await admin.collect(Rules())
    assert [each.reason for each in done.evicted] == ["expired"]
    name = publish(place, LONG)
    assert names(place) == {name}
    assert await admin.verify(deep=True) == []


async def test_a_tombstone_that_cannot_be_read_stops_collecting_only(tmp_path):
    place = new_place("memory", tmp_path)
    name = publish(place, LONG[:20])
    await Bucket.open(place).put("x/m/0123", b"{")
    admin = open_admin(place)
    found = await admin.inventory()
    assert [each.name for each in found.holdings] == [name]
    assert "remove it" in found.damaged["x/m/0123"]
    assert [each.name for each in await admin.verify()] == ["x/m/0123"]
    with pytest.raises(FormatError, match="x/m/0123"):
        await admin.collect(NOTHING_STAYS)
