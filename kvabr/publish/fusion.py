"""The loss from joining passages. Players join only passages with this loss in their catalogs.

It is either measured for the passage (`kvabr.publish.passages.fusion_losses`), which takes many prefills, or for the
model and one way to compute passages: a file of `FusionLosses`, written by `kvabr calibrate --blend`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvabr.publish.passages import CONTEXTS
from kvabr.store.files import read_text
from kvabr.types.errors import ForeignError, FormatError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.passage import PassageNotes
from kvabr.types.records import read, to_json

SCHEMA = "kvabr.fusion/1"
_MAX_BYTES = 1 << 20
_ORDER = "spec", "base", "contexts", "losses", "method"


@dataclass(frozen=True, slots=True)
class FusionLosses:
    """The loss that a passage adds to a joined prompt."""

    spec: KVSpec
    contexts: int
    """Number of contexts of a mean cache; 0 for other caches."""
    losses: tuple[tuple[float, float], ...]
    method: str
    base: str = "mean"

    def __post_init__(self) -> None:
        if not self.losses:
            raise FormatError("fusion losses: the list is empty")
        PassageNotes(self.base, self.contexts, fusion=self.losses, method=self.method)

    def check(self, spec: KVSpec) -> FusionLosses:
        """Return these losses; raise `ForeignError` if they are for another model than ``spec``."""
        if not self.spec.same_cache(spec):
            raise ForeignError(
                f"these fusion losses are of {self.spec.title}, but the passage is of {spec.title}; measure "
                "them with `kvabr calibrate --blend`"
            )
        return self

    def notes(self, spec: KVSpec, base: str, contexts: int = 0) -> PassageNotes:
        """Return the notes of a passage with this base.

        Raise `ForeignError` if these losses are for another model, `UsageError` if they are for another base.
        """
        self.check(spec)
        self.check_base(base, contexts)
        return PassageNotes(base, contexts, fusion=self.losses, method=self.method)

    def check_base(self, base: str, contexts: int = 0) -> None:
        """Raise `UsageError` if these losses are for another base."""
        if (base, contexts) != (self.base, self.contexts):
            raise UsageError(
                f"these fusion losses are of passages computed as {_base_text(self.base, self.contexts)}, but this "
                f"passage is computed as {_base_text(base, contexts)}: compute it the same way, or "
                f"{_measuring(base, contexts)}; without a file, the loss of this passage is measured if possible"
            )

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_json(self, "base", last=_ORDER)}

    @staticmethod
    def read(path: str | os.PathLike[str]) -> FusionLosses:
        """Read a file; raise `AssetError` or `FormatError`."""
        try:
            return read(read_text(Path(path), _MAX_BYTES).encode(), FusionLosses, "fusion losses", SCHEMA)
        except FormatError as error:
            raise FormatError(f"{path}: {error}; `kvabr calibrate --blend` writes such files") from error


def _measuring(base: str, contexts: int) -> str:
    if base == "mean" and contexts != CONTEXTS:
        return f"give none (`kvabr calibrate --blend` measures means over {CONTEXTS} contexts)"
    return f"measure others with `kvabr calibrate --blend --base {base}`"


def _base_text(base: str, contexts: int) -> str:
    return {"mean": f"the mean over {contexts} contexts", "behind": "one after another text"}.get(base, base)
