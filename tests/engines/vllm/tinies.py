"""Small random models that vLLM runs on this machine's processor, as folders; their tokens are bytes."""

import json
import shutil

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


def tiny_llama(folder):
    """Llama with two layers of two KV heads: a model without anything that an option of vLLM could mind."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.1  # so that the text depends on more than the last token
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tiny_adapter(folder, seed=1):
    """A LoRA adapter of `tiny_llama`, which changes its text."""
    from safetensors.torch import save_file

    folder.mkdir()
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, out in (("q_proj", 128), ("v_proj", 64)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, 128)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, 8)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def tiny_delta(folder):
    """Qwen3-Next with a gated delta layer, full attention and another gated delta layer; its blocks have 128 tokens."""
    import transformers

    config = transformers.Qwen3NextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=1024, initializer_range=0.2,
        layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    # Not made in float32 and cast: that would round the frequencies of the rotary embedding, too.
    transformers.Qwen3NextForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tiny_blip(folder):
    """BLIP-2 of pictures of 32x32 pixels, for which 200 tokens stand at the beginning of every prompt."""
    import transformers
    from tokenizers import Tokenizer

    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    small = {"intermediate_size": 48, "hidden_size": 32, "num_attention_heads": 2, "initializer_range": 0.2}
    text = transformers.OPTConfig(
        vocab_size=257, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=64,
        max_position_embeddings=1024, init_std=0.2, **ends,
    )  # fmt: skip
    vision = transformers.Blip2VisionConfig(image_size=32, patch_size=8, num_hidden_layers=1, **small)
    former = transformers.Blip2QFormerConfig(
        vocab_size=257, num_hidden_layers=2, encoder_hidden_size=32, cross_attention_frequency=1, **small
    )
    parts = {"vision_config": vision, "qformer_config": former, "text_config": text}
    config = transformers.Blip2Config(
        **{name: part.to_dict() for name, part in parts.items()},
        num_query_tokens=200, image_token_index=256, image_text_hidden_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config)
    model.query_tokens.data.normal_()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024},
        "processor_config": {"processor_class": "Blip2Processor", "num_query_tokens": 200},
        "preprocessor_config": {
            "image_processor_type": "BlipImageProcessor", "size": {"height": 32, "width": 32}, "do_resize": True,
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        },
    }  # fmt: skip
    for name, told in files.items():
        (folder / f"{name}.json").write_text(json.dumps(told))
    return folder


def tiny_draft(folder, target):
    """A draft model for `tiny_llama`, which guesses many of its tokens: itself, with a little noise."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    torch.manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: each + 0.02 * each.std() * torch.randn_like(each) for name, each in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_eagle(folder):
    """A Llama of one layer, and an EAGLE head that guesses most of its tokens; the folders of both.

    The head has the layer of the model, over the embeddings of the tokens that follow each.
    """
    import transformers
    from safetensors.torch import save_file

    target, head = folder / "target", folder / "head"
    tiny_llama(target)
    model = transformers.LlamaForCausalLM.from_pretrained(target, num_hidden_layers=1)
    torch.manual_seed(5)
    rows = model.model.embed_tokens.weight.data.normal_()
    rows /= rows.square().mean(dim=1, keepdim=True).sqrt()  # so that normalising them changes nothing: a head does not
    model.model.layers[0].self_attn.o_proj.weight.data *= 3  # so that the text depends on more than the last token
    model.save_pretrained(target)
    weights = {
        name.removeprefix("model."): each
        for name, each in model.state_dict().items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    size = rows.shape[1]
    weights["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    head.mkdir()
    save_file({name: each.contiguous() for name, each in weights.items()}, head / "model.safetensors")
    config = json.loads((target / "config.json").read_text()) | {"architectures": ["EagleLlamaForCausalLM"]}
    (head / "config.json").write_text(json.dumps(config))
    save_tokenizer(head)
    return target, head


def tiny_latent(folder, kind):
    """DeepSeek V3 (``deepseek``) or GLM 4.7 Flash (``glm``) with two layers, which keep latents."""
    import transformers

    family, layers = {
        "deepseek": ("DeepseekV3", {"first_k_dense_replace": 2}),
        "glm": ("Glm4MoeLite", {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1}),
    }[kind]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.2, kv_lora_rank=512, q_lora_rank=32,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        **layers,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tiny_scaled(folder, scales):
    """`tiny_llama` as it is calibrated for an FP8 cache: ``scales`` are those of keys and of values, layer by layer."""
    from safetensors.torch import load_file, save_file

    tiny_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    about = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    config["quantization_config"] = about | {"kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer, pair in enumerate(scales):
        for half, scale in zip("kv", pair, strict=True):
            weights[f"model.layers.{layer}.self_attn.{half}_scale"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
