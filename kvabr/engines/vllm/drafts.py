"""Draft heads and draft models: their layers form layer classes with the role `DRAFT`.

vLLM verifies a draft's proposals, so the draft's cache affects only the number of accepted tokens. The caches of model
and draft are published and played together.

EAGLE and MTP compute the draft's KV of a token from the following token. At the end of a shared prefix, that is a token
of the publisher's prompt. So kvabr promises one token less than the shared prefix.
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
"""Prefix of the roles of a draft's layer classes."""
_NAME = re.compile(r"(?:draft_model|mtp)\.")
_METHODS = ("draft_model", "eagle", "eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class DraftCaches:
    """The draft of an engine's model."""

    facts: tuple[str | None, ...] = ()
    """Facts in cache names; empty if the draft has no cache."""
    ahead: int = 0
    """Number of following tokens that a token's KV depends on."""
    why: str | None = None
    """Why the draft's caches cannot be exchanged; None if they can."""

    def has(self, name: str, number: int, layers: int) -> bool:
        """Return True for a layer of the draft, by vLLM's layer name and number, and the model's number of layers."""
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
    """Return the name of a draft's weights (None if they are in the model's folder), and facts that change its KV."""
    model = speculative.draft_model_config
    how = getattr(model, "quantization", None)
    own = getattr(model.hf_config, "quantization_config", None)
    quantised = [] if how is None or own else [f"quantization {how}"]  # vLLM quantises the draft while loading
    if str(model.model) == target:
        return (None, *quantised)
    folder = cached_folder(str(model.model), getattr(model, "revision", None)) or Path(str(model.model))
    name = model_name(folder)
    if getattr(speculative, "use_heterogeneous_vocab", False):  # the draft has its own token ids
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
