"""Facts about SGLang's model for the names of caches: ranks, weights, quantisation, overrides; and its step size.

A storage backend receives only ranks and a name. The other facts are in ``sglang.srt.runtime_context``, if it is
loaded. Does not import SGLang.
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
"""Names of server arguments that change KV, by fact."""
_USUAL = (None, "", "{}", "auto", "default")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a server's model."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


def name_of(config: Any, settings: KeyedSettings, dtype: torch.dtype) -> str:
    """Return the model's name for its pages; errors as `kvabr.engines.chunk_store.named`.

    ``config`` is a ``HiCacheStorageConfig``, ``dtype`` the element type of the host pool.
    """
    server, given = server_facts(), config.model_name or "model"
    facts = {**server.facts, **shard_facts(config), "dtype": unusual_dtype(dtype)}
    return named(settings, given, facts, folder=server.folder or local_folder(given))


def page_key(config: Any, key: str, *, latent: bool = False) -> str:
    """Return the key of a page in this rank, given SGLang's hash of the adapter and all tokens up to the page's end.

    Latents are the same in all tensor-parallel ranks, so one rank publishes them for all.
    """
    ranks = "mla" if latent else f"{config.tp_size}@{config.tp_rank}"
    return f"@{ranks}@{config.pp_size}@{config.pp_rank}@{key}"


def server_facts() -> ServerFacts:
    """Return the facts about this process's server; empty without a server."""
    arguments = _from_context("get_server_args")
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
    """Return the ranks of a ``HiCacheStorageConfig`` that share each page.

    Keys already contain tensor and pipeline ranks; data-parallel ranks have whole pages.
    """
    facts: dict[str, Any] = {}
    for name in ("attn_cp", "dcp"):
        size = int(getattr(config, f"{name}_size", 1) or 1)
        if size > 1:
            facts[name] = [int(getattr(config, f"{name}_rank", 0)), size]
    if "dcp" in facts:
        facts["logical_page_size"] = getattr(config, "logical_page_size", None)
    return facts


def unusual_dtype(dtype: torch.dtype) -> str | None:
    """Return the element type of a cache, or None if it is bfloat16."""
    return None if dtype is torch.bfloat16 else str(dtype).removeprefix("torch.")


def weight_version() -> str | None:
    """Return the version of the weights at the server's start or last update."""
    version = getattr(_from_context("get_serving"), "weight_version", None)
    return version if isinstance(version, str) and version not in _USUAL else None


def step_tokens() -> int:
    """Return SGLang's maximum tokens per step; the default if unknown."""
    size = getattr(_from_context("get_server_args"), "chunked_prefill_size", None)
    return size if isinstance(size, int) and size > 0 else STEP_TOKENS


def _from_context(name: str) -> Any:
    try:
        return getattr(sys.modules[_CONTEXT], name)()
    except (KeyError, AttributeError, ValueError, AssertionError, RuntimeError):
        return None


def _plain(value: Any) -> str | None:
    return None if value in _USUAL else str(value)
