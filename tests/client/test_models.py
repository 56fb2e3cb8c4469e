"""Whose cache is played when nobody says: the engine's, or that of the only model that the origin tells of."""

import asyncio
import hashlib
import shutil
from dataclasses import replace
from functools import partial

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import NothingCached
from kvabr.publish.encoder import publish
from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.server.publication import BytesPublication
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import NotFoundError, PlayError, UsageError
from tests.client.test_play import close
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

TOKENS = prompt(70).tokens
OTHER = replace(SPEC, model="other/model")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Two models, in folders that grants can tell apart."""
    root = tmp_path_factory.mktemp("models")
    toy_asset(root / "one", ("Int8",))
    with open_store(root / "two").writer() as writer:
        writer.prompt(made := prompt(70))
        writer.commit(publish(ToyModel(OTHER), made, ("Int8",), None, writer))
    return root


def connection(published, *paths):
    grant = Grant("some", paths, token_sha256=hashlib.sha256(b"token").hexdigest()) if paths else EVERYTHING
    library = PublishedAssets(published, Grants([grant]) if paths else None)
    return MemoryConnection(partial(library.find, grant), MemoryLink(1e8, 0.02))


@virtual
async def test_the_only_model_of_an_origin_is_meant(origin):
    async with origin() as link, AsyncClient(link) as client:
        assert await client.models() == [SPEC]
        played = await client.play(TOKENS, deadline=2.0)
        assert close(played.kv)
        asked = link.requests
        assert isinstance(await client.play(range(50), deadline=2.0), NothingCached)
        assert link.requests == asked + 2  # of a complete and of a growing one
        assert (await client.find(TOKENS)).catalog == played.catalog


@virtual
async def test_several_models_must_be_told_apart(published):
    async with connection(published) as link, AsyncClient(link) as client:
        with pytest.raises(UsageError, match=r"several models: give model=.*other/model, test/model"):
            await client.play(TOKENS, deadline=2.0)
        for model in ("test/model", SPEC):
            assert close((await client.play(TOKENS, deadline=2.0, model=model)).kv)
        missed = await client.play(TOKENS, deadline=2.0, model="third/model")
        assert isinstance(missed, NothingCached)
        assert missed.spec is None
        assert await client.find(TOKENS, model="third/model") is None
        async with AsyncClient(link, model="test/model") as named:
            assert close((await named.play(TOKENS, deadline=2.0)).kv)


def write(folder, group_tokens, tokens=70):
    made = prompt(tokens)
    with open_store(folder).writer() as writer:
        writer.prompt(made)
        writer.commit(publish(ToyModel(), made, ("Int8",), None, writer, group_tokens=group_tokens))


@virtual
async def test_an_asset_that_is_replaced_by_one_of_another_group_size(tmp_path):
    write(tmp_path / "asset", 16)
    library = PublishedAssets(tmp_path)
    find = partial(library.find, EVERYTHING)
    async with MemoryConnection(find, MemoryLink(1e8, 0.02)) as link, AsyncClient(link) as client:
        assert (await client.play(TOKENS, deadline=2.0)).spec.group_tokens == 16
        shutil.rmtree(tmp_path / "asset")
        library.refresh()
        assert isinstance(await client.play(TOKENS, deadline=2.0), NothingCached)
        write(tmp_path / "asset", 32)
        library.refresh()
        played = await client.play(TOKENS, deadline=2.0)
        assert played.spec.group_tokens == 32
        assert close(played.kv)
        # Nothing is missed, but the list is old: a longer prefix in another group size counts.
        write(tmp_path / "longer", 16, tokens=90)
        library.refresh()
        longer = prompt(90).tokens
        await asyncio.sleep(6.0)
        assert (await client.play(longer, deadline=2.0)).tokens == 90


@virtual
async def test_one_model_in_several_group_sizes(tmp_path):
    write(tmp_path / "short", 16, tokens=40)
    write(tmp_path / "long", 32)
    begin, other = prompt(40).tokens, replace(SPEC, group_tokens=8)
    async with connection(tmp_path) as link, AsyncClient(link) as client:
        for model in (None, "test/model"):
            played = await client.play(TOKENS, deadline=2.0, model=model)
            assert (played.tokens, played.spec.group_tokens) == (70, 32)
            played = await client.play(begin, deadline=2.0, model=model)
            assert (played.tokens, played.spec.group_tokens) == (40, 16)
        assert isinstance(await client.play(TOKENS, deadline=2.0, model=other), NothingCached)
        # An engine says whose cache it is, not how it is cut.
        options = PlayOptions(recompute=False)
        async with AsyncClient(link, engine=ToyModel(other), options=options) as fixed:
            assert (await fixed.play(TOKENS, deadline=2.0)).tokens == 70
            assert (await fixed.find(TOKENS)).catalog.tokens == 70
        # A short prefix in the engine's own size does not hide a longer one in another.
        async with AsyncClient(link, engine=ToyModel(), options=options) as own:
            assert (await own.play(TOKENS, deadline=2.0)).tokens == 70
            assert (await own.play(begin, deadline=2.0)).spec.group_tokens == 16


@virtual
async def test_one_model_in_too_many_group_sizes(tmp_path):
    for group_tokens in (8, 16, 24, 32, 40):
        write(tmp_path / str(group_tokens), group_tokens)
    async with connection(tmp_path) as link, AsyncClient(link) as client:
        with pytest.raises(UsageError, match="test/model in 5 shapes: give the spec of one"):
            await client.play(TOKENS, deadline=2.0)


@virtual
async def test_the_engine_says_whose_cache_it_is(published):
    options = PlayOptions(prefill_cost=PrefillCost(0.001, 0.001))
    async with connection(published) as link, AsyncClient(link, engine=ToyModel(), options=options) as client:
        assert close((await client.play(TOKENS, deadline=2.0)).kv)
        with pytest.raises(UsageError, match="computes caches of test/model, not of other/model"):
            await client.play(TOKENS, deadline=2.0, model=OTHER)
        with pytest.raises(UsageError, match="computes caches of test/model, not of other/model"):
            await client.play(TOKENS, deadline=2.0, model="other/model")


@virtual
async def test_an_origin_that_does_not_tell(origin):
    async with origin() as link, AsyncClient(link) as client:
        find = link.find
        link.find = lambda namespace, track: None if track == "kvabr.models" else find(namespace, track)
        with pytest.raises(UsageError, match="does not list its models"):
            await client.play(TOKENS, deadline=2.0)
        with pytest.raises(NotFoundError):
            await client.models()


@pytest.mark.parametrize("lie", [b'{"models": [{"model": 3}]}', b"{}", b'{"models": [%s[]]}' % (b"[]," * 300_000)])
@virtual
async def test_a_list_of_models_that_is_none(origin, lie):
    lie = BytesPublication(lie)
    async with origin() as link, AsyncClient(link) as client:
        find = link.find
        link.find = lambda namespace, track: lie if track == "kvabr.models" else find(namespace, track)
        with pytest.raises(PlayError, match="list of models cannot be read"):
            await client.play(TOKENS, deadline=2.0)
