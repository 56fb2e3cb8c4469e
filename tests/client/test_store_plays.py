"""Plays out of object stores: the same caches as from an origin, with few requests."""

import asyncio

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import fetch_catalog, find_prefix
from kvabr.client.options import PlayOptions
from kvabr.client.origins import dialling
from kvabr.client.result import NothingCached, Played
from kvabr.store.locations import open_asset
from kvabr.types.errors import NotFoundError, UsageError
from kvabr.types.naming import TrackNamespace
from kvabr.types.peer import PeerOptions
from tests.client.classes import HYBRID, INDEXED, SLIDING, WINDOWS, numbers, published
from tests.client.served import LIMIT_S
from tests.client.stored import WebServer, memory_url, put_asset
from tests.client.test_play import close
from tests.toymodel import SPEC, prompt

LONG, SHORT = prompt(160).tokens, prompt(70).tokens


@pytest.fixture
def store(root):
    """URL of a store with the two assets of the toy model."""
    url = memory_url()
    for name in ("short", "long"):
        put_asset(url, open_asset(root / name))
    return url


async def played(url, tokens=LONG, **options):
    async with AsyncClient(url, options=PlayOptions(**options)) as client:
        return await client.play(tokens, deadline=LIMIT_S, model=SPEC)


@pytest.mark.parametrize("tokens", [LONG, SHORT, SHORT[:48], (*LONG, 1, 2, 3), (*LONG[:100], 5, 5)])
async def test_a_prompt_is_played_as_from_an_origin(store, tokens):
    got = await played(store, tokens)
    assert isinstance(got, Played)
    shared = next(
        (n for n, pair in enumerate(zip(tokens, LONG, strict=False)) if pair[0] != pair[1]), min(len(tokens), 160)
    )
    assert got.tokens >= shared // 16 * 16 > 0
    assert close(got.kv, LONG[: got.tokens])


async def test_an_asset_is_played_by_name(store, short, long):
    async with AsyncClient(store) as client:
        for catalog in (short, long):
            got = await client.play_asset(catalog.namespace, deadline=LIMIT_S)
            assert got.tokens == catalog.tokens
            assert close(got.kv, LONG[: got.tokens])
        assert [spec.digest() for spec in await client.models()] == [SPEC.digest()]


async def test_what_is_not_there_is_not_found(store, long):
    async with AsyncClient(store) as client:
        assert isinstance(await client.play([9] * 50, deadline=LIMIT_S, model=SPEC), NothingCached)
        with pytest.raises(NotFoundError, match="no such asset"):
            await client.find_asset(TrackNamespace(SPEC.model, "f" * 64))
        with pytest.raises(NotFoundError, match="is of the model"):
            await client.find_asset(TrackNamespace("another", long.namespace.prompt))


async def test_a_store_without_a_model_says_so():
    async with AsyncClient(memory_url()) as client:
        assert await client.models() == []
        assert isinstance(await client.play(LONG, deadline=LIMIT_S, model=SPEC), NothingCached)


async def test_what_is_published_later_is_found_by_the_same_client(root):
    url = memory_url()
    async with AsyncClient(url) as client:
        assert await client.find(SHORT, model=SPEC) is None
        put_asset(url, open_asset(root / "short"))
        assert (await client.find(SHORT, model=SPEC)).catalog.tokens == 70


async def test_the_catalog_of_a_lookup_is_the_published_one(store, long):
    async with dialling(store) as connection:
        found = await find_prefix(connection, LONG, SPEC)
        named = await fetch_catalog(connection, long.namespace)
    for name, track in found.catalog.by_name.items():
        assert (track.bytes, track.digests) == (named.catalog.by_name[name].bytes, named.catalog.by_name[name].digests)
        assert track.loss == pytest.approx(named.catalog.by_name[name].loss)
    assert found.catalog.namespace == named.catalog.namespace == long.namespace


async def test_a_lookup_takes_a_round_and_adjoining_groups_one_get(root):
    url = memory_url()
    put_asset(url, open_asset(root / "long"))
    async with WebServer(url) as server, AsyncClient(server.url) as client:
        found = await client.find(LONG, model=SPEC)
        server.asked.clear()
        again = await client.find(LONG, model=SPEC)
        assert again.catalog == found.catalog
        assert server.asked == []  # pages do not change
        connection = await client.connect()
        track = found.catalog.by_name["FP16"]
        downloads = [
            connection.fetch(found.catalog.namespace, "FP16", group, limit=track.bytes[group], exact=True)
            for group in (3, 1, 2, 0)
        ]
        for download in downloads:
            while await download.read():
                pass
        assert len(server.asked) == 1
        first, end = server.asked[0][1:]
        assert end - first == sum(track.bytes[:4])
        assert all(
            download.has_digest(track.digests[group]) for group, download in zip((3, 1, 2, 0), downloads, strict=True)
        )


@pytest.mark.parametrize("spec", [SLIDING, INDEXED, WINDOWS, HYBRID], ids=lambda spec: spec.model.partition("/")[2])
@pytest.mark.parametrize("more", [0, 3])
async def test_a_model_of_several_classes_is_played(tmp_path, spec, more):
    tokens = list(range(330))  # a page of 16 groups, and one of 5 whose last is short
    published(tmp_path, spec, tokens)
    url = memory_url()
    put_asset(url, open_asset(tmp_path / spec.model.rpartition("/")[2]))
    async with AsyncClient(url) as client:
        got = await client.play([*tokens, *range(1000, 1000 + more)], deadline=LIMIT_S, model=spec)
    exact = numbers(spec, tokens)
    assert got.tokens == 330
    for kv, whole, span in zip(got.parts, exact, got.catalog.spans, strict=True):
        seen = kv[:, :, :, -span.tokens :].float() if kv.shape[3] != span.tokens else kv.float()
        assert (seen - whole[:, :, :, -span.tokens :]).abs().max() <= 1.5


async def test_less_is_found_of_a_state_than_of_the_other_classes(tmp_path):
    published(tmp_path, HYBRID, list(range(330)))
    url = memory_url()
    put_asset(url, open_asset(tmp_path / "hybrid"))
    async with AsyncClient(url) as client:
        got = await client.play([*range(300), *range(2000, 2020)], deadline=LIMIT_S, model=HYBRID)
    assert isinstance(got, NothingCached)
    assert got.limited_by == "state"


async def test_a_play_leaves_nothing_behind(store):
    before = asyncio.all_tasks()
    async with WebServer(store) as server:
        await played(server.url)
        assert asyncio.all_tasks() - before <= server._tasks
    async with AsyncClient(store) as client:
        playing = asyncio.create_task(client.play(LONG, deadline=LIMIT_S, model=SPEC))
        await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("s3://bucket/prefix", {"fingerprint": "0" * 64}, "credentials of an object store come from the environment"),
        ("s3://bucket/prefix", {"token": "x"}, "credentials of an object store come from the environment"),
        ("s3://bucket/prefix", {"timeout_s": 0}, "timeout_s is 0"),
        (f"s3://bucket/prefix/{'a' * 64}", {}, "#kvcache:MODEL/aaa"),
        ("s3://user:secret@bucket/prefix", {}, "must not have credentials"),
        ("ftp://host/", {}, "moqt://"),
    ],
)
def test_wrong_urls_and_options_are_refused_before_anything_is_asked(url, options, why):
    with pytest.raises(UsageError, match=why) as caught:
        AsyncClient(url, PeerOptions(**options))
    assert "secret" not in str(caught.value)
