"""Small random models that vLLM runs on this machine's processor, as folders; their tokens are bytes."""

from __future__ import annotations

import torch

from tests.tinymodels import save_tokenizer


def tiny_gemma(folder):
    """Gemma 3 with 8 layers, six of them with a window of 100 tokens."""
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, max_position_embeddings=1024, sliding_window=100,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.1  # so that the text depends on more than the last token
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
