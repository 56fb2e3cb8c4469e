"""`kvabr encode --passage`: compute the cache of a passage, and measure the loss of joining it with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from kvabr.types.errors import UsageError
from kvabr.types.fields import Shown
from kvabr.types.passage import MAX_CONTEXTS

if TYPE_CHECKING:
    import torch

    from kvabr.publish.encoder import PassageBase
    from kvabr.publish.model import TextModel
    from kvabr.publish.passages import FusionEngine
    from kvabr.store.prompt import Prompt
    from kvabr.types.passage import PassageNotes

_HELD_OUT = 3
"""Number of contexts after which losses are measured."""
_QUESTION = 16
"""Tokens at the start of the continuation that serve as the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageOptions:
    """How a passage is computed."""

    passage: Annotated[bool, Shown()] = False
    """Publish the text as a passage, see below."""
    contexts: Annotated[int | None, Ge(1), Le(MAX_CONTEXTS), Shown("--contexts N", needs="passage")] = None
    """Publish the mean of the caches computed after N contexts (default: 4)."""
    fusion: Annotated[Path | None, Shown("--fusion F.json", needs="passage")] = None
    """Loss of joining passages for this model, from `kvabr calibrate --blend`."""


def joining_loss(notes: PassageNotes) -> str:
    """Return the loss of joining a published passage, as a line of text for users."""
    if not notes.fusion:
        more = f"--fusion, or a text that continues for --continuation {_QUESTION + 2} tokens or more"
        return f"the loss of joining this passage was not measured, so players will recompute it: give {more}"
    losses = ", ".join(f"{loss:.4f} with {share:.0%}" for share, loss in notes.fusion)
    return f"loss of joining this passage, nats per token, by the share of its tokens recomputed: {losses}"


def contexts(args: PassageOptions) -> int:
    """Return the number of contexts over which the cache is averaged."""
    from kvabr.publish.passages import CONTEXTS

    return args.contexts or CONTEXTS


def compute(
    model: TextModel,
    fusion: FusionEngine | None,
    prompt: Prompt,
    args: PassageOptions,
    progress: Callable[[str, int, int], None],
) -> PassageBase:
    """Compute the cache of a passage, and measure the loss of joining it.

    Args:
        model: the model.
        fusion: the same model, if it can recompute any tokens; without it, no loss of joining is measured.
        prompt: the passage and its continuation.
        args: the options.
        progress: called after every step.

    Raises:
        UsageError: the model's context is too short.
        FormatError: the fusion losses are of another model.
    """
    from kvabr.publish.encoder import PassageBase
    from kvabr.publish.fusion import FusionLosses
    from kvabr.publish.model import opened
    from kvabr.publish.passages import NEUTRAL, contexts_for, mean_cache
    from kvabr.publish.texts import calibration_texts
    from kvabr.types.passage import PassageNotes

    engine, ids, report = model.engine, prompt.tokens, partial(progress, "prefill")
    neutral, count = list(opened(model, model.encode(NEUTRAL))), contexts(args)
    texts = contexts_for(model, calibration_texts(), count)
    longest = max(map(len, (neutral, *texts)))
    if longest + len(ids) + len(prompt.continuation) > engine.context:
        raise UsageError(
            f"a passage of {len(ids)} tokens does not fit the context of {engine.spec.model} ({engine.context}) after "
            f"{longest} tokens and before {len(prompt.continuation)}: give fewer --tokens"
        )
    notes = PassageNotes("mean", count)
    if args.fusion is not None:
        notes = FusionLosses.read(args.fusion).notes(engine.spec, "mean", count)
    kv = mean_cache(engine, ids, texts, report)
    if args.fusion is None and fusion is not None and len(prompt.continuation) >= _QUESTION + 2:
        notes = _measured(model, fusion, prompt, kv, notes)
    return PassageBase(kv, notes, engine.prefill(neutral))


def _measured(
    model: TextModel, fusion: FusionEngine, prompt: Prompt, kv: torch.Tensor, notes: PassageNotes
) -> PassageNotes:
    """Return the notes with fusion losses, and the order of the tokens."""
    from kvabr.blend.selectors import load_selector
    from kvabr.player.play_choices import DEFAULT_SELECTOR
    from kvabr.publish.frames import six
    from kvabr.publish.passages import contexts_for, fusion_losses, publisher_order
    from kvabr.publish.texts import measuring_texts

    held_out = contexts_for(model, measuring_texts(), _HELD_OUT + 1, seed=1)[1:]
    order = publisher_order(fusion, prompt.tokens, kv, held_out, prompt.continuation)
    losses = fusion_losses(
        fusion, prompt.tokens, kv, held_out, prompt.continuation, load_selector(DEFAULT_SELECTOR), question=_QUESTION
    )
    method = (
        f"KL against the full prefill per token, mean over {len(held_out)} other contexts and the "
        f"{len(prompt.continuation) - _QUESTION} tokens after the first {_QUESTION} that follow the passage, which "
        f"choose the tokens to recompute ({DEFAULT_SELECTOR})"
    )
    return replace(notes, order=order, fusion=tuple((share, six(loss)) for share, loss in losses), method=method)
