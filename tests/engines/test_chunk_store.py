"""Caches that go by a key: what is published comes back, and what is of another length does not."""

from __future__ import annotations

import pytest
import torch

from kvabr.client.blocking import LoopThread
from kvabr.engines.chunk_store import ChunkStore, KeyedSettings, spec_of
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
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "quic": "aioquic", "deadline_s": 20.0}
    loop = LoopThread()

    async def put():
        store = ChunkStore(SPEC, KeyedSettings(**reach, publish=origin.root), "a cache of a test", max_tokens=300)
        for tokens in (128, 200, 256, 300):
            store.put(f"{tokens} tokens", torch.randn(LAYERS, 2, HEADS, tokens, DIM).half())
        await store.close()

    async def played(least, most):
        store = ChunkStore(SPEC, KeyedSettings(**reach), "", min_tokens=least, max_tokens=most)
        found = {tokens: await store.play(f"{tokens} tokens") for tokens in (128, 200, 256, 300)}
        await store.close()
        return {tokens: kv.shape[-2] for tokens, kv in found.items() if kv is not None}

    loop.call(put())
    origin.look(4)
    try:
        assert loop.call(played(256, 256)) == {256: 256}
        assert loop.call(played(1, 256)) == {128: 128, 200: 200, 256: 256}
    finally:
        loop.close()
