"""Measures the fusion loss of a model, for catalogs of its passages, with a few prompts of `kvabr bench blend`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvabr.engines.transformers.blend import blend_engine
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.player.play_choices import DEFAULT_SELECTOR
from kvabr.publish.frames import six
from kvabr.publish.fusion import FusionLosses
from kvabr.publish.passages import CONTEXTS, contexts_for
from kvabr.publish.texts import calibration_texts, measuring_texts
from kvabr.types.errors import UsageError
from kvabr_lab.bench.blend import FusionLab, Recipe, measure
from kvabr_lab.bench.blend_prompts import Kind, make_prompts
from kvabr_lab.paired import Bootstrap, Interval

BASES = {"mean": "mean", "behind": "neutral", "alone": "alone"}
"""Values of `PassageNotes.base`, with the bench's names for them."""
SHARES = (0.0, 0.05, 0.15, 0.3)
_PROMPTS = 6
"""Number of prompts of each kind: a continued text, and an entry of one of five manual pages."""
_KINDS: tuple[Kind, ...] = ("text", "facts")
_PASSAGE, _MIN_PASSAGE = 256, 32
_AROUND = 320
"""Maximum tokens of a prompt outside its passages; and the number of passages."""
_PASSAGES = 5
_SEED = 11
"""Seed of the prompts, other than that of the bench."""


def measure_model(
    loaded: LoadedModel,
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _all: None,
    base: str = "mean",
) -> tuple[FusionLosses, list[Interval]]:
    """Measure the loss that a passage adds to a prompt of four or five passages, with 95 % intervals, by share.

    The share is that of recomputed tokens, which the default selector chooses. Passages are from other texts than the
    prompts. ``base`` is a key of `BASES`.

    Raises:
        ModelError: The model's caches cannot be joined; the message gives the reason.
        UsageError: Its context is too short.
    """
    engine = blend_engine(loaded.engine)
    size = min(_PASSAGE, (engine.context - _AROUND) // _PASSAGES)
    if size < _MIN_PASSAGE:
        raise UsageError(
            f"{engine.spec.model} has a context of {engine.context} tokens, too short for {_PASSAGES} passages of "
            f"{_MIN_PASSAGE} tokens"
        )
    lab = FusionLab(engine, contexts_for(loaded, calibration_texts(), CONTEXTS), [], [])
    made = [
        prompt
        for kind in _KINDS
        for prompt in make_prompts(loaded, measuring_texts(), kind, _PROMPTS, size=size, seed=_SEED)
    ]
    plan = [Recipe(BASES[base], DEFAULT_SELECTOR if share else "", share) for share in SHARES]
    found = measure(lab, made, plan, lambda _key: None, lambda _key, row: row, progress)
    passages = np.array([len(prompt.passages) for prompt in made])
    bootstrap = Bootstrap([prompt.name for prompt in made])
    losses = [
        bootstrap.interval(np.array([found[recipe.name][prompt.name]["kl"] for prompt in made]) / passages)
        for recipe in plan
    ]
    method = (
        f"KL against the full prefill per token, divided by the passages of the prompt, mean over {len(made)} prompts "
        f"of {min(passages)} or {max(passages)} passages of {size} tokens: texts that go on, and questions about "
        f"invented manual pages; {DEFAULT_SELECTOR} chooses the tokens to recompute"
    )
    told = tuple((share, six(loss.mean)) for share, loss in zip(SHARES, losses, strict=True))
    return FusionLosses(engine.spec, CONTEXTS if base == "mean" else 0, told, method, base), losses
