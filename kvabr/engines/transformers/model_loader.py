"""Loads a transformers model with its tokenizer: SmolLM2 from its package, or a local directory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from kvabr.engines.adapters import require
from kvabr.engines.transformers import smollm2
from kvabr.engines.transformers.engine import TransformersEngine, quiet_loading
from kvabr.engines.transformers.identity import facts_of, unwrapped
from kvabr.engines.transformers.layerwise import LayerwiseEngine, open_layers
from kvabr.engines.transformers.spec import spec_of
from kvabr.engines.weights import Progress, model_name
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.naming import with_facts

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class LoadedModel:
    """A model that can prefill and score, and its tokenizer."""

    engine: TransformersEngine
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens before or after it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Special tokens that the tokenizer puts before every text, such as ``<bos>``."""
        found = self.tokenizer.encode("a", add_special_tokens=True)
        pairs = zip(found.ids, found.special_tokens_mask, strict=True)
        return tuple(token for token, _ in takewhile(lambda pair: pair[1], pairs))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def load_model(
    model: str,
    *,
    whole_windows: bool = False,
    device: str = "cpu",
    dtype: str | None = None,
    by_layer: bool | None = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model without network.

    Args:
        model: ``smollm2`` (or its full name, as in catalogs), or a directory with config.json, tokenizer.json and
            weights in safetensors.
        whole_windows: see `kvabr.engines.transformers.spec_of`.
        device: torch's name of the device: ``cpu``, ``cuda``, ``cuda:1``.
        dtype: element type of computation, one of `COMPUTE_DTYPES`; None: float32 on a CPU, else the type of the saved
            weights.
        by_layer: True to leave the layers on disk, see `kvabr.engines.transformers.layerwise`; None: only if the
            weights exceed half of the memory.
        progress: called while weights are read to compute their digest, which is cached.

    Raises:
        ModelError: the model is missing or unsupported, or a package is not installed.
        UsageError: there is no such device.
    """
    where = find_device(device)
    if model in (SMOLLM2, smollm2.NAME):
        if by_layer:
            raise ModelError(f"{SMOLLM2} is a single file in another format: use --load whole")
        engine, tokenizer = smollm2.load()
        engine.model.to(device=where, dtype=_compute_dtype(dtype, where, "float32"))
        return LoadedModel(engine, tokenizer)
    path = Path(model)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no such model; give {SMOLLM2!r} or a directory with a transformers model")
    _check_folder(path)
    transformers = require("transformers")
    tokenizers = require("tokenizers")
    computed = _compute_dtype(dtype, where, _own_dtype(path))
    if by_layer is None:
        by_layer = _is_large(path, where, computed)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        if not by_layer:
            # Only weights in safetensors, and no code: a model's directory must not execute anything.
            with quiet_loading():
                loaded = transformers.AutoModelForCausalLM.from_pretrained(
                    path, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=computed
                ).to(where)
    except Exception as error:  # transformers and tokenizers may raise anything
        raise ModelError(f"{path}: transformers cannot load this model ({error})") from error
    if not by_layer:
        return LoadedModel(engine_of(loaded, path, whole_windows=whole_windows, progress=progress), tokenizer)
    loaded, layers = open_layers(path, where, computed)
    engine = engine_of(loaded, path, whole_windows=whole_windows, progress=progress)
    return LoadedModel(LayerwiseEngine(engine, layers), tokenizer)


def load_tokenizer(model: str) -> tuple[str, Any]:
    """Return the model's name for caches and its `tokenizers.Tokenizer`, without weights; raise as `load_model`."""
    if model in (SMOLLM2, smollm2.NAME):
        return smollm2.NAME, smollm2.load_tokenizer()
    path = Path(model)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no such model; give {SMOLLM2!r} or a directory with a transformers model")
    _check_folder(path)
    try:
        return model_name(path), require("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
    except ModelError:
        raise
    except Exception as error:  # tokenizers may raise anything
        raise ModelError(f"{path}: its tokenizer cannot be loaded ({error})") from error


def find_device(name: str) -> torch.device:
    """Return a device of this machine by torch's name; raise `UsageError` if there is none."""
    try:
        device = torch.device(name)
        if device.type != "cpu":
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device {name!r} is not available ({str(error).splitlines()[0]}); use cpu") from error
    if device.type == "meta":
        raise UsageError("cannot compute on the device meta; use cpu")
    return device


def _compute_dtype(dtype: str | None, device: torch.device, own: str) -> torch.dtype:
    """Return the element type of computation: float32 on a CPU."""
    if dtype is None:
        dtype = own if device.type != "cpu" and own in COMPUTE_DTYPES else "float32"
    made: torch.dtype = getattr(torch, dtype)
    return made


def _is_large(path: Path, device: torch.device, dtype: torch.dtype) -> bool:
    size = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    if _own_dtype(path) in ("float16", "bfloat16"):
        size = size * dtype.itemsize // 2
    if device.type == "cuda":
        room = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return size > room // 2


def engine_of(
    model: Any,
    path: Path | str,
    *,
    whole_windows: bool = False,
    snapshots_every: int | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> TransformersEngine:
    """Return the engine of a model loaded from a directory; its caches have the same names as with `kvabr encode`.

    The name also covers changes since loading: active adapters (PEFT), quantisation, configuration, merged weights.
    After further changes this engine refuses to play and publish; create a new one.

    Args:
        model: the loaded causal language model, or a ``PeftModel``; any element type, any device.
        path: the directory with config.json, tokenizer.json and the weights.
        whole_windows: see `kvabr.engines.transformers.spec_of`.
        snapshots_every: see `kvabr.engines.transformers.spec_of`.
        name: the model's name; None: `kvabr.engines.weights` derives it.
        progress: called while weights are read to compute their digest.

    Raises:
        ModelError: a layer is unsupported, or the directory has no model.
    """
    path = Path(path)
    _check_folder(path)
    model = unwrapped(model)
    model.eval()
    context = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(context, int) or context <= 0:
        raise ModelError(f"{path}: config.json does not give the number of positions of the model")
    if (original := original_context(model.config)) is not None:
        context = min(context, original)  # longer prompts have different keys from their first token on
    spec = spec_of(
        model,
        name=with_facts(name or model_name(path, progress), facts_of(model, path)),
        tokenizer=folder_tokenizer(path),
        dtype=asset_dtype(_own_dtype(path)),
        whole_windows=whole_windows,
        snapshots_every=snapshots_every,
    )
    return TransformersEngine(model, spec, context=context, watched=True)


def original_context(config: Any) -> int | None:
    """Return the length up to which LongRoPE treats prompts as short, in tokens; None for other embeddings."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if (rope.get("rope_type") or rope.get("type")) not in ("longrope", "su"):
        return None
    found = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _check_folder(path: Path) -> None:
    if missing := [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]:
        raise ModelError(
            f"{path}: has no {' and no '.join(missing)}; give the directory that the model was loaded from, with its "
            "tokenizer as save_pretrained() writes it"
        )


def _own_dtype(path: Path) -> str:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: its config.json cannot be read ({error})") from error
    own = config.get("dtype") or config.get("torch_dtype") if isinstance(config, dict) else None
    return str(own).removeprefix("torch.")


def folder_tokenizer(path: Path) -> str:
    """Return the digest of the tokenizer in a model's directory."""
    return hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()


def asset_dtype(native: str) -> str:
    """Return the element type of published caches, given the model's type."""
    return "bfloat16" if native == "bfloat16" else "float16"
