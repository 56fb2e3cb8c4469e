"""The real-model bed: a model and its tokenizer, loaded by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvabr.engines import smollm2
from kvabr.engines.require import quiet_loading, require
from kvabr.engines.transformers import TransformersEngine, spec_of
from kvabr.errors import ModelError

SMOLLM2 = "smollm2"
"""The name of the model that comes as a package."""


@dataclass(frozen=True, slots=True)
class Bed:
    """A loaded model that can be published, scored and recomputed with."""

    engine: TransformersEngine
    tokenizer: Any
    """A `tokenizers.Tokenizer`."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without any added around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def open_bed(model: str, *, whole_windows: bool = False) -> Bed:
    """Load a model for the CPU, in float32 and without any network.

    Args:
        model: ``smollm2`` (or its full name, as catalogs have it), or a directory with config.json, tokenizer.json
            and weights in safetensors.
        whole_windows: see `kvabr.engines.transformers.spec_of`.

    Raises:
        ModelError: it is not there, something is not installed, or its cache is not plain full attention.
    """
    if model in (SMOLLM2, smollm2.NAME):
        return Bed(*smollm2.load())
    return _load_directory(Path(model), whole_windows=whole_windows)


def _load_directory(path: Path, *, whole_windows: bool) -> Bed:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no such model; give {SMOLLM2!r}, or a directory with a transformers model")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path}: has no tokenizer.json; save the tokenizer there with save_pretrained()")
    transformers = require("transformers")
    tokenizers = require("tokenizers")
    try:
        # Weights in safetensors alone, and no code from the directory: a model's folder is not a program to run.
        with quiet_loading():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=torch.float32
            )
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # transformers and tokenizers raise what comes to hand, bare Exception included
        raise ModelError(f"{path}: transformers cannot load this model ({error})") from error
    model.eval()
    context = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(context, int) or context <= 0:
        raise ModelError(f"{path}: config.json does not say how many positions the model has")
    native = str(getattr(model.config, "dtype", "")).removeprefix("torch.")
    spec = spec_of(
        model,
        name=f"{path.resolve().name}-{_fingerprint(path)}",
        tokenizer=hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest(),
        dtype="bfloat16" if native == "bfloat16" else "float16",
        whole_windows=whole_windows,
    )
    return Bed(TransformersEngine(model, spec, context=context), tokenizer)


def _fingerprint(path: Path) -> str:
    """8 hex digits that tell two models in directories of one name apart: configuration, and ends of the weights."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 16))
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read(1 << 16))
    return digest.hexdigest()[:8]
