"""Groups by digest, in memory and on disk: bounded, checked at every read, and nobody else's files are touched."""

from __future__ import annotations

import hashlib
import os
import random

import pytest

from kvabr.client.metrics import NodeMetrics
from kvabr.store.disk_cache import Shelf
from kvabr.store.group_cache import GroupStore
from kvabr.types.errors import AssetError, UsageError

DICE = random.Random(7)


def group(size=100):
    data = DICE.randbytes(size)
    return hashlib.sha256(data).hexdigest(), memoryview(data)


async def test_the_least_recently_used_make_room():
    metrics = NodeMetrics()
    store = GroupStore(350, metrics)
    (a, data), (b, _), (c, _), (d, _) = groups = [group() for _ in range(4)]
    for digest, one in groups[:3]:
        store.put(digest, one)
    assert await store.get(a) == (data, "memory")
    store.put(*groups[3])
    assert [digest in store for digest in (a, b, c, d)] == [True, False, True, True]
    assert store.total_bytes == metrics.store_bytes.value("memory") == 300
    assert metrics.store_evicted_total.value("memory") == 1
    assert await store.get(b) is None
    store.put(*group(351))
    assert store.total_bytes == 300  # what can never fit throws nothing out
    store.put(*group(350))
    assert store.total_bytes == 350


async def test_no_memory_keeps_nothing():
    store = GroupStore(0, NodeMetrics())
    digest, data = group()
    store.put(digest, data)
    assert digest not in store


async def test_what_changed_in_memory_is_not_given_out():
    metrics = NodeMetrics()
    store = GroupStore(1000, metrics)
    data = bytearray(DICE.randbytes(100))
    digest = hashlib.sha256(data).hexdigest()
    store.put(digest, memoryview(data))
    data[50] ^= 1
    assert await store.get(digest) is None
    assert digest not in store
    assert store.total_bytes == 0
    assert metrics.store_damaged_total.value("memory") == 1


async def test_the_disk_outlives_the_process(tmp_path):
    metrics = NodeMetrics()
    store = GroupStore(150, metrics, Shelf(tmp_path / "groups", 1000))
    groups = [group() for _ in range(3)]
    for digest, data in groups:
        store.put(digest, data)
    await store.close()
    store = GroupStore(150, metrics, Shelf(tmp_path / "groups", 1000))
    assert all(digest in store for digest, _ in groups)
    assert metrics.store_groups.value("disk") == 3
    assert await store.get(groups[0][0]) == (groups[0][1], "disk")
    assert (await store.get(groups[0][0]))[1] == "memory"
    await store.close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone", "link", "pipe"])
async def test_a_damaged_file_is_found_out(tmp_path, damage):
    metrics = NodeMetrics()
    store = GroupStore(0, metrics, Shelf(tmp_path, 1000))
    digest, data = group()
    store.put(digest, data)
    await store.close()
    store = GroupStore(0, metrics, Shelf(tmp_path, 1000))
    path = tmp_path / f"{digest}.group"
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
    assert digest not in store
    assert metrics.store_groups.value("disk") == metrics.store_bytes.value("disk") == 0
    assert metrics.store_damaged_total.value("disk") == (damage in {"flipped", "cut", "longer"})
    store.put(digest, data)  # and can be kept anew
    await store.close()
    assert path.read_bytes() == data


def test_a_shelf_keeps_to_its_bound_and_to_its_own_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ("ab" * 32 + ".7.partial")).write_text("half")
    shelf = Shelf(tmp_path, 250)
    groups = [group() for _ in range(3)]
    assert all(shelf.write(*one) for one in groups)
    assert not shelf.write(*groups[2])
    assert not shelf.write(*group(251))
    assert (shelf.total_bytes, len(shelf), shelf.evicted) == (200, 2, 1)
    assert shelf.read(groups[0][0]) is None
    shelf.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes.txt", "kvabr.lock", f"{groups[1][0]}.group", f"{groups[2][0]}.group"}
    os.utime(tmp_path / f"{groups[2][0]}.group", (1, 1))
    smaller = Shelf(tmp_path, 100)
    assert groups[1][0] in smaller
    assert groups[2][0] not in smaller
    smaller.close()


def test_a_folder_belongs_to_one(tmp_path):
    shelf = Shelf(tmp_path, 100)
    with pytest.raises(UsageError, match="another process"):
        Shelf(tmp_path, 100)
    shelf.close()
    Shelf(tmp_path, 100).close()
    (tmp_path / "file").touch()
    with pytest.raises(AssetError, match="name another folder"):
        Shelf(tmp_path / "file", 100)
