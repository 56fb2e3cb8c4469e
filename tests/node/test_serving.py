"""A node that plays caches serves them on to its neighbours."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.node.serving import serving
from kvabr.server.certificates import check, development
from kvabr.server.seen_prompts import SeenPrompts
from kvabr.store.asset_folder import FolderAsset
from kvabr.types.errors import PlayError, UsageError
from tests.client.served import LIMIT_S, LOG, Served
from tests.client.test_play import TOKENS, close
from tests.server.relays import until
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

pytestmark = pytest.mark.process

TOKEN = "a-token-of-the-rack"  # noqa: S105  # opens nothing else
LONG = prompt(160).tokens
EXACT = PlayOptions(policy="fixed:FP16")


@pytest.fixture(scope="module")
def tls():
    with development() as made:
        yield made


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    made = tmp_path_factory.mktemp("assets")
    for name, tokens in (("short", 70), ("long", 160)):
        toy_asset(made / name, ("FP16", "Int4"), tokens=tokens)
    return made


@pytest.fixture
def origin(root, tmp_path):
    served = Served(root, tmp_path)
    yield served
    served.close()


def first_node(origin, **how):
    return AsyncClient(origin.url, fingerprint=origin.fingerprint, timeout_s=LIMIT_S, options=EXACT, **how)


def neighbour(server, tls, token=TOKEN):
    url, pinned = f"moqt://127.0.0.1:{server.address[1]}/", check(tls).fingerprint
    return AsyncClient(url, fingerprint=pinned, token=token, timeout_s=LIMIT_S, options=EXACT)


def sent(origin):
    return origin.metrics.value("kvabr_bytes_sent_total")


async def test_a_rack_of_eight_fetches_an_asset_once(origin, tls):
    async with first_node(origin) as first:
        await first.play(LONG, deadline=LIMIT_S)
        once = sent(origin)
        async with serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server:

            async def play():
                async with neighbour(server, tls) as node:
                    return await node.play(LONG, deadline=LIMIT_S)

            for played in await asyncio.gather(*(play() for _ in range(7))):
                assert played.coverage == ("FP16",) * 10
                assert close(played.kv, LONG, error=1e-5)
    assert sent(origin) < 1.1 * once


async def test_what_nobody_has_played_comes_from_the_origin_and_is_there_for_plays(origin, tls):
    async with first_node(origin) as first, serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server:
        async with neighbour(server, tls) as node:
            assert (await node.play(LONG, deadline=LIMIT_S)).met
        before = sent(origin)
        assert (await first.play(LONG, deadline=LIMIT_S)).coverage == ("FP16",) * 10
        assert sent(origin) - before < before / 4  # the catalog


async def test_what_plays_look_up_is_told_with_its_tokens_until_the_origin_takes_it_back(root, tmp_path, tls):
    copied = shutil.copytree(root, tmp_path / "assets")
    origin, prompts = Served(copied, tmp_path), SeenPrompts()
    try:
        async with (
            first_node(origin) as first,
            serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG, prompts=prompts),
        ):
            await first.play(LONG, deadline=LIMIT_S)
            await first.play(TOKENS, deadline=LIMIT_S, options=replace(EXACT, salt=b"a tenant"))
            ((space, told),) = prompts.assets().values()
            assert space == FolderAsset.open(copied / "long").catalog.namespace
            assert list(told.tokens) == list(LONG)
            shutil.rmtree(copied / "long")
            origin.look()
            await until(lambda: not prompts.assets())
    finally:
        origin.close()


@pytest.mark.parametrize("token", [None, "another-token"])
async def test_a_neighbour_needs_the_token(origin, tls, token):
    async with (
        first_node(origin) as first,
        serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server,
        neighbour(server, tls, token) as node,
    ):
        with pytest.raises(PlayError, match="token"):
            await node.play(TOKENS, deadline=LIMIT_S)


async def test_a_node_without_a_token_for_neighbours_serves_nobody(origin, tls):
    async with first_node(origin) as first:
        for wrong in ("", "a\nb"):
            with pytest.raises(UsageError, match="token"):
                async with serving(first, "127.0.0.1", 0, tls, token=wrong, log=LOG):
                    pass


async def test_a_node_asks_the_origin_that_is_named_for_what_is_missing(origin, tls):
    async with first_node(origin) as first, serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server:
        url = f"moqt://127.0.0.1:{server.address[1]}/"
        async with AsyncClient(
            [url, origin.url], insecure=True, token=TOKEN, timeout_s=LIMIT_S, options=EXACT
        ) as second:
            with pytest.raises(UsageError, match="several"):
                async with serving(second, "127.0.0.1", 0, tls, token=TOKEN, log=LOG):
                    pass
            named = second.origins[1]
            async with (
                serving(second, "127.0.0.1", 0, tls, token=TOKEN, origin=named, log=LOG) as another,
                neighbour(another, tls) as third,
            ):
                assert (await third.play(LONG, deadline=LIMIT_S)).met


async def test_a_node_goes_on_playing_when_it_serves_no_more(origin, tls):
    async with first_node(origin) as first:
        async with serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG):
            assert (await first.play(TOKENS, deadline=LIMIT_S)).met
        assert (await first.play(LONG, deadline=LIMIT_S)).met
        assert len(first.store) > 10


async def test_what_an_engine_computed_is_not_served(origin, tls):
    never = prompt(200).tokens[::-1]
    async with first_node(origin, engine=ToyModel(), model=SPEC) as first:
        computed = await first.play(never, deadline=LIMIT_S)
        assert set(computed.coverage) == {"recomputed"}
        async with serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server, neighbour(server, tls) as node:
            assert await node.find(never, model=SPEC) is None


async def test_the_store_of_a_node_stays_within_its_bound(origin, tls):
    limits = Limits(memory_bytes=40_000)
    async with (
        first_node(origin, limits=limits) as first,
        serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server,
        neighbour(server, tls) as node,
    ):
        assert (await node.play(LONG, deadline=LIMIT_S)).met
        assert first.store.memory.total_bytes <= limits.memory_bytes
