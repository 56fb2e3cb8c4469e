"""Groups in an object store: shared by those who use it, checked when read, and left alone while it fails."""

from __future__ import annotations

import hashlib

import pytest

from kvabr.store.group_store import MemoryGroupStore, TieredGroupStore
from kvabr.store.locations import open_groups
from kvabr.store.objects.bucket import Bucket
from kvabr.store.objects.layout import group_key
from kvabr.types.digests import digest_of
from kvabr.types.errors import UsageError

DATA = memoryview(b"0123456789" * 100)
DIGEST = hashlib.sha256(DATA).hexdigest()


async def test_what_one_has_written_another_reads(store_url):
    one, other = (open_groups(store_url, 1 << 20) for _ in range(2))
    Bucket.open(store_url).probe_sync()
    assert await one.put(DIGEST, DATA)
    assert DIGEST not in other
    assert await other.get(DIGEST) == DATA
    assert DIGEST in other
    assert not await open_groups(store_url, 1 << 20).put(DIGEST, DATA)
    blake = digest_of(DATA, "blake3")
    assert await one.put(blake, DATA)
    assert await other.get(blake) == DATA
    assert await other.delete(DIGEST)
    assert await one.get(DIGEST) is None
    assert DIGEST not in one


async def test_a_damaged_object_is_deleted_and_counted(store_url):
    store, bucket = open_groups(store_url, 1 << 20), Bucket.open(store_url)
    await bucket.put(group_key(DIGEST), b"something else")
    assert await store.get(DIGEST) is None
    assert store.damaged == 1
    assert await bucket.head(group_key(DIGEST)) is None


async def test_groups_move_up_into_memory_and_down_in_the_background(store_url):
    Bucket.open(store_url).probe_sync()
    store = TieredGroupStore(MemoryGroupStore(1 << 20), open_groups(store_url, 1 << 20))
    assert await store.put(DIGEST, DATA)
    await store.close()
    again = TieredGroupStore(MemoryGroupStore(1 << 20), open_groups(store_url, 1 << 20))
    assert await again.find(DIGEST) == (DATA, "disk")
    assert await again.find(DIGEST) == (DATA, "memory")


async def test_a_store_that_fails_is_told_once_and_left_alone(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    told = []
    store = open_groups("s3://bucket?endpoint=http://127.0.0.1:1", 1 << 20, on_failure=told.append)
    for _ in range(3):
        assert await store.get(DIGEST) is None
        assert not await store.put(DIGEST, DATA)
    assert len(told) == 1
    assert "cannot be reached" in told[0]


def test_what_is_no_store_is_refused():
    with pytest.raises(UsageError, match="s3://BUCKET/PREFIX"):
        open_groups("moqt://host/", 1)
