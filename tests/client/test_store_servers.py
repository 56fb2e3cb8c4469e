"""Stores behind real servers: SeaweedFS, nginx as a cache, and gateways that answer with what nobody published."""

import asyncio
import contextlib
import gzip
import logging
import urllib.request

import pytest

from kvabr.cli.main import main
from kvabr.client.async_client import AsyncClient
from kvabr.link.objects import index as store_index
from kvabr.store.cloud import CloudStore
from kvabr.store.locations import open_asset
from kvabr.store.store import listing
from kvabr.types.errors import PlayError, Reason, RequestError, StoreError, UnauthorizedError
from tests.client.served import LIMIT_S
from tests.client.stored import Fault, WebServer, memory_url, put_asset
from tests.client.test_play import close
from tests.nginx import NGINX, Nginx
from tests.store.flaky import FlakyStore
from tests.toymodel import SPEC, prompt

pytestmark = pytest.mark.process

LONG, SHORT = prompt(160).tokens, prompt(70).tokens
SLOW_S = 8.0
"""Longer than nginx makes others wait for an answer unless it is told to."""


@pytest.fixture
def store(seaweed, root):
    """URL of a store in SeaweedFS with the two assets of the toy model."""
    url = seaweed.url()
    for name in ("short", "long"):
        put_asset(url, open_asset(root / name))
    return url


@pytest.fixture
def as_reader(seaweed, store, monkeypatch):
    """From here on, one who may only GET."""
    del store
    for name, value in seaweed.environment("reader").items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("as_reader")
async def test_who_may_only_get_plays_by_prompt_and_by_name(store, short):
    async with AsyncClient(store) as client:
        for tokens in (LONG, SHORT, (*SHORT[:64], 1, 2, 3)):
            played = await client.play(tokens, deadline=LIMIT_S, model=SPEC)
            assert played.tokens >= 64
            assert close(played.kv, LONG[: played.tokens])
        played = await client.play_asset(short.namespace, deadline=LIMIT_S)
        assert close(played.kv, SHORT)
        assert await client.find([5] * 90, model=SPEC) is None


async def test_wrong_credentials_are_an_error_that_says_where_they_come_from(store, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "xyzzy-xyzzy")
    async with AsyncClient(store) as client:
        with pytest.raises(UnauthorizedError, match="AWS_ACCESS_KEY_ID") as caught:
            await client.connect()
    assert "xyzzy" not in str(caught.value)


@contextlib.asynccontextmanager
async def cached(asset, folder, *faults, slice_size="1m"):
    """URL of nginx, as documented, before a store with an asset; that store; and the objects with its frames."""
    if NGINX is None:
        pytest.skip("nginx is not installed: apt-get install nginx")
    source = memory_url()
    objects = put_asset(source, asset)
    async with WebServer(source, list(faults)) as store:
        nginx = Nginx(folder / "nginx", store.url.removeprefix("http://"), slice_size=slice_size)
        try:
            yield nginx.url, store, objects
        finally:
            nginx.stop()


async def test_a_cache_of_slices_in_front_serves_the_same_play_twice(tmp_path, root):
    async with cached(open_asset(root / "long"), tmp_path, slice_size="16k") as (url, store, _):
        asked = []
        for _ in range(2):
            async with AsyncClient(url) as client:
                played = await client.play(LONG, deadline=LIMIT_S, model=SPEC)
                assert close(played.kv, LONG)
                connection = await client.connect()
                track = played.catalog.by_name["FP16"]
                for group, size in enumerate(track.bytes):  # whatever a play takes of it, now all of a track has come
                    download = connection.fetch(played.catalog.namespace, "FP16", group, limit=size, exact=True)
                    while await download.read():
                        pass
                    assert download.has_digest(track.digests[group])
            asked.append([get for get in store.asked if get[0].startswith("g/")])
        # The second time the cache had every slice; the store was asked for no byte twice.
        assert asked[0] == asked[1]
        assert len(set(asked[0])) == len(asked[0]) > 1


async def test_a_store_that_is_slow_is_still_asked_once(tmp_path, root):
    """nginx lets those who wait for an answer ask themselves after a while: that would bury a store which is slow."""

    def slow(key, _before):
        return Fault(delay_s=SLOW_S) if key.startswith("g/") else None

    async with cached(open_asset(root / "long"), tmp_path, slow) as (url, store, (name, *_)):

        def read():
            with urllib.request.urlopen(f"{url}/{name}", timeout=LIMIT_S) as answer:  # noqa: S310 - ours
                return answer.read()

        bodies = await asyncio.gather(*(asyncio.to_thread(read) for _ in range(8)))
        assert len(set(bodies)) == 1
        assert [key for key, *_ in store.asked] == [name]


MODELS = b'{"models": [{"model": "test/model"}]}'
BODIES = {"page": b"<html>Please log in</html>", "gzip": gzip.compress(MODELS), "cut": MODELS[:20], "text": b"not now"}


@pytest.fixture
def gateway(request):
    """An HTTP server that answers every GET with one body, whatever range is asked for, and knows nothing else."""

    def one_body(asked):
        known = asked.command == "GET"
        asked.answer(200 if known else 501, request.param if known else b"<html>Unsupported method</html>")
        return True

    with contextlib.closing(FlakyStore(one_body)) as made:
        made.bucket_url = f"{made.url}&anonymous=true"
        yield made


@pytest.mark.parametrize("gateway", BODIES.values(), ids=BODIES, indirect=True)
async def test_strange_answers_are_told_once_and_asked_for_once(gateway, caplog, monkeypatch):
    monkeypatch.setattr(store_index, "_WAIT_S", 60.0)  # on a slow machine it is asked for again before the answer
    async with AsyncClient(gateway.web_url) as client:
        for most in (2, 1, 1):
            gateway.requests.clear()
            with caplog.at_level(logging.WARNING, "kvabr.store"), pytest.raises(PlayError) as failed:
                await client.play(list(range(300)), deadline=60.0)
            assert gateway.web_url in str(failed.value)
            assert 1 <= len(gateway.requests) <= most
        assert client.metrics.value("kvabr_client_wrong_answers_total") >= 1
    (record,) = [each for each in caplog.records if each.name == "kvabr.store"]
    assert gateway.web_url in record.getMessage()


@pytest.mark.parametrize("gateway", BODIES.values(), ids=BODIES, indirect=True)
def test_a_web_server_is_no_empty_store(gateway):
    bucket = CloudStore(gateway.bucket_url)
    for ask in (listing(bucket, "a/"), bucket.check_writable()):
        with pytest.raises((StoreError, RequestError)) as failed:
            bucket.blocked(ask)
        assert "correct the URL or the endpoint" in str(failed.value)
    with pytest.raises(RequestError) as failed:
        bucket.blocked(bucket.put_new("a/x", b""))
    assert failed.value.reason == Reason.WRONG


@pytest.mark.parametrize("gateway", [BODIES["page"]], indirect=True)
def test_commands_say_that_a_web_server_is_no_store(gateway, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (("store", "ls"), ("store", "verify"), ("inspect",)):
        assert main([*words, gateway.bucket_url]) == 1
        said = capsys.readouterr()
        assert "it is a page" in said.err
        assert "no assets" not in said.out
