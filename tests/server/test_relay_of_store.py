"""A relay whose origin is an object store: players that speak MoQT play what is in the bucket."""

from __future__ import annotations

import random

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.origins import dialling
from kvabr.store.locations import open_asset
from kvabr.types.peer import PeerOptions
from tests.assets import digests, spec
from tests.client.served import LIMIT_S
from tests.client.stored import memory_url, put_asset
from tests.server.relays import relaying, url_of
from tests.store.noise import publish
from tests.toymodel import SPEC, prompt, toy_asset


async def test_a_prompt_and_a_name_are_played_through_it(tmp_path, tls):
    toy_asset(tmp_path / "asset", ("FP16", "Int4"))
    url, asset = memory_url(), open_asset(tmp_path / "asset")
    put_asset(url, asset)
    tokens = prompt(70).tokens
    async with (
        dialling(url) as upstream,
        relaying(upstream, tls) as server,
        AsyncClient(url_of(server), PeerOptions(fingerprint=server.fingerprint, quic="aioquic")) as client,
    ):
        played = await client.play((*tokens[:64], 1, 2, 3), deadline=LIMIT_S, model=SPEC)
        assert played.tokens == 64
        assert (await client.play_asset(asset.catalog.namespace, deadline=LIMIT_S)).tokens == 70
        assert await client.find([7] * 40, model=SPEC) is None
        assert [spec.digest() for spec in await client.models()] == [SPEC.digest()]


@pytest.mark.parametrize("groups", [320, 400, pytest.param(1000, marks=pytest.mark.slow)])
async def test_the_longest_prefix_of_a_long_prompt_is_found_through_it(tls, groups):
    """The name of a lookup has room for 320 digests of 321 groups, and for the ends of spans of longer prompts."""
    dice = random.Random(groups)
    prompt_ = [dice.randrange(50_000) for _ in range(4 * groups + 3)]
    url = memory_url()
    publish(url, prompt_[: 4 * 35])
    publish(url, [*prompt_[: 4 * (groups // 2)], *range(9)])
    publish(url, prompt_[: 4 * groups - 4])
    publish(url, prompt_)
    async with (
        dialling(url) as upstream,
        relaying(upstream, tls) as server,
        AsyncClient(url_of(server), PeerOptions(fingerprint=server.fingerprint, quic="aioquic")) as client,
        AsyncClient(url) as direct,
    ):
        for tokens in (
            prompt_,
            prompt_[:-3],
            [*prompt_, 1, 2, 3, 4, 5],
            [*prompt_[: 4 * groups - 4], *range(2000)],
            *(
                [*prompt_[: 4 * share], *[7] * 4 * (groups - share)]
                for share in (1, 9, 15, 16, 17, 35, groups // 2, 319)
            ),
        ):
            found = await client.find(tokens, model=spec(), within_s=LIMIT_S)
            expected = await direct.find(tokens, model=spec(), within_s=LIMIT_S)
            assert found.catalog.chunks == expected.catalog.chunks
            mine = digests(tokens)
            assert found.catalog.chunks[:-1] == tuple(mine[: found.catalog.groups - 1])
        assert (await client.find(prompt_, model=spec(), within_s=LIMIT_S)).catalog.tokens == 4 * groups + 3
