"""Buckets: every kind of store does the same, and what goes wrong is told."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvabr.store.objects.bucket import IMMUTABLE, Bucket
from kvabr.types.errors import NotFoundError, RequestError, StoreError, TransportError, UnauthorizedError, UsageError


async def test_objects_are_written_once_read_listed_and_deleted(store_url):
    bucket = Bucket.open(store_url)
    bucket.probe_sync()
    assert await bucket.put_new("s/o/a", b"0123456789")
    assert not await bucket.put_new("s/o/a", b"other")
    assert bytes(await bucket.get("s/o/a", limit=10)) == b"0123456789"
    assert bytes(await bucket.get("s/o/a", 2, 5, limit=3)) == b"234"
    assert bytes(await bucket.get("s/o/a", 7, limit=10)) == b"789"
    assert bytes(await bucket.get("s/o/a", 7, 100, limit=100)) == b"789"  # the object ends there
    assert b"".join([part async for part in bucket.stream("s/o/a", 1, 9)]) == b"12345678"
    with pytest.raises(RequestError, match="more than the 5"):
        await bucket.get("s/o/a", limit=5)
    with pytest.raises(RequestError, match="shorter than was asked for"):
        await bucket.get("s/o/a", 50, 60, limit=10)
    info = await bucket.head("s/o/a")
    assert (info.key, info.size) == ("s/o/a", 10)
    assert info.etag
    assert info.modified_s > 1e9
    assert await bucket.head("s/o/b") is None
    with pytest.raises(NotFoundError, match="s/o/b"):
        await bucket.get("s/o/b", limit=5)
    await bucket.put("g/x", b"group")
    await bucket.put("g/x", b"group again")
    assert [one.key async for one in bucket.list("s/")] == ["s/o/a"]
    assert sorted([one.key async for one in bucket.list("")]) == ["g/x", "s/o/a"]
    assert [one async for one in bucket.list("nothing/")] == []
    await bucket.delete(["gone", "s/o/a", "gone too"])
    assert await bucket.head("s/o/a") is None
    assert await bucket.head("g/x") is not None


def test_threads_have_the_same(store_url):
    bucket = Bucket.open(store_url)
    bucket.probe_sync()
    assert bucket.put_new_sync("a/b", b"01234")
    assert not bucket.put_new_sync("a/b", b"x")
    assert bytes(bucket.get_sync("a/b", 1, 3, limit=2)) == b"12"
    assert bucket.head_sync("a/b").size == 5
    assert bucket.head_sync("a/c") is None
    bucket.put_sync("a/b", b"new")
    assert [(one.key, one.size) for one in bucket.list_sync("a/")] == [("a/b", 3)]
    bucket.delete_sync(["a/b"])
    assert list(bucket.list_sync("")) == []


def test_of_many_writers_one_wins(store_url):
    buckets = [Bucket.open(store_url) for _ in range(8)]
    for number in range(4):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda one: one[1].put_new_sync(f"s/{number}", b"%d" % one[0]), enumerate(buckets)))  # noqa: B023
        assert sum(won) == 1
        assert bytes(buckets[0].get_sync(f"s/{number}", limit=9)) == b"%d" % won.index(True)


def test_tenants_and_prefixes_do_not_meet(seaweed):
    one, other = (Bucket.open(seaweed.url("shared", tenant=name)) for name in ("one", "other"))
    deeper = Bucket.open(seaweed.url("shared/v1", tenant="one"))
    one.put_sync("s/a", b"mine")
    assert other.head_sync("s/a") is None
    assert list(deeper.list_sync("")) == []
    assert "s/a" in [each.key for each in one.list_sync("")]


def test_objects_may_be_kept_by_http_caches(seaweed):
    bucket = Bucket.open(seaweed.url())
    for key in ("s/a", "a/b", "probe/c"):
        bucket.put_new_sync(key, b"x")
    store = bucket._reader()
    told = {key: store.get(bucket.prefix + key).attributes["Cache-Control"] for key in ("s/a", "a/b", "probe/c")}
    assert told == {"s/a": IMMUTABLE, "a/b": "public, max-age=5", "probe/c": "no-store"}


def test_a_reader_may_read_and_nothing_else(seaweed, monkeypatch):
    url = seaweed.url()
    Bucket.open(url).put_new_sync("s/a", b"x")
    for name, value in seaweed.environment("reader").items():
        monkeypatch.setenv(name, value)
    reader = Bucket.open(url)
    assert bytes(reader.get_sync("s/a", limit=1)) == b"x"
    assert reader.head_sync("s/b") is None
    for denied in (
        lambda: reader.put_new_sync("s/b", b"x"),
        lambda: reader.delete_sync(["s/a"]),
        lambda: list(reader.list_sync("")),
        reader.probe_sync,
    ):
        with pytest.raises(UnauthorizedError, match="refuses these credentials"):
            denied()


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_wrong_credentials_are_told_and_not_repeated(seaweed, monkeypatch, wrong):
    name = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY"}[wrong]
    monkeypatch.setenv(name, "hidden")
    with pytest.raises(UnauthorizedError, match="AWS_ACCESS_KEY_ID and") as caught:
        Bucket.open(seaweed.url()).get_sync("s/a", limit=1)
    assert "hidden" not in str(caught.value)


def test_a_missing_bucket_is_told(seaweed):
    with pytest.raises(StoreError, match="bucket does not exist"):
        Bucket.open(seaweed.url(bucket="not-there")).get_sync("s/a", limit=1)


def test_a_store_that_does_not_answer_is_told(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(TransportError, match="cannot be reached"):
        Bucket.open("s3://bucket?endpoint=http://127.0.0.1:1").get_sync("s/a", limit=1)


def test_a_folder_that_does_not_exist_is_told(tmp_path):
    bucket = Bucket.open(f"file://{tmp_path}/nothing?layout=objects")
    with pytest.raises(StoreError, match="no such folder"):
        bucket.get_sync("s/a", limit=1)
    bucket.put_new_sync("s/a", b"x")
    assert bytes(bucket.get_sync("s/a", limit=1)) == b"x"


def test_keys_of_a_profile_are_used(seaweed, monkeypatch, tmp_path):
    key, secret = seaweed.keys["admin"]
    file = tmp_path / "credentials"
    file.write_text(f"[mine]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert Bucket.open(seaweed.url()).put_new_sync("s/a", b"x")
    monkeypatch.setenv("AWS_PROFILE", "yours")
    with pytest.raises(UsageError, match="'yours'"):
        Bucket.open(seaweed.url()).put_new_sync("s/a", b"x")


def test_the_endpoint_may_come_from_the_environment(seaweed, monkeypatch):
    url = seaweed.url()
    Bucket.open(url).put_new_sync("s/a", b"x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    assert Bucket.open(url.partition("?")[0]).head_sync("s/a").size == 1


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"\.\[stores\]"):
        Bucket.open("memory://name-x")


async def test_a_stream_that_is_closed_ends(seaweed):
    bucket = Bucket.open(seaweed.url())
    data = bytes(3 << 20)
    await bucket.put_new("s/a", data)
    stream = bucket.stream("s/a", 0, len(data))
    assert len(await anext(stream)) < len(data)
    await stream.aclose()
    reading = asyncio.create_task(bucket.get("s/a", limit=len(data)))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert bytes(await bucket.get("s/a", limit=len(data))) == data


def test_an_endpoint_that_cannot_be_is_told(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "weed:8333")
    with pytest.raises(UsageError, match=r"AWS_ENDPOINT_URL must be http://HOST:PORT"):
        Bucket.open("s3://bucket").get_sync("s/a", limit=1)
