"""Recomputing any tokens of a cache with real transformers models of a few thousand weights."""

import random

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/setup-venv")

from kvabr.blend.selection import Selection, Selector, look
from kvabr.codec.rope import rotate
from kvabr.engines.transformers import TransformersEngine, spec_of
from kvabr.engines.transformers.blend import TransformersBlendEngine, blend_engine
from kvabr.types.errors import ModelError
from tests.engines.transformers.tiny import ATTENTION, PLAIN, SMALL, STATES, tiny

IDS = random.Random(3).choices(range(256), k=90)
CACHED = 80


def engine_of_kind(kind, attention="sdpa"):
    engine = tiny(kind, dtype=torch.float32, kept="float32")
    engine.model.set_attn_implementation(attention)
    return blend_engine(engine)


@pytest.fixture(params=["sdpa", "eager"])
def attention(request):
    return request.param


@pytest.fixture(params=[*PLAIN])
def engine(request, attention):
    return engine_of_kind(request.param, attention)


@pytest.fixture
def full(engine):
    return engine.prefill(IDS)


def test_all_tokens_are_the_full_prefill(engine, full):
    junk = torch.randn(full[:, :, :, :CACHED].shape, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(engine.recompute(IDS, range(90), junk), full, atol=1e-5)
    assert torch.allclose(engine.recompute(IDS, range(CACHED), junk), full[:, :, :, :CACHED], atol=1e-5)


def test_over_an_exact_cache_any_tokens_come_out_exact(engine, full):
    at = [0, 3, 4, 30, 79, 80, 81]
    assert torch.allclose(engine.recompute(IDS, at, full[:, :, :, :CACHED]), full[:, :, :, at], atol=1e-5)


def test_computed_tokens_see_each_other_and_the_cache_of_the_others(engine, full):
    """Layer by layer, with masks of its own: what the forward pass of one token at a time gives."""
    kv = full[:, :, :, :CACHED].clone()
    kv[:, :, :, 20:60] += 0.3
    at = [25, 40, 70]
    work = kv.clone()
    for place in at:
        work[:, :, :, place] = engine.prefill([IDS[place]], work[:, :, :, :place])[:, :, :, 0]
    assert torch.allclose(engine.recompute(IDS, at, kv), work[:, :, :, at], atol=1e-5)
    assert not torch.allclose(work[:, :, :, at], full[:, :, :, at], atol=1e-2)


def test_the_cache_is_read_and_never_written(engine, full):
    kv = full[:, :, :, :CACHED].clone()
    before = kv.clone()
    engine.recompute(IDS, [1, 50, 80, 81], kv)
    engine.attention(IDS[CACHED:], kv)
    assert torch.equal(kv, before)


def test_the_first_layers_alone(engine, full):
    kv = torch.zeros_like(full[:, :, :, :CACHED])
    some = engine.recompute(IDS, range(CACHED), kv, layers=2)
    assert some.shape[0] == 2
    assert torch.allclose(some, full[:2, :, :, :CACHED], atol=1e-5)


def test_attention_is_what_the_model_says_itself(engine, full, attention):
    kv = full[:, :, :, :CACHED]
    found = engine.attention(IDS[CACHED:], kv)
    engine.model.set_attn_implementation("eager")
    told = engine.model(input_ids=torch.tensor([IDS]), output_attentions=True).attentions
    wanted = torch.stack([layer[0, :, CACHED:, :CACHED].sum(dim=(0, 1)) for layer in told])
    assert torch.allclose(found, wanted, atol=1e-4)
    assert found.dtype == torch.float32
    engine.model.set_attn_implementation(attention)
    largest = torch.stack([layer[0, :, CACHED:, :CACHED].amax(dim=(0, 1)) for layer in told])
    assert torch.allclose(engine.attention(IDS[CACHED:], kv, reduce="max"), largest, atol=1e-5)


def test_a_moved_passage_computed_in_full_is_exact():
    """What a play does: rotate a passage's keys to where it stands, then recompute it."""
    engine = engine_of_kind("Llama")
    alone = engine.prefill(IDS[30:60]).clone()
    free = rotate(alone[:, 0], engine.spec.only.rope, 0, undo=True)
    alone[:, 0] = rotate(free, engine.spec.only.rope, 30)
    full = engine.prefill(IDS)
    kv = torch.cat((full[:, :, :, :30], alone), dim=3)
    assert torch.allclose(kv[0, :, :, 30:60], full[0, :, :, 30:60], atol=1e-5)  # layer 0 depends on ids alone
    assert not torch.allclose(kv[1, :, :, 30:60], full[1, :, :, 30:60], atol=1e-3)
    kv[:, :, :, 30:60] = engine.recompute(IDS, range(30, 60), kv)
    assert torch.allclose(kv, full[:, :, :, :60], atol=1e-5)


@pytest.mark.parametrize("at", [[], [3, 3], [4, 2], [-1], [90], [79, 81], [82]], ids=str)
def test_positions_that_make_no_sense_are_refused(at):
    engine = engine_of_kind("Llama")
    with pytest.raises(ModelError):
        engine.recompute(IDS, at, torch.zeros(engine.spec.shape(CACHED)))


def test_arguments_of_another_model_are_refused():
    engine = engine_of_kind("Llama")
    kv = torch.zeros(engine.spec.shape(CACHED))
    for call in (
        lambda: engine.recompute(IDS, [1], kv[:1]),
        lambda: engine.recompute([999, *IDS[1:]], [1], kv),
        lambda: engine.recompute(IDS, [1], kv, layers=9),
        lambda: engine.recompute(IDS * 8, [1], kv),
        lambda: engine.attention(IDS, kv, layers=[7]),
        lambda: engine.attention(IDS * 8, kv),
        lambda: engine.attention([], kv),
    ):
        with pytest.raises(ModelError):
            call()


@pytest.mark.parametrize("kind", [*ATTENTION, *STATES])
def test_models_whose_caches_cannot_be_joined_are_refused(kind):
    other = tiny(kind)
    with pytest.raises(ModelError, match="cannot play passages: not all of its layers keep keys and values of every"):
        blend_engine(other)


def test_a_rotation_that_is_not_known_is_refused():
    import transformers

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
    config = transformers.Phi3Config(
        **SMALL, rope_parameters={**rope, "original_max_position_embeddings": 320}, attn_implementation="sdpa"
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    engine = TransformersEngine(model, spec_of(model, name="tiny", tokenizer="bytes", dtype="float16"), context=640)
    with pytest.raises(ModelError, match="cannot be moved, because their rotation"):
        blend_engine(engine)


def test_attention_that_ignores_masks_is_refused():
    engine = engine_of_kind("Llama")
    engine.model.config._attn_implementation_internal = "flash_attention_2"  # its package is not needed to be refused
    with pytest.raises(ModelError, match="load it with attn_implementation='sdpa'"):
        TransformersBlendEngine(engine.model, engine.spec, context=640)


class Everything(Selector):
    needs = frozenset({"attention", "peaks", "values", "deviation"})

    def looks_at(self, layers):
        return range(1, layers)

    def scores(self, prompt):
        return torch.zeros(prompt.tokens)


def test_a_selector_is_shown_what_it_asks_for(engine, full):
    kv = full[:, :, :, :CACHED].clone()
    kv[1, :, :, 33] += 1.0
    seen = look(engine, Everything(), IDS[:CACHED], [(0, 40), (40, 80)], IDS[CACHED:], kv)
    assert isinstance(seen, Selection)
    layers = engine.spec.layers
    assert seen.attention.shape == seen.values.shape == (layers - 1, CACHED)
    assert torch.allclose(seen.attention, engine.attention(IDS[CACHED:], kv)[1:], atol=1e-5)
    assert torch.allclose(seen.peaks, engine.attention(IDS[CACHED:], kv, reduce="max")[1:], atol=1e-5)
    norms = torch.linalg.vector_norm(kv[1:, 1].transpose(1, 2).flatten(2), dim=2)
    assert torch.allclose(seen.values, norms, atol=1e-5)
    assert seen.deviation.shape == (2, CACHED)
    assert torch.allclose(
        seen.deviation[:, 33], torch.full((2,), float(engine.spec.only.heads * engine.spec.only.k_dim))
    )
    assert float(seen.deviation.sum(dim=0).argmax()) == 33
    assert seen.orders == (None, None)
    assert seen.exact is None
