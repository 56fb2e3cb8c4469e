"""What SGLang tells of its model besides its name, for the names of caches: ranks, weights, quantisation, overrides.

And how much it computes in a step.

A storage backend is given ranks and a name. The rest is in the context of the process (``sglang.srt.runtime_context``),
which is looked at if SGLang has loaded it; in a test there may be none. Imports nothing of SGLang.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvabr.engines.chunk_store import STEP_TOKENS, KeyedSettings, named
from kvabr.engines.weights import cached_folder, local_folder

_CONTEXT = "sglang.srt.runtime_context"
_FACTS = {
    "quantization": "quantization",
    "overrides": "json_model_override_args",
    "torchao": "torchao_config",
    "model_impl": "model_impl",
}
"""By fact, the argument of the server that changes KV."""
_USUAL = (None, "", "{}", "auto", "default")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server was told of its model."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Where its weights are."""


def name_of(config: Any, settings: KeyedSettings, dtype: torch.dtype) -> str:
    """Return what the model is called in the names of its pages; errors as `kvabr.engines.chunk_store.named`.

    Args:
        config: a ``HiCacheStorageConfig``.
        settings: the user's.
        dtype: element type of the host pool.
    """
    server, given = server_facts(), config.model_name or "model"
    facts = {**server.facts, **shard_facts(config), "dtype": told_dtype(dtype)}
    return named(settings, given, facts, folder=server.folder or local_folder(given))


def page_key(config: Any, key: str, *, latent: bool = False) -> str:
    """Return the key of a page and this rank: SGLang's hash covers all tokens up to its end, and an adapter.

    Latents are the same in all ranks of tensor parallelism: one publishes them, all read them.
    """
    ranks = "mla" if latent else f"{config.tp_size}@{config.tp_rank}"
    return f"@{ranks}@{config.pp_size}@{config.pp_rank}@{key}"


def server_facts() -> ServerFacts:
    """Return what this process's server was told; nothing if there is none."""
    arguments = _asked("get_server_args")
    path = getattr(arguments, "model_path", None)
    if not isinstance(path, str):
        return ServerFacts()
    revision = _plain(getattr(arguments, "revision", None))
    folder = cached_folder(path, revision)
    facts = {fact: _plain(getattr(arguments, name, None)) for fact, name in _FACTS.items()}
    dummy = getattr(arguments, "load_format", None) == "dummy"
    facts |= {"revision": revision if folder is None else None, "load_format": "dummy" if dummy else None}
    return ServerFacts(facts, folder)


def shard_facts(config: Any) -> dict[str, Any]:
    """Return the ranks of a ``HiCacheStorageConfig`` that hold a part of each page, where there are several.

    Those of tensor and pipeline parallelism are in every key. Of data-parallel ranks each has whole pages.
    """
    facts: dict[str, Any] = {}
    for name in ("attn_cp", "dcp"):
        size = int(getattr(config, f"{name}_size", 1) or 1)
        if size > 1:
            facts[name] = [int(getattr(config, f"{name}_rank", 0)), size]
    if "dcp" in facts:
        facts["logical_page_size"] = getattr(config, "logical_page_size", None)
    return facts


def told_dtype(dtype: torch.dtype) -> str | None:
    """Return the element type of a cache if it is not the usual one, bfloat16."""
    return None if dtype is torch.bfloat16 else str(dtype).removeprefix("torch.")


def weight_version() -> str | None:
    """Return the version of the weights that the server was started with, or that came with their last update."""
    version = getattr(_asked("get_serving"), "weight_version", None)
    return version if isinstance(version, str) and version not in _USUAL else None


def step_tokens() -> int:
    """Return the tokens that SGLang was told to compute in a step at most; the usual if nothing was said."""
    told = getattr(_asked("get_server_args"), "chunked_prefill_size", None)
    return told if isinstance(told, int) and told > 0 else STEP_TOKENS


def _asked(name: str) -> Any:
    """Return what a function of SGLang's context returns; None if there is none, or nothing is published there yet."""
    try:
        return getattr(sys.modules[_CONTEXT], name)()
    except (KeyError, AttributeError, ValueError, AssertionError, RuntimeError):
        return None


def _plain(value: Any) -> str | None:
    return None if value in _USUAL else str(value)
