"""Profiles that a bench calibrates like `kvabr calibrate`, and keeps in its work folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvabr.codec.profile import Profile
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.publish.calibrate import Progress, calibrate
from kvabr.publish.target import Target
from kvabr.publish.texts import calibration_texts
from kvabr.store.files import write_file
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from kvabr_lab.bench.schemes import sources


@dataclass(frozen=True)
class CalibrationPlan:
    """How to calibrate."""

    contexts: int
    tokens: int | None = None
    """Tokens per context; None: as in `kvabr calibrate`."""
    target: Target | None = None
    scales: Sequence[float] = (1.0,)
    """Factors of all steps. Each factor gives a profile, and points on the curve."""

    def key(self, spec: KVSpec) -> str:
        """Return 16 hex digits that depend on all inputs of the profiles."""
        target = None if self.target is None else [self.target.kl, self.target.track]
        said = [spec.digest().hex(), self.contexts, self.tokens, target, sources("codec"), sources("publish")]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def profiles(
    loaded: LoadedModel,
    spec: KVSpec,
    plan: CalibrationPlan,
    folder: Path,
    progress: Progress = lambda _stage, _done, _all: None,
    notify: Callable[[str], None] = lambda _line: None,
) -> dict[str, Profile]:
    """Return profiles by label, read from the work folder or calibrated.

    ``progress`` receives the stages of `kvabr.publish.calibrate.calibrate`, ``notify`` results of the search for steps.

    Raises:
        UsageError: The target cannot be met, or contexts are longer than the model's.
    """
    labels = {scale: "" if scale == 1 else f"@x{scale:g}" for scale in plan.scales}
    paths = {scale: folder / f"profile-{plan.key(spec)}-{scale:g}.safetensors" for scale in plan.scales}
    made = {label: _read(paths[scale]) for scale, label in labels.items()}
    found = {label: profile for label, profile in made.items() if profile is not None}
    if len(found) == len(made):
        return found
    engine = TransformersEngine(loaded.engine.model, spec, context=loaded.engine.context)
    new = calibrate(
        replace(loaded, engine=engine),
        calibration_texts(),
        scales=plan.scales,
        contexts=plan.contexts,
        tokens=plan.tokens,
        target=plan.target,
        progress=progress,
        notify=notify,
    )
    for path, profile in zip(paths.values(), new, strict=True):
        write_file(path, profile.to_bytes())
    return dict(zip(labels.values(), new, strict=True))


def _read(path: Path) -> Profile | None:
    try:
        return Profile.from_bytes(path.read_bytes())
    except (OSError, FormatError):
        return None  # missing, or unfinished after an interrupted run
