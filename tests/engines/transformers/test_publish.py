"""What a prefill computed, published; and caches that must not be."""

from __future__ import annotations

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.engines.transformers import cache_publisher, play_cache_async, publish_cache
from kvabr.engines.transformers.cache import cache_kv, dynamic_cache
from kvabr.store.locations import open_store
from kvabr.types.errors import ModelError, UsageError
from tests.client.virtual import virtual
from tests.engines.transformers.text import IDS, PREFIX, cold

pytestmark = pytest.mark.model


@pytest.fixture
def publisher(engine, tmp_path):
    made = cache_publisher(engine, tmp_path / "out")
    yield made
    made.close()


def test_twice_is_known(engine, publisher, tmp_path):
    cache = cold(engine.model, IDS).past_key_values
    assert publish_cache(publisher, engine, cache, PREFIX).result(20).verdict == "published"
    assert publish_cache(publisher, engine, cache, torch.tensor([PREFIX])).result(20).verdict == "known"
    assert publish_cache(publisher, engine, cache, PREFIX, salt=b"tenant").result(20).verdict == "published"
    assert len(open_store(tmp_path / "out").list().versions) == 2


def test_a_round_trip_through_transformers_is_exact(engine):
    cache = cold(engine.model, PREFIX, count=1).past_key_values
    (kv,) = cache_kv(cache, engine.spec, 400)
    (again,) = cache_kv(dynamic_cache((kv,), engine.spec, torch.float32, torch.device("cpu")), engine.spec, 400)
    assert torch.equal(again, kv)
    assert torch.allclose(kv, engine.prefill(PREFIX), atol=1e-5)
    cache.layers[0].keys.zero_()
    assert not torch.equal(kv[0, 0], torch.zeros_like(kv[0, 0]))  # it was copied
    assert dynamic_cache((kv[:, :, :, :0],), engine.spec, torch.float32, torch.device("cpu")).get_seq_length() == 0


@virtual
async def test_a_lossy_cache_is_not_passed_on(origin, engine, publisher):
    options = PlayOptions(policy="fixed:Int4", recompute=False)
    async with origin() as link, AsyncClient(link, engine=engine, options=options) as client:
        ready = await play_cache_async(client, engine, IDS, deadline=2.0)
    grown = cold(engine.model, IDS, ready.cache).past_key_values
    with pytest.raises(UsageError, match="played with an expected loss"):
        publish_cache(publisher, engine, grown, IDS)


def test_what_cannot_be_published(engine, publisher):
    cache = cold(engine.model, IDS).past_key_values
    with pytest.raises(UsageError, match="127 tokens are fewer than a group has"):
        publish_cache(publisher, engine, cache, IDS[:127])
    with pytest.raises(UsageError, match="fewer than the 600 given"):
        publish_cache(publisher, engine, cache, [1] * 600)
    with pytest.raises(ModelError, match="a tuple is not a cache of transformers"):
        publish_cache(publisher, engine, tuple(cache), PREFIX)
    two = cold(engine.model, IDS).past_key_values
    two.batch_repeat_interleave(2)
    with pytest.raises(UsageError, match="holds 2 prompts"):
        publish_cache(publisher, engine, two, PREFIX)
    # Every refusal gave its place back: four may wait, and these would have filled them.
    assert publish_cache(publisher, engine, cache, PREFIX).result(20).verdict == "published"


def test_caches_of_another_kind_are_refused_by_name(engine, publisher):
    import transformers

    spec = engine.spec
    kv = torch.zeros(spec.shape(400))
    static = transformers.StaticCache(config=engine.model.config, max_cache_len=500)
    for layer in range(spec.layers):
        static.update(kv[layer, :1], kv[layer, 1:], layer, {"cache_position": torch.arange(400)})
    with pytest.raises(ModelError, match="keeps its cache as StaticLayer"):
        publish_cache(publisher, engine, static, PREFIX)
    sliding = transformers.MistralConfig(num_hidden_layers=2, sliding_window=64)
    with pytest.raises(ModelError, match="keeps its cache as DynamicSlidingWindowLayer"):
        publish_cache(publisher, engine, transformers.DynamicCache(config=sliding), PREFIX)

    def made(dtype=torch.float32, **changes):
        spec = engine.spec.changed(rope=None, **changes)
        return dynamic_cache((torch.zeros(spec.shape(400)),), spec, dtype, torch.device("cpu"))

    with pytest.raises(ModelError, match=r"2 heads of 9, .* has 2 of 8: it is another model's"):
        publish_cache(publisher, engine, made(k_dim=9, v_dim=9), PREFIX)
    with pytest.raises(ModelError, match="a cache of 3 layers"):
        publish_cache(publisher, engine, made(layers=(0, 1, 2)), PREFIX)
    with pytest.raises(ModelError, match=r"the cache is torch\.float64; kvabr takes float16"):
        publish_cache(publisher, engine, made(torch.float64), PREFIX)
    with pytest.raises(ModelError, match="is empty"):
        publish_cache(publisher, engine, emptied(made()), PREFIX)


def emptied(cache):
    cache.layers[1].keys = None
    return cache
