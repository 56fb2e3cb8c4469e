"""A relay whose origin is an object store: players that speak MoQT play what is in the bucket."""

from __future__ import annotations

from kvabr.client.async_client import AsyncClient
from kvabr.client.origins import dialling
from kvabr.store.asset_folder import FolderAsset
from tests.client.served import LIMIT_S
from tests.client.stored import memory_url, put_asset
from tests.server.relays import relaying, url_of
from tests.toymodel import SPEC, prompt, toy_asset


async def test_a_prompt_and_a_name_are_played_through_it(tmp_path, tls):
    toy_asset(tmp_path / "asset", ("FP16", "Int4"))
    url, asset = memory_url(), FolderAsset.open(tmp_path / "asset")
    put_asset(url, asset)
    tokens = prompt(70).tokens
    async with (
        dialling(url) as upstream,
        relaying(upstream, tls) as server,
        AsyncClient(url_of(server), fingerprint=server.fingerprint, quic="aioquic") as client,
    ):
        played = await client.play((*tokens[:64], 1, 2, 3), deadline=LIMIT_S, model=SPEC)
        assert played.tokens == 64
        assert (await client.play_asset(asset.catalog.namespace, deadline=LIMIT_S)).tokens == 70
        assert await client.find([7] * 40, model=SPEC) is None
        assert [spec.digest() for spec in await client.models()] == [SPEC.digest()]
