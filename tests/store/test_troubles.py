"""Stores that fail: overloaded, without conditional writes, cutting answers short, or lying about ranges."""

import asyncio
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kvabr import Client, Limits
from kvabr.cli.main import main
from kvabr.data import default_catalog
from kvabr.publish.publisher import Publisher
from kvabr.server.published_assets import PublishedAssets
from kvabr.store import cloud as cloud_module
from kvabr.store.cloud import CloudStore
from kvabr.store.locations import open_store
from kvabr.store.store import exists, listing
from kvabr.types.errors import (
    AssetError,
    ConnectionLostError,
    ForbiddenError,
    RequestError,
    StoreError,
    TransportError,
    UnauthorizedError,
    UsageError,
)
from tests.client.few_descriptors import PLAYS
from tests.store.flaky import ERROR, FlakyStore
from tests.store.publishing import PLAIN, cache_of, check, put

pytestmark = pytest.mark.process


def now(store, request, *args, **options):
    """Make a request, and wait for its answer."""
    return store.blocked(getattr(store, request)(*args, **options))


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(cloud_module, "_BACKOFF_S", 0.001)


@pytest.fixture
def flaky():
    made: list[FlakyStore] = []

    def make(*args, **options):
        made.append(FlakyStore(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def every(count, status, code=b"SlowDown"):
    """Answer all requests with an error but each ``count``-th."""
    seen = [0]

    def trouble(request):
        seen[0] += 1
        if count and seen[0] % count == 0:
            return False
        request.answer(status, ERROR % code)
        return True

    return trouble


async def test_a_store_that_is_overloaded_for_a_moment_is_asked_again(flaky):
    server = flaky(every(3, 503))
    bucket = CloudStore(server.url)
    assert await bucket.put_new("s/a", b"0123")
    assert bytes(await bucket.get("s/a", limit=9)) == b"0123"
    assert (await listing(bucket, "s/"))["s/a"].size == 4
    assert len(server.requests) == 9


@pytest.mark.parametrize("status", [503, 429, 500])
async def test_a_storm_of_refusals_ends_after_three_tries(flaky, status):
    server = flaky(every(0, status))
    bucket = CloudStore(server.url)
    with pytest.raises(RequestError, match=f"overloaded \\({status} SlowDown\\)") as caught:
        await bucket.get("s/a", limit=9)
    assert caught.value.retry_after_s
    assert len(server.requests) == 3
    with pytest.raises(RequestError, match="overloaded"):
        [part async for part in bucket.stream("s/a", 0, 9)]
    assert len(server.requests) == 4  # who plays decides whether to ask again
    with pytest.raises(AssetError, match="overloaded"):
        open_store(server.url).list()
    with pytest.raises(AssetError, match="overloaded"):
        put(server.url, PLAIN, [1, 2, 3])


@pytest.mark.parametrize("year", [0, 22026])
async def test_an_object_with_an_impossible_date_can_be_read(flaky, year):
    server = flaky()
    bucket = CloudStore(server.url)
    await bucket.put_new("s/b", b"0123")
    server.years["s/b"] = year
    assert bytes(await bucket.get("s/b", limit=9)) == b"0123"
    assert bytes(await bucket.get("s/b", 1, 3, limit=9)) == b"12"
    assert bytes(bucket.blocked(bucket.get("s/b", limit=9))) == b"0123"
    assert [bytes(part) async for part in bucket.stream("s/b", 0, 4)] == [b"0123"]
    with pytest.raises(RequestError, match="impossible date"):
        await listing(bucket, "s/")


@pytest.mark.parametrize("kind", ["/a/", "/i/", "/g/", "/m/", ""])
def test_caches_with_impossible_dates_are_played_and_managed(flaky, kind, capsys):
    server = flaky()
    put(server.url, PLAIN, list(range(20)))
    put(server.url, PLAIN, list(range(100, 120)))
    server.years[kind] = 22026
    for url in (server.url, server.web_url):
        with Client(url, model=PLAIN) as client:
            played = client.play(list(range(20)), deadline=20.0)
            assert played.tokens == 20
    for command in ("ls", "verify"):
        assert main(["store", command, server.url]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


def test_a_publisher_survives_a_store_that_refuses_two_of_three_requests(flaky):
    seen = Counter()

    def trouble(request):
        seen[request.command, request.path] += 1
        if seen[request.command, request.path] % 3 == 0 or "/probe/" in request.path:
            return False
        request.answer(503, ERROR % b"SlowDown")
        return True

    server = flaky(trouble)
    catalog, _ = put(server.url, PLAIN, list(range(20)))
    server.trouble = lambda _request: False
    assert check(open_store(server.url).open(catalog.namespace.prompt)) == catalog


def test_a_store_without_conditional_writes_is_found_out_before_anything_is_published(flaky):
    server = flaky(conditional=False)
    with pytest.raises(AssetError, match="does not honour conditional writes"):
        open_store(server.url, create=True)
    with pytest.raises(AssetError, match="does not honour conditional writes"):
        put(server.url, PLAIN, [1, 2, 3])
    assert all("/probe/" in key for key in server.objects)
    with pytest.raises(StoreError, match="upgrade the store"):
        now(CloudStore(server.url), "check_writable")


def test_a_store_that_knows_no_conditions_is_named(flaky):
    def trouble(request):
        if "If-None-Match" in request.headers:
            request.answer(501, ERROR % b"NotImplemented")
            return True
        return False

    with pytest.raises(AssetError, match=r"cannot be written \(501 NotImplemented\)"):
        put(flaky(trouble).url, PLAIN, [1, 2, 3])


async def test_answers_that_are_cut_short_or_of_another_range_are_refused(flaky):
    answers = {}

    def trouble(request):
        if request.command == "GET" and answers:
            request.answer(**answers)
            request.close_connection = True
            return True
        return False

    server = flaky(trouble)
    bucket = CloudStore(server.url)
    await bucket.put_new("s/a", bytes(1000))
    wrong = [
        {"status": 206, "body": bytes(50), "length": "100", "Content_Range": "bytes 0-99/1000"},  # cut short
        {"status": 206, "body": bytes(100), "Content_Range": "bytes 100-199/1000"},  # another range
        {"status": 200, "body": bytes(1000)},  # no range at all
        {"status": 206, "body": bytes(100)},  # does not say which
    ]
    for answer in wrong:
        answers.clear()
        answers.update(answer)
        with pytest.raises(TransportError, match="s/a"):
            await bucket.get("s/a", 0, 100, limit=100)
        with pytest.raises(TransportError, match="s/a"):
            [part async for part in bucket.stream("s/a", 0, 100)]
    answers.clear()
    assert len(await bucket.get("s/a", 0, 100, limit=100)) == 100


async def test_a_store_that_says_nothing_is_not_waited_for(flaky, monkeypatch):
    monkeypatch.setattr(cloud_module, "WAIT_S", 1)

    def silent(_request):
        time.sleep(30)
        return False

    with pytest.raises(ConnectionLostError, match="did not answer"):
        await CloudStore(flaky(silent).url).get("s/a", limit=1)


@pytest.mark.parametrize(
    ("status", "code", "kind", "match"),
    [
        (403, b"RequestTimeTooSkewed", UnauthorizedError, "clock is wrong"),
        (403, b"AccessDenied", ForbiddenError, "refuses these credentials"),
        (403, b"InvalidAccessKeyId", UnauthorizedError, "wrong or have expired"),
        (400, b"ExpiredToken", UnauthorizedError, "wrong or have expired"),
        (401, b"Unknown", UnauthorizedError, "wrong or have expired"),
        (404, b"NoSuchBucket", StoreError, "bucket does not exist"),
        (400, b"Strange", RequestError, "400 Strange"),
    ],
)
def test_refusals_are_told_in_words(flaky, status, code, kind, match):
    server = flaky(every(0, status, code))
    with pytest.raises(kind, match=match) as caught:
        now(CloudStore(server.url), "get", "s/a", limit=1)
    assert type(caught.value) is kind
    assert len(server.requests) == (2 if "expired" in match else 1)  # then with credentials that were read again


def test_a_lost_answer_is_no_lost_race(flaky):
    lost = []

    def trouble(request):
        if request.command == "PUT" and not lost:
            lost.append(request.path)
            request.store.objects[request.path.partition("?")[0]] = b"first"
            request.answer(503, ERROR % b"SlowDown")
            return True
        return False

    server = flaky(trouble)
    now(CloudStore(server.url), "check_writable")
    assert lost


@pytest.mark.parametrize("what", ["get", "list", "probe"])
def test_ctrl_c_does_not_wait_for_a_silent_store(flaky, monkeypatch, what):
    monkeypatch.setattr(cloud_module, "WAIT_S", 120)
    seen, given_up, over = threading.Event(), threading.Event(), threading.Event()

    def silent(request):
        seen.set()
        while not over.wait(0.01):
            if select.select([request.connection], [], [], 0)[0] and not request.connection.recv(1, socket.MSG_PEEK):
                given_up.set()
                break
        return True

    bucket = CloudStore(flaky(silent).url)
    ask = {"get": lambda: now(bucket, "get", "s/a", limit=1), "list": lambda: bucket.blocked(listing(bucket, "s/"))}
    ctrl_c = threading.Thread(target=lambda: seen.wait(600) and os.kill(os.getpid(), signal.SIGINT))
    ctrl_c.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask.get(what, lambda: now(bucket, "check_writable"))()
        assert not given_up.is_set()
    finally:
        over.set()
        ctrl_c.join()


async def test_an_http_cache_is_read_and_not_written(flaky):
    server = flaky()
    await CloudStore(server.url).put_new("s/a", b"0123456789")
    cache = CloudStore(server.web_url)
    assert bytes(await cache.get("s/a", limit=10)) == b"0123456789"
    assert bytes(await cache.get("s/a", 2, 4, limit=2)) == b"23"
    assert b"".join([part async for part in cache.stream("s/a", 5, 10)]) == b"56789"
    assert await exists(cache, "s/a")
    assert not await exists(cache, "s/b")
    for write in (cache.check_writable(), cache.put_new("s/b", b"x")):
        with pytest.raises(UsageError):
            await write


@pytest.mark.parametrize("web", [False, True])
def test_a_process_without_descriptors_is_told_so_and_plays_once_it_has_some(flaky, web):
    server = flaky()
    for number in range(PLAYS):
        put(server.url, PLAIN, [number] * 40)
    url = server.web_url if web else server.url
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-m", "tests.client.few_descriptors", url], capture_output=True, text=True, check=False
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 4, done.stderr
    known = {"played", "ExhaustedError", "PlayError", "IncompleteError"}
    for few, after in told:
        assert few.keys() <= known
        assert sum(few.values()) == PLAYS
        assert after == {"played": PLAYS}
    assert "played" not in told[0][0]


@pytest.fixture
def two_keys(flaky, monkeypatch, tmp_path):
    """A store, and a function that lets it accept one key only; and one that writes a key to the user's file."""
    server, file, accepted = flaky(), tmp_path / "credentials", ["old"]

    def trouble(request):
        told = request.headers.get("Authorization", "") + request.path
        if f"Credential={accepted[0]}" in told.replace("%3D", "="):
            return False
        request.answer(403, ERROR % b"ExpiredToken")
        return True

    server.trouble = trouble
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def give(key):
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    def accept(key):
        accepted[0] = key

    give("old")
    return server, give, accept


def test_credentials_that_were_replaced_are_read_again(two_keys, monkeypatch):
    monkeypatch.setattr(cloud_module, "_RENEW_S", 0.0)
    server, give, accept = two_keys
    tokens = list(range(20))
    name = put(server.url, PLAIN, tokens)[0].namespace.prompt
    bucket, assets, store = CloudStore(server.url), PublishedAssets(server.url), open_store(server.url)
    with Client(server.url, model=PLAIN, limits=Limits(memory_bytes=0)) as client:
        assert client.play(tokens, deadline=60.0).tokens == 20
        for number, key in enumerate(("new", "newer")):
            give(key)
            accept(key)
            # What is known of the store needs no more than a signed URL; then everything is asked for.
            assert client.play(tokens, deadline=60.0).tokens == 20
            late = [number + 50] * 20
            put(store, PLAIN, late)
            assert assets.refresh()
            assert client.play(late, deadline=60.0).tokens == 20
            assert client.models()
            assert list(bucket.blocked(listing(bucket, "m/"))) == ["m/0"]
            assert bucket.blocked(exists(bucket, f"a/{name}"))
        accept("none")
        give("nobody's")
        with pytest.raises(UnauthorizedError, match="wrong or have expired"):
            bucket.blocked(bucket.get("m/0", limit=1 << 20))


async def test_all_that_was_asked_for_with_old_credentials_is_asked_for_again(two_keys):
    server, give, accept = two_keys
    put(server.url, PLAIN, list(range(20)))
    bucket = CloudStore(server.url)
    await bucket.get("m/0", limit=1 << 20)
    give("new")
    accept("new")
    await asyncio.gather(*(bucket.get("m/0", limit=1 << 20) for _ in range(20)))
    assert bucket.made == 1


@pytest.fixture
def _uncollected():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("what", ["client", "web client", "groups", "publisher"])
def test_what_is_closed_leaves_no_descriptor_open_until_garbage_is_collected(flaky, what):
    server = flaky()
    put(server.url, PLAIN, list(range(20)))

    def use(number):
        if what == "publisher":
            publisher = Publisher(server.url, PLAIN, prior=default_catalog(), tracks=("FP16",))
            slot = publisher.reserve([number] * 20)
            slot.fill(tuple(cache_of(PLAIN, [number] * 20)), lambda _: None)
            publisher.close()
        else:
            limits = Limits(memory_bytes=0, disk=server.url if what == "groups" else None)
            url = server.web_url if what == "web client" else server.url
            with Client(url, model=PLAIN, limits=limits) as client:
                assert client.play(list(range(20)), deadline=60.0).tokens == 20

    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    use(100)
    gc.collect()
    before = descriptors()
    for number in range(10):
        use(number)
    wait_for(lambda: descriptors() <= before + 8)  # the server takes a moment to close its ends


def wait_for(condition):
    end_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
