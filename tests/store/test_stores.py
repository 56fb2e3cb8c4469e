"""Every kind of store keeps one contract."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvabr.store.locations import open_objects, open_store, split_asset
from kvabr.store.store import exists, listing
from kvabr.store.url import StoreUrl
from kvabr.types.errors import MissingAssetError, NotFoundError, RequestError, UsageError


async def test_objects_are_written_once_read_listed_and_deleted(place):
    store = open_objects(place)
    await store.check_writable()
    assert await store.put_new("g/o/a", b"0123456789")
    assert not await store.put_new("g/o/a", b"other")
    assert bytes(await store.get("g/o/a", limit=10)) == b"0123456789"
    assert bytes(await store.get("g/o/a", 2, 5, limit=3)) == b"234"
    assert bytes(await store.get("g/o/a", 7, limit=10)) == b"789"
    assert bytes(await store.get("g/o/a", 7, 100, limit=100)) == b"789"  # the object ends there
    assert b"".join([bytes(part) async for part in store.stream("g/o/a", 1, 9)]) == b"12345678"
    with pytest.raises(RequestError):
        await store.get("g/o/a", limit=5)
    with pytest.raises(NotFoundError):
        await store.get("g/o/b", limit=5)
    assert await exists(store, "g/o/a")
    assert not await exists(store, "g/o/b")
    await store.put_new("p/x", b"profile")
    found = await listing(store, "g/")
    assert [(one.name, one.size) for one in found.values()] == [("g/o/a", 10)]
    assert all(one.modified_s > 1e9 for one in found.values())
    assert sorted(await listing(store, "")) == ["g/o/a", "p/x"]
    assert await listing(store, "nothing/") == {}
    await store.delete(["gone", "g/o/a", "gone/too"])
    assert sorted(await listing(store, "")) == ["p/x"]
    store.close()


def test_threads_use_it_too(place):
    store = open_objects(place)
    assert store.blocked(store.put_new("a/b", b"01234"))
    assert bytes(store.blocked(store.get("a/b", 1, 3, limit=2))) == b"12"
    assert store.started(store.put_new("a/c", b"x")).result(60)
    with pytest.raises(NotFoundError):
        store.blocked(store.get("a/d", limit=1))


async def test_a_thread_with_an_event_loop_may_block_for_a_folder(tmp_path):
    store = open_objects(tmp_path / "objects")
    assert store.blocked(store.put_new("a/b", b"x"))
    assert await exists(store, "a/b")


def test_of_many_writers_one_wins(place):
    stores = [open_objects(place) for _ in range(8)]
    for number in range(4):
        with ThreadPoolExecutor(8) as pool:
            name = f"g/{number}"
            won = list(pool.map(lambda one: one[1].blocked(one[1].put_new(name, b"%d" % one[0])), enumerate(stores)))  # noqa: B023
        assert sum(won) == 1
        assert bytes(stores[0].blocked(stores[0].get(name, limit=9))) == b"%d" % won.index(True)


async def test_large_objects_and_many_requests_at_once(place):
    store, data = open_objects(place), bytes(range(256)) * 4096
    await asyncio.gather(*(store.put_new(f"g/{number}", data) for number in range(8)))
    found = await asyncio.gather(*(store.get(f"g/{number}", number, limit=len(data)) for number in range(8)))
    assert [bytes(one) for one in found] == [data[number:] for number in range(8)]


@pytest.mark.parametrize("name", ["../x", "a//b", "/etc/passwd", "a/.hidden", ""])
async def test_names_do_not_lead_out_of_a_folder(tmp_path, name):
    from kvabr.types.errors import FormatError

    with pytest.raises(FormatError):
        await open_objects(tmp_path / "objects").put_new(name, b"x")


def test_locations_name_stores_and_assets(tmp_path):
    digest = "ab" * 32
    assert split_asset("s3://b/p?endpoint=http://h:1") == ("s3://b/p?endpoint=http://h:1", None)
    assert split_asset(f"s3://b/p/{digest}?endpoint=http://h:1") == ("s3://b/p?endpoint=http://h:1", digest)
    assert split_asset(tmp_path / digest) == (str(tmp_path), digest)
    assert split_asset(f"/{digest}") == ("/", digest)
    for wrong in ("ftp://host/x", "moqt://host/"):
        with pytest.raises(UsageError):
            open_store(wrong)
    with pytest.raises(UsageError):
        open_store("https://cache/prefix")  # nothing can be listed or written there
    with pytest.raises(MissingAssetError):
        open_store(tmp_path / "nothing", must_exist=True)
    assert open_store(f"file://{tmp_path}").location == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("s3://bucket", ""),
        ("s3://bucket/team/a?endpoint=http://127.0.0.1:8333&region=eu-1", "team/a/"),
        ("gs://bucket/x?anonymous=true", "x/"),
        ("az://container/x?account=me", "x/"),
        ("https://host:8080/x", "x/"),
    ],
)
def test_a_url_is_parsed_and_written_again(url, root):
    parsed = StoreUrl.parse(url)
    assert parsed.root == root
    assert StoreUrl.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s4://bucket", "s3://BUCKET/PREFIX"),
        ("s3://", "name of a bucket"),
        ("s3://b:99999999", "not a URL"),
        ("s3://b!cket/x", "name of a bucket"),
        ("s3://bucket/a/../b", "a prefix may have"),
        ("s3://bucket/a//b", "a prefix may have"),
        ("s3://bucket/%00", "a prefix may have"),
        ("s3://bucket/x#y", "a #fragment"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?regoin=a", "did you mean 'region'"),
        ("s3://bucket?region", "NAME=VALUE"),
        ("s3://bucket?anonymous=yes", "true or false"),
        ("s3://bucket?endpoint=ftp://x", "endpoint"),
        ("s3://bucket?endpoint=http://[1,2]", "endpoint"),
        ("s3://bucket?endpoint=http://x:99999", "endpoint"),
        ("s3://bucket?endpoint=http://:80", "endpoint"),
        (f"s3://bucket?endpoint=http://b{chr(252)}cher.example", "endpoint"),
        (f"http://b{chr(252)}cher.example/caches", "name of a bucket or host"),
        ("s3://bucket?region=eu%0A1", "region must have"),
        ("az://bucket?account=a/b", "account must have"),
        ("s3://bucket?endpoint=http://u:hidden@x", "endpoint"),
    ],
)
def test_a_wrong_url_is_refused(url, match):
    with pytest.raises(UsageError, match=match):
        StoreUrl.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hidden@bucket/x",
        "s3://bucket/x?secret_access_key=hidden",
        "s3://bucket/x?token=hidden",
        "az://bucket/x?sig=hidden",
        "https://me:hidden@host/x",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID") as caught:
        StoreUrl.parse(url)
    assert "hidden" not in str(caught.value)


def test_an_object_of_a_bucket_is_named_by_a_url_that_opens_its_store():
    pytest.importorskip("obstore", reason="obstore is not installed: tools/setup-venv")
    store = open_objects("s3://bucket/prefix?endpoint=http://127.0.0.1:9")
    assert split_asset(store.where("f" * 64)) == (store.url, "f" * 64)
