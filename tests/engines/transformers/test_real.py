"""The real SmolLM2 behind a played cache writes what it writes behind its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.engines.transformers import play_cache_async
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from tests.memory_transport import Fault, MemoryConnection, MemoryLink

pytestmark = pytest.mark.model


def text(loaded, ids, cache=None):
    given = torch.tensor([ids])
    output = loaded.engine.model.generate(
        given, attention_mask=torch.ones_like(given), past_key_values=cache, max_new_tokens=16, do_sample=False
    )
    return loaded.decode(output[0, len(ids) :].tolist())


@pytest.fixture(scope="module")
def prompt(asset):
    made = asset.prompt()
    return [*made.tokens, *made.continuation[:8]]


@pytest.fixture(scope="module")
def cold(loaded, prompt):
    return text(loaded, prompt)


@pytest.mark.parametrize(("track", "lost"), [("FP16", None), ("Int8", None), ("FP16", 1)])
async def test_the_same_greedy_text(loaded, asset, prompt, cold, track, lost):
    def faults(ask):
        return Fault(refuse=0x10) if ask.group == lost and ask.track in asset.catalog.by_name else None

    find = partial(PublishedAssets(asset.store).find, EVERYTHING)
    options = PlayOptions(policy=f"fixed:{track}", gpu_price=float("inf"))
    async with (
        MemoryConnection(find, MemoryLink(1e8, 0.01), faults=faults) as link,
        AsyncClient(link, engine=loaded.engine, options=options) as client,
    ):
        ready = await play_cache_async(client, loaded.engine, prompt, deadline=20.0)
    assert ready.tokens == 300
    assert ready.played.coverage == tuple("recomputed" if group == lost else track for group in range(3))
    assert text(loaded, prompt, ready.cache) == cold
