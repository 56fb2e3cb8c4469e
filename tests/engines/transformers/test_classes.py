"""Caches of several layer classes, or of keys and values of unlike dims: published, played to the bit, continued."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvabr.engines.transformers import Steps
from kvabr.engines.transformers.cache import held_layers, read_cache
from kvabr.types.errors import ModelError, PlayError
from kvabr.types.kv import RopeSpec
from tests.client.virtual import virtual
from tests.engines.transformers.text import IDS, PREFIX, cold
from tests.engines.transformers.tiny import ATTENTION, continued, prefilled, published, tiny
from tests.engines.transformers.tiny import ready_from as play
from tests.memory_transport import Fault

pytestmark = pytest.mark.model

CLASSES = {
    "Gemma3": {"window64": (0, 1), "full": (2,)},
    "Mistral": {"window200": (0, 1, 2)},
    "GPT-OSS": {"window128": (0, 2), "full": (1,)},
    "Llama 4": {"chunked128": (0, 1), "full": (2,)},
    "DeepSeek V3": {"full": (0, 1, 2)},
    "DeepSeek V2": {"full": (0, 1, 2)},
    "DeepSeek V3.2": {"full": (0, 1, 2), "latent-indexer": (0, 1, 2)},
    "GLM DSA": {"full": (0, 1, 2), "latent-indexer": (0, 1, 2)},
    "DeepSeek V4": {"window64": (0, 1, 2)},
    "Gemma 4": {"window64": (0,), "full": (1,)},
}
ROPES = {
    "Gemma3": [RopeSpec(1e4, 8), RopeSpec(1e6, 8)],
    "Mistral": [RopeSpec(1e4, 8)],
    "Llama 4": [RopeSpec(5e5, 8, "interleaved"), None],
    "DeepSeek V3": [RopeSpec(1e4, 8, "half", first=16)],
    "DeepSeek V2": [RopeSpec(1e4, 8, "interleaved", first=16)],
    "DeepSeek V3.2": [RopeSpec(1e4, 8, "half", first=16), None],
    "GLM DSA": [RopeSpec(1e4, 8, "half", first=16), None],
    "DeepSeek V4": [RopeSpec(1e4, 8, "interleaved", first=8)],
    "Gemma 4": [RopeSpec(1e4, 8), None],
}


@pytest.fixture(scope="module", params=ATTENTION)
def engine(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def library(engine, tmp_path_factory):
    cache = prefilled(engine, PREFIX, whole=True)
    return published(engine, tmp_path_factory.mktemp("origin"), cache=cache, tracks=["BF16", "Int8"])


ready_from = partial(play, policy="fixed:BF16")


def test_the_classes_are_those_of_the_models_cache(engine):
    spec = engine.spec
    name = next(name for name in ATTENTION if spec.model == f"tiny/{name.replace(' ', '-')}")
    assert dict(zip(spec.names, (each.layers for each in spec.classes), strict=True)) == CLASSES[name]


def test_every_class_has_its_rotary_embedding(engine):
    spec = engine.spec
    ropes = [each.rope for each in spec.classes]
    if "GPT-OSS" in spec.model:  # YaRN, the same in both classes
        assert ropes[0] == ropes[1]
        assert ropes[0].frequencies is not None
        assert ropes[0].factor == pytest.approx(0.1 * math.log(32) + 1)
    else:
        assert ropes == ROPES[next(name for name in ROPES if spec.model == f"tiny/{name.replace(' ', '-')}")]


def test_classes_may_be_scaled_apart_and_layers_of_one_that_disagree_count_as_not_rotated():
    spec = tiny("Gemma3 scaled").spec
    assert spec.classes[0].rope == RopeSpec(1e4, 8)
    assert spec.classes[1].rope == replace(RopeSpec(1e6, 8), frequencies=(0.125, *spec.classes[1].rope.frequencies[1:]))
    mixed = tiny("Llama 4 mixed").spec
    assert dict(zip(mixed.names, (each.rope for each in mixed.classes), strict=True)) == {"chunked128": None}


def test_one_vector_that_is_key_and_value_is_published_once():
    engine = tiny("DeepSeek V4")
    only = engine.spec.only
    assert (only.k_dim, only.v_dim) == (16, 0)
    kv = read_cache(prefilled(engine, PREFIX, whole=True), engine.spec, 0, 400)[0]
    assert kv.shape == (3, 1, 1, 400, 16)
    # Gemma 4 has one projection for both, but norms and turns only the keys: these are two.
    assert [(each.k_dim, each.v_dim) for each in tiny("Gemma 4").spec.classes] == [(8, 8), (16, 16)]


def test_layers_that_compress_tokens_are_refused_by_name():
    with pytest.raises(ModelError, match="layer 1 is heavily_compressed_attention; kvabr needs layers that keep"):
        tiny("DeepSeek V4 compressed")


@virtual
async def test_what_is_played_is_what_the_model_made(engine, library):
    """To the bit, and no more than it needs; what is generated behind it is the same."""
    ready = await ready_from(library, engine)
    assert (ready.tokens, ready.problem) == (400, None)
    assert ready.exact
    own = prefilled(engine, PREFIX)
    for mine, theirs in layers_of(ready.cache, own):
        assert type(mine) is type(theirs)
        seen = mine.keys.shape[2] if not getattr(mine, "is_sliding", False) else visible(engine, theirs)
        assert torch.equal(mine.keys[:, :, -seen:], theirs.keys[:, :, -seen:])
        assert torch.equal(mine.values[:, :, -seen:], theirs.values[:, :, -seen:])
        assert mine.get_seq_length() == theirs.get_seq_length() == 400
        if hasattr(theirs, "indexer_keys"):
            assert torch.equal(mine.indexer_keys, theirs.indexer_keys)
    ours, wanted = (continued(engine, cache, IDS[400:]) for cache in (ready.cache, own))
    assert torch.equal(ours, wanted)


def layers_of(*caches):
    places = [held_layers(cache) for cache in caches]
    assert len(set(map(len, places))) == 1
    return zip(
        *([cache.layers[place] for place in own] for cache, own in zip(caches, places, strict=True)), strict=True
    )


def visible(engine, layer):
    """Tokens of a window or chunk that a query at position 400 sees."""
    chunked = any(each.kind == "chunked" for each in engine.spec.classes)
    return 400 % layer.sliding_window if chunked else layer.keys.shape[2]


@virtual
async def test_no_more_is_fetched_than_is_needed(engine, library):
    ready = await ready_from(library, engine)
    asset = library.assets[0].catalog
    for part, only in enumerate(asset.spec.classes):
        groups = {unit.group for unit in ready.played.catalog.units if unit.part == part}
        first = {"window": 400 - (only.window or 0), "chunked": 384}.get(only.kind, 0) // 128
        assert groups == set(range(first, 4))
    assert ready.played.record.bytes_fetched == sum(ready.played.catalog.track("BF16").bytes)


@virtual
async def test_a_shorter_prompt_plays_its_own_windows(engine, library):
    ids = [*PREFIX[:300], *[7] * 40]
    ready = await ready_from(library, engine, ids)
    assert ready.tokens == 256
    own = prefilled(engine, ids[:256])
    ours, wanted = (continued(engine, cache, ids[256:]) for cache in (ready.cache, own))
    # Processors and kinds of attention round otherwise for a prompt of another length; all are 16-bit numbers here.
    assert torch.allclose(ours.float(), wanted.float(), atol=0.1)


@virtual
async def test_a_class_that_cannot_be_had_is_computed(engine, library):
    """One unit of the last class is refused: the model computes the prompt, and the text is that of a cold run."""
    name = engine.spec.parts[-1].track_name("BF16")

    def faults(ask):
        refused = ask.track.rpartition(".")[2] == name.rpartition(".")[2] or "." not in name
        return Fault(refuse=0x10) if refused and ask.group == 3 and ask.track[:4] in ("BF16", "Int8") else None

    ready = await ready_from(library, engine, faults=faults)
    assert "recomputed" in ready.played.coverage
    own = prefilled(engine, IDS[: ready.tokens])
    ours, wanted = (continued(engine, cache, IDS[ready.tokens :]) for cache in (ready.cache, own))
    assert torch.allclose(ours.float(), wanted.float(), atol=0.1)
    if engine.spec.only.kind != "full" if len(engine.spec.classes) == 1 else True:
        with pytest.raises(PlayError, match=r"missing groups: .*3"):
            await ready_from(library, engine, faults=faults, recompute=False)


@virtual
async def test_upgrades_reach_what_the_layers_still_have(engine, library):
    """A window has moved on by two tokens when they come."""
    ready, best = await ready_from(library, engine, policy="fixed:Int8"), await ready_from(library, engine)
    with Steps(engine, ready) as steps:
        cold(engine.model, IDS[:401], ready.cache, 2)

        def write():
            for kv, better in zip(ready.played.parts, best.played.parts, strict=True):
                kv.copy_(better)

        assert steps(0, 401, write)
    for mine, theirs in layers_of(ready.cache, best.cache):
        held, other = mine.keys.shape[2], theirs.keys.shape[2]
        gone, begun = mine.get_seq_length() - held, theirs.get_seq_length() - other
        assert (gone > 0) == getattr(mine, "is_sliding", False)
        for kept, wanted in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert torch.equal(kept[:, :, : 400 - gone], wanted[:, :, gone - begun :])
        if hasattr(mine, "indexer_keys"):
            assert torch.equal(mine.indexer_keys[:, :400], theirs.indexer_keys)
