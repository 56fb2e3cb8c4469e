"""Tiny random models of many architectures, with caches of every kind: for layouts, bytes and exactness."""

from functools import partial

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.engines.transformers import (
    TransformersEngine,
    cache_publisher,
    play_cache_async,
    prefill_prompt,
    publish_cache,
    spec_of,
)
from kvabr.engines.transformers.cache import new_cache
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.cost import PrefillCost
from tests.engines.transformers.text import IDS, PREFIX
from tests.memory_transport import MemoryConnection, MemoryLink

SLOW = PrefillCost.from_rate(100.0)
"""So slow an engine that nothing is computed that comes over the network."""

SMALL = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 640, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    "num_hidden_layers": 3,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
SLIDES, FULL, CHUNKED, LINEAR = "sliding_attention", "full_attention", "chunked_attention", "linear_attention"
MIXED = {"layer_types": [LINEAR, FULL, LINEAR]}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    **MIXED,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}  # fmt: skip

PLAIN = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {"initializer_range": 0.3}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"initializer_range": 0.3}),
    "Phi": ("PhiConfig", "PhiForCausalLM", {"initializer_range": 0.3}),
}
"""Models whose layers keep keys and values of every token in one shape; Phi's rotate in part. Attention counts."""
ATTENTION = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 64, "layer_types": [SLIDES, SLIDES, FULL]}),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 200}),
    "GPT-OSS": (
        "GptOssConfig", "GptOssForCausalLM", {"sliding_window": 128, "layer_types": [SLIDES, FULL, SLIDES], **EXPERTS},
    ),
    "Llama 4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 128, "layer_types": [CHUNKED, CHUNKED, FULL], "no_rope_layers": [1, 1, 0],
            "intermediate_size_mlp": 48, **EXPERTS,
        },
    ),
    "DeepSeek V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "DeepSeek V2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, "topk_method": "greedy"}),
    "DeepSeek V3.2": ("DeepseekV32Config", "DeepseekV32ForCausalLM", INDEXED),
    "DeepSeek V4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            "head_dim": 16, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2,
            "partial_rotary_factor": 0.5, "moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1,
            "sliding_window": 64, "layer_types": [SLIDES] * 3, "mlp_layer_types": ["moe"] * 3, "hc_mult": 2,
        },
    ),
    "Gemma 4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "sliding_window": 64, "layer_types": [SLIDES, FULL, SLIDES, FULL], "num_hidden_layers": 4,
            "num_kv_shared_layers": 2, "attention_k_eq_v": True, "global_head_dim": 16, "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256,
        },
    ),
    "GLM DSA": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", INDEXED),
}  # fmt: skip
"""Models whose layers keep something of every token."""
APART = {
    "Gemma3 scaled": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **ATTENTION["Gemma3"][2],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDES: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "DeepSeek V4 compressed": (
        *ATTENTION["DeepSeek V4"][:2],
        {**ATTENTION["DeepSeek V4"][2], "layer_types": [SLIDES, "heavily_compressed_attention", SLIDES]},
    ),
    "Llama 4 mixed": (*ATTENTION["Llama 4"][:2], {**ATTENTION["Llama 4"][2], "layer_types": [CHUNKED] * 3}),
}
"""Models whose layers rotate keys differently."""
STATES = {
    "Qwen3-Next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **DELTA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "Kimi Linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **LATENT, **MIXED, "q_lora_rank": None, "num_experts": 2, "num_experts_per_token": 1, "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "Granite 4": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**MAMBA, **MIXED, **EXPERTS, "shared_intermediate_size": 16},
    ),
    "Bamba": ("BambaConfig", "BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1]}),
    "Falcon-H1": ("FalconH1Config", "FalconH1ForCausalLM", {**MAMBA, "mamba_d_ssm": 64}),
    "Nemotron-H": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": [LINEAR, "mlp", FULL, LINEAR], "num_hidden_layers": 4, "mamba_num_heads": 8,
            "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32, "expand": 2,
            "initializer_range": 0.1,
        },
    ),
    "LFM2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", FULL, "conv"], "conv_L_cache": 3}),
    "MiniMax": (
        "MiniMaxConfig", "MiniMaxForCausalLM", {"layer_types": [FULL, LINEAR, FULL], "block_size": 32, **EXPERTS},
    ),
    "Mamba-2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "expand": 2,
            "chunk_size": 32,
        },
    ),
}  # fmt: skip
"""Models with layers whose state stands for all tokens; only the last has nothing else."""
IGNORED = {
    "Jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        },
    ),
}  # fmt: skip
"""Models whose layers do not go on from the state of their cache."""


def tiny(name, *, dtype=torch.bfloat16, kept="bfloat16", **options):
    """The engine of a model by its name here; ``kept`` is the element type of its published caches."""
    import transformers

    config, kind, changes = (PLAIN | ATTENTION | APART | STATES | IGNORED)[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**(SMALL | changes))
    # Not made in float32 and cast: that would round the frequencies of the rotary embedding, too.
    model = getattr(transformers, kind)._from_config(made, dtype=dtype).eval()
    spec = spec_of(model, name=f"tiny/{name.replace(' ', '-')}", tokenizer="bytes", dtype=kept, **options)
    return TransformersEngine(model, spec, context=640)


@torch.inference_mode()
def prefilled(engine, ids, *, whole=False):
    """The cache that a model computes for a prompt by itself; with ``whole``, windows keep every token."""
    cache = new_cache(engine.model, whole=whole)
    engine.model(input_ids=torch.tensor([ids]), **{engine.cache_argument: cache}, use_cache=True)
    return cache


@torch.inference_mode()
def continued(engine, cache, ids):
    """The logits of the tokens that follow a cache, which grows."""
    return engine.model(input_ids=torch.tensor([ids]), **{engine.cache_argument: cache}, use_cache=True).logits


def published(engine, root, ids=PREFIX, *, cache=None, **how):
    """An origin's holdings with the cache of a prompt, which is prefilled unless it is given."""
    publisher = cache_publisher(engine, root, **how)
    outcome = publish_cache(publisher, engine, prefill_prompt(engine, ids) if cache is None else cache, ids)
    publisher.close()
    assert outcome.result().verdict == "published", outcome.result()
    return PublishedAssets(root)


async def ready_from(library, engine, ids=IDS, *, faults=None, **how):
    """The result of a play of the caches for a prompt, over a link in memory."""
    options = PlayOptions(**({"prefill_cost": SLOW} | how))
    link = MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(1e8, 0.02), faults=faults)
    async with link, AsyncClient(link, options=options) as client:
        return await play_cache_async(client, engine, ids, deadline=2.0)
