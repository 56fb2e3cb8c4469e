"""Draft heads and draft models: their layers form layer classes with the role `DRAFT`.

vLLM verifies a draft's proposals, so its cache affects only the number of accepted tokens. Both caches are published
and played together.

EAGLE and MTP compute the draft's KV of a token from the following token, which at the end of a prefix is the
publisher's. So kvabr promises tokens only up to one before the end of the shared prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvabr.engines.transformers import model_loader
from kvabr.engines.weights import cached_folder, model_name
from kvabr.types.errors import KvabrError

DRAFT = "draft"
"""Prefix of the role of a draft's layer class."""
_NAME = re.compile(r"(?:draft_model|mtp)\.")
_METHODS = ("draft_model", "eagle", "eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class DraftCaches:
    """The draft of an engine's model."""

    facts: tuple[str | None, ...] = ()
    """Facts in cache names; empty without a draft cache."""
    ahead: int = 0
    """Following tokens that a token's KV depends on."""
    why: str | None = None
    """Why its caches cannot be exchanged; None if they can."""

    def has(self, name: str, number: int, layers: int) -> bool:
        """Return True for a layer of the draft, given vLLM's name and number, and the model's layers."""
        return bool(self.facts) and (number >= layers or _NAME.match(name) is not None)


def draft_of(config: Any) -> DraftCaches:
    """Return the draft of a ``vllm.config.VllmConfig``."""
    speculative: Any = getattr(config, "speculative_config", None)
    keeps = getattr(speculative, "uses_draft_kv_cache", None)
    if keeps is None or not keeps():
        return DraftCaches()
    method, parallel = str(speculative.method), config.parallel_config
    ranks = getattr(speculative, "draft_tensor_parallel_size", None) or parallel.tensor_parallel_size
    if method not in _METHODS:
        return DraftCaches(("",), why=f"kvabr does not support drafts of the kind {method}")
    if ranks != parallel.tensor_parallel_size or getattr(parallel, "pipeline_parallel_size", 1) > 1:
        return DraftCaches(
            ("",), why="kvabr supports a draft only without pipeline stages, and with as many ranks as its model"
        )
    try:
        return DraftCaches((method, *_names(speculative, str(config.model_config.model))), _ahead(speculative))
    except (KvabrError, OSError) as error:
        return DraftCaches(("",), why=f"its draft model has no name ({error})")


def _names(speculative: Any, target: str) -> tuple[str | None, ...]:
    """Return the name of a draft's weights (None if in the model's folder), and other facts that change its KV."""
    model = speculative.draft_model_config
    how = getattr(model, "quantization", None)
    own = getattr(model.hf_config, "quantization_config", None)
    quantised = [] if how is None or own else [f"quantization {how}"]  # quantised by vLLM on loading
    if str(model.model) == target:
        return (None, *quantised)
    folder = cached_folder(str(model.model), getattr(model, "revision", None)) or Path(str(model.model))
    name = model_name(folder)
    if getattr(speculative, "use_heterogeneous_vocab", False):  # it has its own tokens
        return name, model_loader.folder_tokenizer(folder), *quantised
    return name, *quantised


def _ahead(speculative: Any) -> int:
    if not speculative.use_eagle():
        return 0
    several = getattr(speculative, "use_multi_module_mtp", None)
    if several is None or not several():
        return 1
    modules = getattr(speculative.draft_model_config.hf_config, "num_nextn_predict_layers", 1)
    return min(int(modules), int(speculative.num_speculative_tokens))
