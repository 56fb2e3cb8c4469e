"""vLLM's description of its cache as layer classes and block tables; and refused descriptions. Needs no vLLM."""

from types import SimpleNamespace

import pytest
import torch

from kvabr.engines.vllm.caches import Quantisation, UnknownCacheError, engine_caches
from kvabr.engines.vllm.config import _check_playable
from kvabr.types.kv import LayerClass


def spec(title, **fields):
    """An object with the type's name and the fields of one of vLLM's specs."""
    plain = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8, "dtype": torch.bfloat16}
    return type(title, (SimpleNamespace,), {})(**plain | fields)


def group(layers, kept, **fields):
    return SimpleNamespace(layer_names=[f"model.layers.{layer}.attn" for layer in layers], kv_cache_spec=kept, **fields)


FULL = spec("FullAttentionSpec")
WINDOW = spec("SlidingWindowSpec", sliding_window=64)


def caches(*groups, layers, **more):
    config = SimpleNamespace(kv_cache_groups=list(groups))
    layers = range(layers) if isinstance(layers, int) else layers
    return engine_caches(config, layers=layers, dtype="bfloat16", held=torch.bfloat16, **more)


def test_one_kind_with_several_tables():
    found = caches(group([0, 3], WINDOW), group([1, 4], WINDOW), group([2, 5], FULL), layers=6)
    assert found.classes == (
        LayerClass("window", (0, 1, 3, 4), 2, 8, 8, "bfloat16", window=64),
        LayerClass("full", (2, 5), 2, 8, 8, "bfloat16"),
    )
    told = [(pages.group, pages.part, pages.rows, pages.passing) for pages in found.pages]
    assert told == [(0, 0, (0, 2), True), (1, 0, (1, 3), True), (2, 1, (0, 1), False)]
    assert found.pages[1].names == ("model.layers.1.attn", "model.layers.4.attn")
    assert found.passing == found.pages[:2]
    assert (found.block, found.blocks) == (16, (16, 16, 16))


def test_latents_and_chunks_and_other_block_sizes():
    found = caches(
        group([0], spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0, block_size=32)),
        group([1], spec("ChunkedLocalAttentionSpec", attention_chunk_size=128)),
        layers=2,
        heads_of=lambda heads: 4 * heads,
    )
    assert found.classes == (
        LayerClass("latent", (0,), 1, 24, 0, "bfloat16"),
        LayerClass("chunked", (1,), 8, 8, 8, "bfloat16", window=128),
    )
    assert (found.block, found.blocks) == (32, (32, 16))
    assert found.runs([[1, 2, 3], [4, 5, 6, 7, 8, 9]], 32, 96) == ((2, 3), (6, 7, 8, 9))


def test_codes_have_the_scales_of_their_layers():
    codes = spec("FullAttentionSpec", dtype=torch.uint8, kv_quant_mode=1)
    latent = spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0, dtype=torch.uint8, kv_quant_mode=1)
    scales = {
        "model.layers.0.attn": (0.5, 2.0),
        "model.layers.2.attn": (0.25, 0.125),
        "model.layers.3.attn": (3.0, 3.0),
    }
    how = Quantisation("float8_e4m3fn", scales)
    found = caches(group([0, 2], codes), group([1], FULL), group([3], latent), layers=4, quantisation=how)
    assert found.classes == (
        LayerClass("full", (0, 2), 2, 8, 8, "float8_e4m3fn", scales=(0.5, 2.0, 0.25, 0.125)),
        LayerClass("full", (1,), 2, 8, 8, "bfloat16"),
        LayerClass("latent", (3,), 1, 24, 0, "float8_e4m3fn", scales=(3.0,)),
    )
    (alike,) = caches(group([0], codes), layers=1, quantisation=Quantisation("float8_e4m3fn")).classes
    assert alike.scales == (1.0,)
    packed = spec("FullAttentionSpec", dtype=torch.uint8, kv_quant_mode=1, state_content_bytes=20)
    with pytest.raises(UnknownCacheError, match="packed"):
        caches(group([0], packed), layers=1, quantisation=how)


def test_blocks_that_were_taken_away_stand_at_the_beginning():
    found = caches(group([0], WINDOW), group([1], FULL), layers=2)
    window, full = found.pages
    assert [window.absent(blocks) for blocks in ([], [3, 4], [0, 0, 7], [0, 0])] == [0, 0, 2, 2]
    assert full.absent([0, 1]) == 0


def test_a_stage_of_a_pipeline_has_all_tables_and_some_layers():
    uniform = SimpleNamespace(kv_cache_specs={"model.layers.1.attn": WINDOW})
    found = caches(group([], uniform), group([3], FULL), group([2], WINDOW), layers=range(2, 4))
    assert [(one.kind, one.layers) for one in found.classes] == [("window", (2,)), ("full", (3,))]
    told = [(pages.group, pages.part, pages.names, pages.passing) for pages in found.pages]
    assert told == [
        (1, 1, ("model.layers.3.attn",), False),
        (2, 0, ("model.layers.2.attn",), True),
        (0, -1, (), True),
    ]
    assert found.blocks == (16, 16, 16)
    with pytest.raises(UnknownCacheError, match="for 2 of 3 layers"):
        caches(group([], uniform), group([3], FULL), group([2], WINDOW), layers=range(2, 5))


@pytest.mark.parametrize(
    ("kept", "what"),
    [
        (spec("RSWASpec"), "as RSWASpec; kvabr supports FullAttentionSpec, .* and MambaSpec"),
        (spec("FullAttentionSpec", sliding_window=64), "without --disable-hybrid-kv-cache-manager"),
        (spec("FullAttentionSpec", attention_chunk_size=64), "ALLOW_CHUNKED_LOCAL_ATTN"),
        (spec("FullAttentionSpec", dtype=torch.uint8), "in uint8 instead of bfloat16"),
        (spec("FullAttentionSpec", kv_quant_mode=1), "in bfloat16 instead of"),
        (spec("MLAAttentionSpec", state_content_bytes=584), "packed"),
        (spec("MLAAttentionSpec", tokens_per_state=4), "several tokens per state"),
        (spec("FullAttentionSpec", non_causal=True), "attention to later tokens"),
        (spec("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=3), "beyond its window"),
        (spec("FullAttentionSpec", head_size=1 << 20), "k_dim must be .* got 1048576"),
    ],
)
def test_caches_that_kvabr_does_not_know(kept, what):
    with pytest.raises(UnknownCacheError, match=what):
        caches(group([0], kept), layers=1)


def test_other_layers_than_the_models():
    for groups in ([group([0], FULL)], [group([0, 1, 2], FULL)], [group([0, 1], FULL), group([1], WINDOW)]):
        with pytest.raises(UnknownCacheError, match="of 2 layers of the model"):
            caches(*groups, layers=2)
    with pytest.raises(UnknownCacheError, match="no layer number in its name"):
        caches(SimpleNamespace(layer_names=["attn"], kv_cache_spec=FULL), layers=1)
    with pytest.raises(UnknownCacheError, match="connectors cannot read"):
        caches(group([0], FULL, enable_kv_transfer=False), layers=1)


@pytest.mark.parametrize(("chunked", "cached"), [(False, False), (True, False), (False, True)])
def test_latents_are_not_played_where_prompts_are_computed_in_one_piece(chunked, cached):
    kept = caches(group([0], spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0)), layers=1)
    said = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        cache_config=SimpleNamespace(enable_prefix_caching=cached),
    )
    if chunked or cached:
        _check_playable(said, kept)
    else:
        with pytest.raises(UnknownCacheError, match="set kv_role to kv_producer to publish its caches"):
            _check_playable(said, kept)
    _check_playable(said, caches(group([0], FULL), layers=1))
