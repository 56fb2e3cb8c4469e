"""What joining passages costs a model: measured once, and written into the catalogs of its passages.

A play joins no passage whose catalog does not say what that costs. The losses may be the passage's own
(`kvabr.publish.passages.fusion_losses`), which takes many prefills, or those of the model: `FusionLosses`, the file
that `kvabr calibrate --blend` writes. They hold for one model, and one way to compute passages.
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
    """What a passage of a model adds to the loss of a prompt that is joined from several."""

    spec: KVSpec
    """Of the model."""
    contexts: int
    """Contexts of the mean that passages were computed as; 0: they were not."""
    losses: tuple[tuple[float, float], ...]
    """As `PassageNotes.fusion`."""
    method: str
    """How it was measured, in words."""
    base: str = "mean"
    """How passages were computed, as `PassageNotes.base`."""

    def __post_init__(self) -> None:
        if not self.losses:
            raise FormatError("fusion losses: there are none")
        PassageNotes(self.base, self.contexts, fusion=self.losses, method=self.method)  # which checks them

    def check(self, spec: KVSpec) -> FusionLosses:
        """Return these losses; raise `ForeignError` if they are of another model than that with ``spec``."""
        if not self.spec.same_cache(spec):
            raise ForeignError(
                f"these fusion losses were measured with {self.spec.title}, the passage is of {spec.title}; measure "
                "them with `kvabr calibrate --blend`"
            )
        return self

    def notes(self, spec: KVSpec, base: str, contexts: int = 0) -> PassageNotes:
        """Return the notes of a passage with this base, ``mean`` over some contexts or another.

        Raises:
            ForeignError: these losses are of another model.
            UsageError: they are of passages that were computed in another way.
        """
        self.check(spec)
        self.check_base(base, contexts)
        return PassageNotes(base, contexts, fusion=self.losses, method=self.method)

    def check_base(self, base: str, contexts: int = 0) -> None:
        """Raise `UsageError` if these losses are of passages that were computed in another way than this."""
        if (base, contexts) != (self.base, self.contexts):
            raise UsageError(
                f"these fusion losses are of passages computed as {_said(self.base, self.contexts)}, the passage is "
                f"computed as {_said(base, contexts)}: compute it as they say, or {_measuring(base, contexts)}; "
                "without any, they are measured for this passage where that is possible"
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"schema": SCHEMA, **to_json(self, "base", last=_ORDER)}

    @staticmethod
    def read(path: str | os.PathLike[str]) -> FusionLosses:
        """Read a file; raise `AssetError` if it cannot be read, `FormatError` if it has no fusion losses."""
        try:
            return read(read_text(Path(path), _MAX_BYTES).encode(), FusionLosses, "fusion losses", SCHEMA)
        except FormatError as error:
            raise FormatError(f"{path}: {error}; `kvabr calibrate --blend` writes such files") from error


def _measuring(base: str, contexts: int) -> str:
    if base == "mean" and contexts != CONTEXTS:
        return f"give none (`kvabr calibrate --blend` measures means over {CONTEXTS} contexts)"
    return f"measure others with `kvabr calibrate --blend --base {base}`"


def _said(base: str, contexts: int) -> str:
    return {"mean": f"the mean over {contexts} contexts", "behind": "one behind another text"}.get(base, base)
