"""Groups by digest: bounded, checked when they are read, and no other files are touched."""

import asyncio
import hashlib
import os
import random

import pytest

from kvabr.store.group_cache import GroupCache, StoreTier
from kvabr.store.lru import ByteLru
from kvabr.store.names import group_name
from kvabr.types.digests import digest_of
from kvabr.types.errors import AssetError, StoreError, UsageError

DICE = random.Random(7)


def group(size=100):
    data = DICE.randbytes(size)
    return hashlib.sha256(data).hexdigest(), memoryview(data)


@pytest.fixture(params=["memory", "folder", "bucket"])
async def store(request, tmp_path):
    """A cache of 350 bytes of each kind."""
    place = {"memory": None, "folder": tmp_path, "bucket": f"memory://groups-{DICE.randrange(1 << 60)}"}[request.param]
    made = GroupCache(350) if place is None else GroupCache(0, StoreTier(place, 350))
    yield made
    await made.close()


def in_folder(folder, max_bytes=1000, on_failure=lambda _why: None):
    """A cache that keeps nothing in memory."""
    return GroupCache(0, StoreTier(folder, max_bytes, on_failure))


def file_of(folder, digest):
    return folder / group_name(digest)


async def written(store):
    while store._writes or (store.disk is not None and store.disk._deleting):  # noqa: ASYNC110  # nothing tells
        await asyncio.sleep(0.001)


async def test_every_store_keeps_the_contract(store):
    digest, data = group()
    assert await store.get(digest) is None
    assert await store.put(digest, data)
    await written(store)
    assert not await store.put(digest, data)
    assert digest in store
    assert await store.get(digest) == data
    assert list(store) == [digest]
    assert await store.delete(digest)
    assert not await store.delete(digest)
    assert digest not in store
    assert await store.get(digest) is None
    assert not list(store)
    assert (len(store), store.total_bytes, sum(store.damaged.values())) == (0, 0, 0)


async def test_digests_of_two_kinds_are_two_groups(store):
    digest, data = group(40)
    other = digest_of(data, "blake3")
    assert await store.put(digest, data)
    assert await store.put(other, data)
    await written(store)
    assert await store.get(digest) == await store.get(other) == data
    mixed = f"b3-{digest}"  # what has the wrong kind is as good as damaged
    await store.put(mixed, data)
    await written(store)
    assert await store.get(mixed) is None
    assert mixed not in store


async def test_a_folder_finds_groups_of_both_kinds_again(tmp_path):
    digest, data = group()
    names = (digest, digest_of(data, "blake3"))
    store = in_folder(tmp_path, 350)
    for name in names:
        await store.put(name, data)
    await store.close()
    (tmp_path / "g" / "notes").write_bytes(data)  # not a group's name
    store = in_folder(tmp_path, 350)
    assert len(store) == 2
    assert [await store.get(name) for name in names] == [data, data]
    await store.close()


async def test_the_least_recently_used_make_room():
    store = GroupCache(350)
    (a, data), (b, _), (c, _), (d, _) = groups = [group() for _ in range(4)]
    for digest, one in groups[:3]:
        await store.put(digest, one)
    assert await store.get(a) == data
    await store.put(*groups[3])
    assert [digest in store for digest in (a, b, c, d)] == [True, False, True, True]
    assert (store.total_bytes, store.memory.evicted) == (300, 1)
    assert await store.get(b) is None
    assert not await store.put(*group(351))
    assert store.total_bytes == 300  # what can never fit evicts nothing
    await store.put(*group(350))
    assert store.total_bytes == 350


async def test_no_memory_keeps_nothing():
    store = GroupCache(0)
    digest, data = group()
    assert not await store.put(digest, data)
    assert digest not in store


async def test_what_changed_in_memory_is_not_given_out():
    store = GroupCache(1000)
    data = bytearray(DICE.randbytes(100))
    digest = hashlib.sha256(data).hexdigest()
    await store.put(digest, memoryview(data))
    data[50] ^= 1
    assert store.held(digest) == data
    assert await store.get(digest) is None
    assert digest not in store
    assert (store.total_bytes, store.damaged["memory"]) == (0, 1)


async def test_the_disk_outlives_the_process(tmp_path):
    changes = []

    def tiers():
        return GroupCache(150, StoreTier(tmp_path / "groups", 1000), on_change=lambda: changes.append(1))

    store = tiers()
    groups = [group() for _ in range(3)]
    for digest, data in groups:
        assert await store.put(digest, data)
    await store.close()
    assert changes
    store = tiers()
    assert all(digest in store for digest, _ in groups)
    assert (len(store.memory), len(store.disk.kept), len(store)) == (0, 3, 3)
    assert await store.find(groups[0][0]) == (groups[0][1], "disk")
    assert (await store.find(groups[0][0]))[1] == "memory"
    assert len(list(store)) == 3
    await store.close()


@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_a_tier_that_cannot_be_used_is_told_of_once_and_left_alone_for_a_while(tmp_path, monkeypatch, kind):
    told, calls = [], []
    place = tmp_path / "groups" if kind == "folder" else f"memory://groups-{DICE.randrange(1 << 60)}"
    store = StoreTier(place, 1 << 20, told.append)
    digest, data = group()
    assert await store.put(digest, data)

    async def fails(*_, **__):
        calls.append(1)
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store.store, "put_new", fails)
        for _ in range(3):
            assert not await store.put(*group())
    assert (told, len(calls)) == (["the disk is full"], 1)
    assert await store.get(digest) is None
    monkeypatch.setattr(store, "_again_s", 0.0)
    assert await store.get(digest) == data
    assert await store.put(*group())
    await store.close()


async def test_a_group_deleted_while_it_is_written_stays_deleted(tmp_path):
    store = GroupCache(1000, StoreTier(tmp_path, 1000))
    digest, data = group()
    await store.put(digest, data)
    assert await store.delete(digest)
    assert digest not in store
    await store.close()
    assert not file_of(tmp_path, digest).exists()


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone", "link", "pipe"])
async def test_a_damaged_file_is_found_out(tmp_path, damage, monkeypatch):
    digest, data = group()
    store = in_folder(tmp_path)
    await store.put(digest, data)
    await store.close()
    store = in_folder(tmp_path)
    path = file_of(tmp_path, digest)
    if damage == "flipped":
        path.write_bytes(bytes([data[0] ^ 1]) + bytes(data[1:]))
    elif damage == "cut":
        path.write_bytes(data[:50])
    elif damage == "longer":
        path.write_bytes(bytes(data) + b"x")
    else:
        path.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "pipe":
            os.mkfifo(path)
    assert await store.get(digest) is None
    assert store.damaged["disk"] == (damage in {"flipped", "cut", "longer"})
    if damage in {"link", "pipe"}:
        path.unlink()
        monkeypatch.setattr(store.disk, "_again_s", 0.0)
    await store.delete(digest)
    assert await store.put(digest, data)  # and can be kept anew
    await store.close()
    assert path.read_bytes() == data


async def test_a_folder_keeps_to_its_bound_and_to_its_own_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    store = in_folder(tmp_path, 250)
    groups = [group() for _ in range(3)]
    for one in groups:
        assert await store.put(*one)
        await written(store)
    assert not await store.put(*groups[2])
    await store.put(*group(251))
    await written(store)
    assert (store.total_bytes, len(store), store.disk.kept.evicted) == (200, 2, 1)
    assert await store.get(groups[0][0]) is None
    await store.close()
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"notes.txt", ".kvabr.lock", groups[1][0], groups[2][0]}
    os.utime(file_of(tmp_path, groups[2][0]), (1, 1))
    smaller = in_folder(tmp_path, 100)
    assert groups[1][0] in smaller
    assert groups[2][0] not in smaller
    await smaller.close()
    assert not file_of(tmp_path, groups[2][0]).exists()


async def test_a_folder_belongs_to_one(tmp_path):
    store = StoreTier(tmp_path, 100)
    with pytest.raises(UsageError):
        StoreTier(tmp_path, 100)
    await store.close()
    await store.close()
    await StoreTier(tmp_path, 100).close()
    (tmp_path / "file").touch()
    with pytest.raises(AssetError):
        StoreTier(tmp_path / "file", 100)


async def test_processes_share_a_bucket():
    url, (digest, data) = f"memory://groups-{DICE.randrange(1 << 60)}", group()
    one, other = StoreTier(url, 1000), StoreTier(url, 1000)
    assert await one.put(digest, data)
    assert digest not in other.kept
    assert await other.get(digest) == data
    assert digest in other.kept
    assert not await other.put(digest, data)
    small = StoreTier(url, 50)  # what it remembers is bounded; nothing of others is deleted
    assert await small.get(digest) == data
    assert await one.get(digest) == data


def test_evictions_are_reported_and_deletions_are_not():
    evicted = []
    lru = ByteLru(10, len, lambda key, value: evicted.append((key, value)))
    assert lru.add("a", b"12345")
    assert not lru.add("a", b"1")
    assert lru.add("b", b"12345")
    assert lru["a"] == lru.peek("a") == b"12345"
    assert lru.peek("b") == b"12345"
    assert lru.add("c", b"1")  # b: peeking is no use, reading is
    assert evicted == [("b", b"12345")]
    assert not lru.add("d", b"x" * 11)
    del lru["a"]
    assert (lru.evicted, lru.currsize, lru.peek("b")) == (1, 1, None)
