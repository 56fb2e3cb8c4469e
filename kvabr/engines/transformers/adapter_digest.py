"""Digests of LoRA adapters; PEFT's modules in memory and the folder that PEFT saves have the same digest.

A digest covers the matrices of each module, in float32, and their scales, but no names, versions or training settings.
For other adapters (DoRA, activation tokens, kinds other than LoRA), it covers the whole configuration.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvabr.store.files import read_text
from kvabr.types.errors import KvabrError, ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES, _MAX_BYTES, _MAX_MODULES = 1 << 20, 32 << 30, 1 << 20
_READ_BYTES = 64 << 20
_SOURCE = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
)
_IMPLIED = frozenset(
    {"alpha_pattern", "bias", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out", "init_lora_weights"}
    | {"layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config"}
    | {"megatron_config", "megatron_core", "peft_type", "qalora_group_size", "r", "rank_pattern", "runtime_config"}
    | {"target_modules", "target_parameters", "use_rslora", "ensure_weight_tying"}
)
"""Configuration keys that weights, module names and scales of a LoRA adapter imply, or that are used only in training.
"""
_PLAIN_NAME = re.compile(r"\^?[\w.-]+")
_PREFIX = "base_model.model."
_MODULE = re.compile(r"(?P<place>.+)\.(?P<name>lora_(?:embedding_)?[A-Za-z_]+(?:\.\w+)*)")

ActingTensors = Iterable[tuple[str, torch.Tensor]]


def module_digest(place: str, scale: float | str | None, config: Mapping[str, Any] | None, own: ActingTensors) -> bytes:
    """Return the digest of an adapter's effect in one module.

    ``place`` is the module's name in the model, ``scale`` the factor of its matrices' product, ``config`` a result of
    `config_of`, and ``own`` the module's tensors, named without the adapter.
    """
    digest = hashlib.sha256(json.dumps([place, str(scale), config], sort_keys=True, default=str).encode())
    for name, tensor in sorted(own, key=lambda pair: pair[0]):
        digest.update(f"\0{name}{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, _READ_BYTES // max(1, flat.element_size()))
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step].cpu()
            piece = piece.float() if piece.is_floating_point() else piece
            digest.update(piece.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def joined_digest(modules: Iterable[bytes]) -> str:
    """Return the digest of one or more adapters, given the digests of all modules."""
    return hashlib.sha256(b"kvabr.adapter/1\0" + b"".join(sorted(modules))).hexdigest()


def config_of(config: Any) -> dict[str, Any] | None:
    """Return the configuration of an adapter, without weights and scales; None for plain LoRA."""
    if config is None:
        return None
    values = dict(config.to_dict() if hasattr(config, "to_dict") else config)
    values = {
        key: sorted(value) if isinstance(value, set | frozenset) else value
        for key, value in values.items()
        if key not in _SOURCE
    }
    kind = getattr(values.get("peft_type"), "value", values.get("peft_type"))
    plain = kind == "LORA" and values.get("bias") in (None, "none")
    if plain and not any(value for key, value in values.items() if key not in _IMPLIED):
        return None
    return values


def folder_digest(folder: Path) -> str:
    """Return the digest of a LoRA adapter in PEFT's folder; raise `ModelError` if it is missing or malformed."""
    try:
        config = json.loads(read_text(folder / CONFIG, _MAX_CONFIG_BYTES))
    except (KvabrError, OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder / CONFIG}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / CONFIG}: not the configuration of an adapter")
    path = folder / WEIGHTS
    told = config_of(config)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{path}: more than the {_MAX_BYTES >> 30} GiB allowed")
        with safe_open(path, framework="pt") as file:
            digests = []
            for place, names in _modules(path, file.keys()).items():
                own = ((name, file.get_tensor(stored)) for name, stored in names)
                digests.append(module_digest(place, _scale(folder, config, place), told, own))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path}: cannot be read as safetensors ({error}); save the adapter with `PeftModel.save_pretrained`"
        ) from error
    return joined_digest(digests)


def _modules(path: Path, stored: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name in stored:
        parts = _MODULE.fullmatch(name.removeprefix(_PREFIX))
        if parts is None:
            raise ModelError(f"{path}: {name[:80]!r} is not a tensor of a LoRA adapter")
        found.setdefault(parts["place"], []).append((parts["name"], name))
        if len(found) > _MAX_MODULES:
            raise ModelError(f"{path}: more than {_MAX_MODULES:,} modules")
    if not found:
        raise ModelError(f"{path}: has no tensors")
    return found


def _scale(folder: Path, config: Mapping[str, Any], place: str) -> float:
    rank = _pattern(folder, config.get("rank_pattern"), place, config.get("r"))
    alpha = _pattern(folder, config.get("alpha_pattern"), place, config.get("lora_alpha"))
    if not isinstance(rank, int) or rank < 1 or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelError(
            f"{folder / CONFIG}: r and lora_alpha must be numbers, got {str(rank)[:40]!r} and {str(alpha)[:40]!r}"
        )
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _pattern(folder: Path, patterns: object, place: str, usual: object) -> object:
    """Return the value of the first pattern that matches the end of a module's name, starting at a dot."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if not _PLAIN_NAME.fullmatch(pattern):  # PEFT would match it as a regular expression, which may never end
            raise ModelError(f"{folder / CONFIG}: the pattern {pattern[:80]!r} must be a plain module name")
        name = pattern.removeprefix("^")
        if place == name or (name == pattern and place.endswith(f".{name}")):
            return value
    return usual
