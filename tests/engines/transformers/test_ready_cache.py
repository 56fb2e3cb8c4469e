"""A prompt in, a cache for generate() out: played, its gaps computed, and the text is that of a cold run."""

import asyncio
import logging
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.blocking import Client
from kvabr.client.options import PlayOptions
from kvabr.client.result import NothingCached
from kvabr.engines.transformers import TransformersEngine, play_cache, play_cache_async
from kvabr.engines.transformers.model_loader import engine_of, load_model
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError, PlayError, UsageError
from kvabr.types.kv import RopeSpec
from kvabr.types.peer import PeerOptions
from tests import tinymodels
from tests.client.served import LIMIT_S, Served
from tests.client.virtual import virtual
from tests.engines.transformers.text import IDS, cold, furthest
from tests.engines.transformers.tiny import SLOW
from tests.memory_transport import Fault

pytestmark = pytest.mark.model


async def ready_from(link, engine, ids=IDS, *, deadline=2.0, **how):
    options = PlayOptions(**({"policy": "fixed:FP16", "prefill_cost": SLOW, "tail": 0} | how))
    async with AsyncClient(link, options=options) as client:
        return await play_cache_async(client, engine, ids, deadline=deadline)


@virtual
async def test_the_text_is_that_of_a_cold_run(origin, engine):
    async with origin() as link:
        ready = await ready_from(link, engine)
    assert (ready.tokens, ready.played.coverage, ready.problem) == (400, ("FP16",) * 4, None)
    assert ready.exact
    assert ready.cache.get_seq_length() == 400
    memory, before = ready.played.kv.untyped_storage().data_ptr(), ready.played.kv.clone()
    each = [half for layer in ready.cache.layers for half in (layer.keys, layer.values)]
    assert {half.untyped_storage().data_ptr() for half in each} == {memory}  # decoded where the model reads it
    assert furthest(cold(engine.model, IDS, ready.cache), cold(engine.model, IDS)) < 2e-3
    assert torch.equal(ready.played.kv, before)  # the model appends to copies


@virtual
async def test_the_model_computes_the_end_of_a_coded_cache(origin, engine):
    """The cache is shorter, and generate() computes the rest on it."""
    async with origin() as link:
        ready = await ready_from(
            link, engine, policy="fixed:Int4", prefill_cost=PrefillCost(0.01, 1e-6), tail=150, time_price=0.0
        )
    assert (ready.tokens, ready.played.tail) == (256, 400 - 256)
    assert ready.played.coverage == ("Int4",) * 2
    assert ready.cache.get_seq_length() == 256
    assert not ready.exact
    assert ready.cache.kvabr_loss > 0
    assert len(cold(engine.model, IDS, ready.cache)) == len(cold(engine.model, IDS))


@pytest.mark.parametrize("lost", [{0}, {1}, {3}, {0, 2}, {0, 1, 2, 3}])
@virtual
async def test_groups_that_cannot_be_had_are_computed(origin, engine, lost):
    def faults(ask):
        return Fault(refuse=0x10) if ask.group in lost and ask.track in ("FP16", "Int8", "Int4") else None

    async with origin(faults=faults) as link:
        ready = await ready_from(link, engine)
    expected = ["recomputed" if group in lost else "FP16" for group in range(4)]
    assert list(ready.played.coverage) == expected
    assert ready.exact
    assert furthest(cold(engine.model, IDS, ready.cache), cold(engine.model, IDS)) < 2e-3


def test_blocking_over_quic(root, engine, folder, tmp_path):
    with closing(Served(root, tmp_path)) as served:
        model = engine_of(engine.model, folder)
        assert model.spec == engine.spec
        with Client(served.url, PeerOptions(fingerprint=served.fingerprint, timeout_s=LIMIT_S)) as client:
            ready = play_cache(
                client,
                model,
                IDS,
                deadline=LIMIT_S,
                options=PlayOptions(policy="fixed:FP16", prefill_cost=SLOW, tail=0),
            )
    assert ready.played.coverage == ("FP16",) * 4
    assert furthest(cold(engine.model, IDS, ready.cache), cold(engine.model, IDS)) < 2e-3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope": RopeSpec(500000.0, 8, "half")}, "rope"),
        ({"rope": RopeSpec(10000.0, 8, "half", (0.25, 0.025, 0.0025, 0.00025))}, "rope"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"rope": None, "dtype": "float32"}, "dtype and rope"),
    ],
)
@virtual
async def test_an_asset_that_does_not_fit_is_named_and_not_played(origin, engine, caplog, changes, named):
    """The same name, another cache: nothing of it reaches the model."""
    other = TransformersEngine(engine.model, engine.spec.changed(**changes), context=640)
    async with origin() as link:
        with pytest.raises(PlayError, match=f"they differ in {named}, and cannot be mixed"):
            await ready_from(link, other, recompute=False)
        told = []
        with caplog.at_level(logging.WARNING, "kvabr.transformers"):
            ready = await ready_from(link, other, log=told.append)
    assert f"they differ in {named}" in ready.problem
    assert ready.problem in caplog.text
    assert "lookup_failed" in {line.name for line in told}
    assert set(ready.played.coverage) == {"recomputed"}
    assert furthest(cold(engine.model, IDS, ready.cache), cold(engine.model, IDS)) < 1e-4


@virtual
async def test_another_revision_or_tokenizer_finds_nothing(origin, engine, tmp_path):
    """Their caches have other names: weights and tokenizer are part of the prompt's digest."""
    revised = load_model(str(tinymodels.save(tmp_path / "tiny-llama", rms_norm_eps=1e-4))).engine
    assert revised.spec.model != engine.spec.model
    retokenized = TransformersEngine(engine.model, replace(engine.spec, tokenizer="another"), context=640)
    async with origin() as link:
        for other in (revised, retokenized):
            ready = await ready_from(link, other, recompute=False)
            assert (ready.tokens, ready.problem) == (0, None)
            assert isinstance(ready.played, NothingCached)
            assert furthest(cold(other.model, IDS, ready.cache), cold(other.model, IDS)) == 0
            ready = await ready_from(link, other)
            assert set(ready.played.coverage) == {"recomputed"}


@pytest.mark.parametrize("count", [1, 2, 127])
@virtual
async def test_a_prompt_shorter_than_a_group(origin, engine, count):
    ids = IDS[:count]
    async with origin() as link:
        ready = await ready_from(link, engine, ids)
    assert ready.tokens == count - 1
    assert furthest(cold(engine.model, ids, ready.cache), cold(engine.model, ids)) < 1e-4


@virtual
async def test_a_request_that_is_aborted(origin, engine):
    async with origin(rate=2e4) as link:
        task = asyncio.ensure_future(ready_from(link, engine, recompute=False, deadline=50.0))
        await asyncio.sleep(2.0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        link.path.rate = 1e8
        # At once, as far as the clock knows: nothing of the aborted play is in its way.
        ready = await ready_from(link, engine, recompute=False, deadline=0.5)
    assert ready.played.coverage == ("FP16",) * 4
    assert ready.played.met


@virtual
async def test_what_is_no_prompt(origin, engine):
    async with origin() as link:
        with pytest.raises(UsageError):
            await ready_from(link, engine, torch.zeros(2, 5, dtype=torch.long))
        for ids in ([], [3, 256], [3] * 641):
            with pytest.raises(ModelError):
                await ready_from(link, engine, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@virtual
async def test_how_a_model_is_loaded_does_not_change_what_its_caches_are_called(origin, engine, folder, dtype):
    import transformers

    half = engine_of(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), folder)
    assert half.spec == engine.spec
    async with origin() as link:
        ready = await ready_from(link, half, recompute=False)
    assert ready.played.coverage == ("FP16",) * 4
    assert {layer.keys.dtype for layer in ready.cache.layers} == {dtype}
    warm, own = cold(half.model, IDS, ready.cache, 1), cold(half.model, IDS, None, 1)
    assert furthest(warm, own) < 0.05  # what 8 bits of mantissa leave of logits of up to 0.5
