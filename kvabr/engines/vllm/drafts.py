"""Draft heads and draft models: what their layers keep is a layer class of its own, of the role `DRAFT`.

vLLM verifies what a draft proposes, so a text does not depend on the draft's cache; how many tokens are accepted does.
A draft's layers cannot be computed from the model's cache, so they are published and played with it.

EAGLE and MTP compute the draft's KV of a token with the token behind it. What is known of the last token of a prefix is
that of the publisher's next token, which need not be this prompt's. vLLM drops the last block of a hit for that reason;
kvabr promises what ends at least one token before the end of what is shared.
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
"""How the role of a draft's layer class begins."""
_NAME = re.compile(r"(?:draft_model|mtp)\.")
_METHODS = ("draft_model", "eagle", "eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class DraftCaches:
    """The draft of an engine's model."""

    told: tuple[str | None, ...] = ()
    """What the name of caches tells of it; empty: there is none that keeps anything."""
    ahead: int = 0
    """Tokens behind a token that its KV depends on."""
    why: str | None = None
    """Why its caches cannot be exchanged; None: they can."""

    def has(self, name: str, number: int, layers: int) -> bool:
        """Return whether a layer of vLLM's is the draft's, given its name and number, and the model's layers."""
        return bool(self.told) and (number >= layers or _NAME.match(name) is not None)


def draft_of(config: Any) -> DraftCaches:
    """Return the draft of a ``vllm.config.VllmConfig``."""
    speculative: Any = getattr(config, "speculative_config", None)
    keeps = getattr(speculative, "uses_draft_kv_cache", None)
    if keeps is None or not keeps():
        return DraftCaches()
    method, parallel = str(speculative.method), config.parallel_config
    ranks = getattr(speculative, "draft_tensor_parallel_size", None) or parallel.tensor_parallel_size
    if method not in _METHODS:
        return DraftCaches(("",), why=f"a draft of the kind {method} keeps what kvabr does not know")
    if ranks != parallel.tensor_parallel_size or getattr(parallel, "pipeline_parallel_size", 1) > 1:
        return DraftCaches(
            ("",), why="a draft is exchanged without pipeline stages, and with as many ranks as its model"
        )
    try:
        return DraftCaches((method, *_names(speculative, str(config.model_config.model))), _ahead(speculative))
    except (KvabrError, OSError) as error:
        return DraftCaches(("",), why=f"its draft model has no name ({error})")


def _names(speculative: Any, target: str) -> tuple[str | None, ...]:
    """Return the name of a draft's weights, None if the model's folder has them, and what else changes its KV."""
    model = speculative.draft_model_config
    how = getattr(model, "quantization", None)
    own = getattr(model.hf_config, "quantization_config", None)
    quantised = [] if how is None or own else [f"quantization {how}"]  # by vLLM, as it loads them
    if str(model.model) == target:
        return (None, *quantised)
    folder = cached_folder(str(model.model), getattr(model, "revision", None)) or Path(str(model.model))
    name = model_name(folder)
    if getattr(speculative, "use_heterogeneous_vocab", False):  # it reads the text, as tokens of its own
        return name, model_loader.folder_tokenizer(folder), *quantised
    return name, *quantised


def _ahead(speculative: Any) -> int:
    """Return how many tokens behind a token the draft's KV of it depends on."""
    if not speculative.use_eagle():
        return 0
    several = getattr(speculative, "use_multi_module_mtp", None)
    if several is None or not several():
        return 1
    modules = getattr(speculative.draft_model_config.hf_config, "num_nextn_predict_layers", 1)
    return min(int(modules), int(speculative.num_speculative_tokens))
