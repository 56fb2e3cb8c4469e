"""Caches that go by a key: what is published comes back, and what is of another length does not."""

from __future__ import annotations

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.blocking import LoopThread
from kvabr.engines.chunk_store import KeyedCaches, KeyedPublisher, KeyedSettings, TroubleLog, spec_of
from kvabr.engines.settings import open_client
from tests.engines.served import Origin

LAYERS, HEADS, DIM = 2, 2, 16
SPEC = spec_of("test/model", "engine", LAYERS, HEADS, DIM, torch.float16)


@pytest.fixture
def origin(tmp_path):
    made = Origin(tmp_path)
    yield made
    made.close()


def test_the_group_size_is_a_setting():
    settings = KeyedSettings(url="moqt://origin.example/", group_tokens=64)
    assert settings.grouped(SPEC).group_tokens == 64
    assert KeyedSettings(url="moqt://origin.example/").grouped(SPEC) is SPEC


def test_what_is_shorter_or_longer_than_its_key_stands_for_is_not_there(origin):
    options = KeyedSettings(url=origin.url, fingerprint=origin.fingerprint, quic="aioquic", publish=origin.root)
    publisher = KeyedPublisher(SPEC, options, TroubleLog(), "a cache of a test")
    for tokens in (128, 200, 256, 300):
        kv = torch.randn(LAYERS, 2, HEADS, tokens, DIM).half()
        publisher.put(f"{tokens} tokens", kv, lambda _: None)
    publisher.close()
    origin.look(4)
    loop = LoopThread()

    async def played(least, most):
        async with open_client(AsyncClient, options) as client:
            caches = KeyedCaches(client, SPEC, options, TroubleLog(), min_tokens=least, max_tokens=most)
            found = {tokens: await caches.play(f"{tokens} tokens", 20.0) for tokens in (128, 200, 256, 300)}
            return {tokens: kv.shape[-2] for tokens, kv in found.items() if kv is not None}

    try:
        assert loop.call(played(256, 256)) == {256: 256}
        assert loop.call(played(1, 256)) == {128: 128, 200: 200, 256: 256}
    finally:
        loop.close()
