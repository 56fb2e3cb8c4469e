"""Facts about a loaded model for the names of its caches: adapters, quantisation, changes in memory.

PEFT's adapters are recognised by their attributes. For each layer its merged adapters count, or without any, its active
adapters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvabr.engines.adapters import require
from kvabr.engines.transformers.adapter_digest import config_of, joined_digest, module_digest
from kvabr.types.errors import ModelError

_ROWS, _COLUMNS = 4, 256
"""Rows and columns of each tensor to compare with the file: a merged adapter changes nearly all elements."""
_READ_BYTES = 64 << 20
_NOT_OF_KV = frozenset(
    {"_name_or_path", "add_cross_attention", "architectures", "attn_implementation", "chunk_size_feed_forward", "dtype"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "is_decoder", "is_encoder_decoder"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "problem_type", "quantization_config"}
    | {"return_dict", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"}
)
"""Configuration keys that do not change KV, or that are covered elsewhere."""


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a ``PeftModel``, which still has the adapters; other models unchanged.

    Raise `ModelError` for prompt or prefix tuning.
    """
    if not (hasattr(model, "get_base_model") and hasattr(model, "peft_config")):
        return model
    if any(getattr(each, "is_prompt_learning", False) for each in model.peft_config.values()):
        raise ModelError(
            "the adapter of this PeftModel puts its own tokens before every prompt (prompt or prefix tuning), but "
            "kvabr's caches begin with the prompt's tokens; use LoRA or another adapter of layers"
        )
    return model.get_base_model()


def facts_of(model: Any, folder: Path) -> dict[str, Any]:
    """Return the facts, beyond its folder, that change a model's KV, see `with_facts`; empty for an unchanged model."""
    return {
        "adapters": adapters_digest(model),
        "config": _changed_config(model, folder),
        "quantization": _quantization(model, folder),
        "weights": None if _has_its_folders_weights(model, folder) else _memory_digest(model),
    }


def state_of(model: Any) -> tuple[object, ...] | None:
    """Return a value that changes with adapters or weights, without reading weights; None if unavailable.

    It uses PyTorch's count of writes to each tensor, which misses writes through ``weight.data``.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    if any(each.is_meta for _, each in parameters):
        return None  # the weights are read layer by layer
    counts = tuple((name, id(each), 0 if each.is_inference() else each._version) for name, each in parameters)  # noqa: SLF001
    return counts, tuple(_acting(model))


def adapters_digest(model: Any) -> str | None:
    """Return a digest of the active adapters' weights, configurations and scales; None without adapters.

    Merging an adapter does not change the digest, and neither do names of adapters or inactive modules.
    """
    parts: list[bytes] = []
    modules = dict(model.named_modules())
    configs = getattr(model, "peft_config", None) or {}
    for place, adapters, scales in _acting(model):
        for adapter, scale in zip(adapters, scales, strict=True):
            tensors = ((name.split("."), tensor) for name, tensor in _tensors(modules[place]))
            own = [(".".join(p for p in path if p != adapter), each) for path, each in tensors if adapter in path]
            parts.append(module_digest(place, scale, config_of(configs.get(adapter)), own))
    return joined_digest(parts) if parts else None


def _acting(model: Any) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield each module with active adapters: its name, the adapters' names, and their scales."""
    for place, module in model.named_modules():
        tuned, wrapped = hasattr(module, "adapter_layer_names"), hasattr(module, "original_module")
        if not (tuned or wrapped) or not hasattr(module, "active_adapters"):
            continue
        acting = list(getattr(module, "merged_adapters", ()))
        if not acting and not getattr(module, "disable_adapters", False):
            active = module.active_adapters
            acting = [active] if isinstance(active, str) else list(active)
        own = {part for name, _ in _tensors(module) for part in name.split(".")}
        found = tuple(adapter for adapter in acting if adapter in own)
        if found:
            scaling = getattr(module, "scaling", {})
            scales = scaling if isinstance(scaling, Mapping) else {}
            yield place, found, tuple(str(scales.get(adapter)) for adapter in found)


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _feed(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"\0{tensor.dtype}{tuple(tensor.shape)}\0".encode())
    flat = tensor.detach().reshape(-1)
    step = max(1, _READ_BYTES // max(1, flat.element_size()))
    for first in range(0, flat.numel(), step):
        piece = flat[first : first + step].cpu().contiguous()
        digest.update(piece.view(torch.uint8).numpy().tobytes())


def _changed_config(model: Any, folder: Path) -> dict[str, Any]:
    transformers = require("transformers")
    own = _values(model.config)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        theirs = _values(config)
    except Exception:  # noqa: BLE001  # transformers may raise any error; then the whole configuration is covered
        theirs = {}
    return {
        key: [own.get(key), theirs.get(key)]
        for key in sorted({*own, *theirs} - _NOT_OF_KV)
        if own.get(key) != theirs.get(key) and not key.startswith("_")
    }


def _values(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(config.get_text_config(decoder=True).to_dict(), default=str))
    return found


def _quantization(model: Any, folder: Path) -> Any:
    own = getattr(model.config, "quantization_config", None)
    if own is None:
        return None
    values = json.loads(json.dumps(own.to_dict() if hasattr(own, "to_dict") else own, default=str, sort_keys=True))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        if isinstance(theirs, dict) and all(values.get(key) == value for key, value in theirs.items()):
            return None
    return values


def _has_its_folders_weights(model: Any, folder: Path) -> bool:
    """Return True if samples of each tensor equal the tensor of the same name in the folder's safetensors.

    Tensors that are quantised, not in memory, or merged with adapters are skipped.
    """
    merged = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "merged_adapters", ()))
    held = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.is_floating_point() and not tensor.is_meta and not (merged and name.startswith(merged))
    }
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            if not all(_alike(file.get_slice(name), held[name]) for name in file.keys() if name in held):  # noqa: SIM118
                return False
    return True


def _alike(stored: Any, held: torch.Tensor) -> bool:
    shape = stored.get_shape()
    if tuple(shape) != tuple(held.shape) or not shape or 0 in shape:
        return True
    rows = sorted({int(row) for row in torch.linspace(0, shape[0] - 1, min(shape[0], _ROWS))})
    if len(shape) == 1:
        pairs = [(stored[:_COLUMNS], held[:_COLUMNS])]
    else:
        pairs = [(stored[row : row + 1, :_COLUMNS], held[row : row + 1, :_COLUMNS]) for row in rows]
    for theirs, own in pairs:
        if not theirs.is_floating_point():
            return True
        if not torch.allclose(theirs.to(own.dtype), own.detach().cpu(), rtol=0.0, atol=0.0, equal_nan=True):
            return False
    return True


def _memory_digest(model: Any) -> str:
    digest = hashlib.sha256()
    inside = {name for name, module in model.named_modules() if hasattr(module, "adapter_layer_names")}
    for name, tensor in sorted(model.named_parameters(remove_duplicate=False)):
        tuned = any(name.startswith(f"{place}.") for place in inside)
        if not tensor.is_meta and (not tuned or ".base_layer." in name):
            digest.update(name.encode())
            _feed(digest, tensor)
    return digest.hexdigest()
