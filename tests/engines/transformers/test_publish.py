"""What a prefill computed, published; and caches that must not be."""

from dataclasses import replace

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.engines.transformers import cache_publisher, play_cache_async, prefill_live, publish_cache
from kvabr.engines.transformers.cache import cache_kv, dynamic_cache
from kvabr.engines.transformers.publish import runs
from kvabr.publish.live_publisher import LivePublisher, LiveSlot
from kvabr.store.locations import open_asset, open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError, UsageError
from tests.client.virtual import virtual
from tests.engines.transformers.text import IDS, PREFIX, cold
from tests.engines.transformers.tiny import tiny

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
    assert len(open_store(tmp_path / "out").list()) == 2


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
    with pytest.raises(UsageError, match="at least one group of"):
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

    empty = made()
    empty.layers[1].keys = None
    for other, why in (
        (made(k_dim=9, v_dim=9), "belongs to another model"),
        (made(layers=(0, 1, 2)), "3 layers"),
        (made(torch.float64), "float64"),
        (empty, "is empty"),
    ):
        with pytest.raises(ModelError, match=why):
            publish_cache(publisher, engine, other, PREFIX)


PACE = PrefillCost.from_rate(1000.0)
LIMIT_S = 300


def published(engine, root, cache, ids, tracks):
    made = cache_publisher(engine, root, tracks=tracks)
    outcome = publish_cache(made, engine, cache, ids).result(LIMIT_S)
    made.close()
    assert outcome.verdict == "published", outcome.why
    catalog = open_asset(root).catalog
    return replace(catalog, tracks=tuple(replace(track, packs=()) for track in catalog.tracks))


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Qwen3-Next"])
@pytest.mark.parametrize("run_tokens", [128, 200, 512])
def test_the_asset_is_that_of_the_cache_that_is_returned(name, run_tokens, tmp_path, engine):
    model, ids, tracks = engine if name == "Llama" else tiny(name), PREFIX[:384], ("FP16", "Int8")
    live = LivePublisher(cache_publisher(model, tmp_path / "live", tracks=tracks))
    slots, seen = [], []
    cache, done = prefill_live(
        live, model, ids, pace=PACE, run_tokens=run_tokens, begun=slots.append,
        progress=lambda *how_far: seen.append(how_far),
    )  # fmt: skip
    outcome = done.result(LIMIT_S)
    live.close()
    assert (outcome.verdict, outcome.tokens) == ("published", 384), outcome.why
    asset = open_asset(tmp_path / "live")
    asset.check_parts()
    assert isinstance(slots[0], LiveSlot)
    assert slots[0].chunks == asset.catalog.chunks
    assert seen[-1] == (384, 384)
    assert asset.catalog == published(model, tmp_path / "once", cache, ids, tracks)


def test_an_interrupted_prefill_leaves_a_shorter_prompt(tmp_path, engine):
    live = LivePublisher(cache_publisher(engine, tmp_path))
    slots = []

    def interrupt(done, _total):
        if done >= 256:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill_live(live, engine, PREFIX, pace=PACE, run_tokens=128, begun=slots.append, progress=interrupt)
    live.close()
    outcome = slots[0].production.outcome
    assert (outcome.verdict, outcome.why, outcome.tokens) == ("failed", "KeyboardInterrupt", 256)
    assert open_asset(tmp_path).catalog.tokens == 256


def test_what_is_known_is_computed_and_not_published(tmp_path, engine):
    live = LivePublisher(cache_publisher(engine, tmp_path))
    first, done = prefill_live(live, engine, PREFIX)  # the pace is timed
    assert done.result(LIMIT_S).verdict == "published"
    again, done = prefill_live(live, engine, PREFIX, pace=PACE)
    assert done.result(LIMIT_S).verdict == "known"
    assert again.get_seq_length() == first.get_seq_length() == len(PREFIX)
    live.close()


def test_prompts_that_cannot_be_computed_are_not_announced(tmp_path, engine):
    live = LivePublisher(cache_publisher(engine, tmp_path))
    with pytest.raises(ModelError, match="fit"):
        prefill_live(live, engine, IDS * 3, pace=PACE)
    with pytest.raises(UsageError, match="run_tokens must be at least 1, got 0"):
        prefill_live(live, engine, PREFIX, pace=PACE, run_tokens=0)
    live.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tokens", "most", "marks", "ends"),
    [
        (2048, 512, (), [512, 1024, 1536, 1792, 1920, 2048]),
        (2000, 512, (), [512, 1024, 1536, 1792, 1920, 2000]),
        (2048, 4096, (), [1024, 1536, 1792, 1920, 2048]),
        (128, 512, (), [128]),
        (100, 512, (), [100]),
        (300, 1, (), [128, 256, 300]),
        (600, 512, (128, 384, 600), [128, 384, 512, 600]),
    ],
)
def test_runs_become_shorter_towards_the_end(tokens, most, marks, ends):
    assert runs(tokens, most, 128, marks) == ends
