"""A node that plays caches serves them on to its neighbours."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import replace

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.result import Hinted
from kvabr.data import default_catalog
from kvabr.node.hints import NodeHints
from kvabr.node.serving import serving
from kvabr.publish.publisher import Publisher
from kvabr.server.certificates import check, development
from kvabr.server.grants import EVERYTHING
from kvabr.server.metrics import Metrics
from kvabr.server.relay import Relay
from kvabr.server.seen_prompts import SeenPrompts
from kvabr.store.asset_folder import FolderAsset
from kvabr.types.errors import NotFoundError, PlayError, Reason, RequestError, TransportError, UsageError
from kvabr.types.hints import HintAnswer, HintRequest
from kvabr.types.media import MediaTokens, Medium
from tests.client.served import LIMIT_S, LOG, Served
from tests.client.test_play import TOKENS, close
from tests.server.relays import until
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

pytestmark = pytest.mark.process

TOKEN = "a-token-of-the-rack"  # noqa: S105  # opens nothing else
LONG = prompt(160).tokens
PICTURE = MediaTokens(prompt(70).tokens, [Medium(2, 5, "ab" * 32)])
EXACT = PlayOptions(policy="fixed:FP16")


@pytest.fixture(scope="module")
def tls():
    return development()


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


async def test_a_node_fetches_ahead_what_will_be_played_there(origin, tls):
    """A router asks for it, and the node's next play needs only its lookup."""
    async with first_node(origin) as first, serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server:
        async with neighbour(server, tls) as router:
            node = router.origins[0]
            hinted, again = [await router.hint(LONG, within_s=LIMIT_S, keep_s=600, node=node) for _ in range(2)]
            assert hinted.tokens == again.tokens == 160
            assert hinted.bytes == first.store.memory.total_bytes == first.store.memory.kept_bytes
            assert len(router.store) == 0  # nothing came here
            short = await router.hint((*LONG[:80], 1, 2, 3), within_s=LIMIT_S, node=node)
            assert short.tokens == 80  # of a longer asset what the prompt shares
            assert (await router.hint((1, 2, 3) * 20, within_s=LIMIT_S, node=node)).tokens == 0
            before = sent(origin)
            assert (await first.play(LONG, deadline=LIMIT_S)).coverage == ("FP16",) * 10
            assert sent(origin) - before < 25_000  # the catalog
            found = await router.find(LONG)
            with_command = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "kvabr",
                    "hint",
                    router.origins[0].name,
                    "--fingerprint",
                    check(tls).fingerprint,
                ),
                *("--token", TOKEN, "--name", f"{SPEC.model}/{found.catalog.namespace.prompt}", "--keep", "5"),
                stdout=asyncio.subprocess.PIPE,
            )
            assert (await with_command.communicate())[0].startswith(b"160 tokens are in the node's store")
            nothing = f"toy/{'0' * 64}"
            with pytest.raises(NotFoundError, match="no such cache, or the peer is no node"):
                await router.hint_asset(nothing, within_s=1.0, node=node)
        with pytest.raises(NotFoundError, match="kvabr player --serve"):
            await first.hint(LONG, within_s=LIMIT_S, node=first.origins[0])
        async with neighbour(server, tls, token="another-token-of-16") as stranger:  # noqa: S106
            with pytest.raises(TransportError):
                await stranger.hint(LONG, within_s=LIMIT_S, node=stranger.origins[0])


async def test_a_relay_that_plays_nothing_refuses_in_words(origin):
    async with first_node(origin) as client:
        relay = Relay(await client.connect(), LOG, Metrics())
        found = await client.find(LONG, within_s=LIMIT_S)
        with pytest.raises(RequestError, match="a relay fetches nothing ahead") as refused:
            await relay.find_soon(EVERYTHING, found.catalog.namespace, HintRequest(1.0, 0.0, 0).track)
        assert refused.value.reason == Reason.UNSUPPORTED


async def test_what_a_node_does_for_others_is_bounded(origin, tls, monkeypatch):
    under_way, go = [], asyncio.Event()

    async def slow(self, asset, **how):
        under_way.append(how)
        await go.wait()
        return Hinted(16, 0, 0.0)

    monkeypatch.setattr(AsyncClient, "hint_asset", slow)
    async with first_node(origin) as first:
        hints = NodeHints(first, None, LOG, most_keep_s=60.0)
        found = await first.find(LONG, within_s=LIMIT_S)
        names = [HintRequest(10.0, 1e6, groups) for groups in range(1, 30)]
        asked = [asyncio.create_task(hints.fetch(found.catalog.namespace, one)) for one in (*names, names[0])]
        await until(lambda: sum(one.done() for one in asked) == 13 and len(under_way) == 16)
        refused = [one.exception() for one in asked if one.done()]
        assert {error.reason for error in refused} == {Reason.BUSY}
        assert {how["keep_s"] for how in under_way} == {60.0}
        asked[0].cancel()  # who asks again gets the answer to the first
        go.set()
        assert HintAnswer.loads(await asked[-1]).tokens == 16
        await asyncio.gather(*asked, return_exceptions=True)
        assert len(under_way) == 16
        await hints.close()


async def test_what_nobody_has_played_comes_from_the_origin_and_is_there_for_plays(origin, tls):
    async with first_node(origin) as first, serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG) as server:
        async with neighbour(server, tls) as node:
            assert (await node.play(LONG, deadline=LIMIT_S)).met
        before = sent(origin)
        assert (await first.play(LONG, deadline=LIMIT_S)).coverage == ("FP16",) * 10
        assert sent(origin) - before < before / 4  # the catalog


async def test_what_plays_look_up_is_told_with_its_tokens_until_the_origin_takes_it_back(root, tmp_path, tls):
    copied = shutil.copytree(root, tmp_path / "assets")
    publisher = Publisher(copied, SPEC, prior=default_catalog(), tracks=["FP16"])
    publisher.reserve(PICTURE).fill(ToyModel().prefill(PICTURE.ids), lambda _: None)
    publisher.close()
    origin, prompts = Served(copied, tmp_path), SeenPrompts()
    try:
        async with (
            first_node(origin) as first,
            serving(first, "127.0.0.1", 0, tls, token=TOKEN, log=LOG, prompts=prompts),
        ):
            await first.play(LONG, deadline=LIMIT_S)
            await first.play(TOKENS, deadline=LIMIT_S, options=replace(EXACT, salt=b"a tenant"))
            assert (await first.play(PICTURE, deadline=LIMIT_S)).tokens == 70
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
