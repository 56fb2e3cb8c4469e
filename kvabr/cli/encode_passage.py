"""`kvabr encode --passage`: how the cache of a passage is computed, and what joining it with others costs."""

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
"""Contexts that losses are measured behind."""
_QUESTION = 16
"""First tokens of the continuation, which stand for a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageOptions:
    """How a passage is computed."""

    passage: Annotated[bool, Shown()] = False
    """Publish the text as a passage, see below."""
    contexts: Annotated[int | None, Ge(1), Le(MAX_CONTEXTS), Shown("--contexts N", alone="base", needs="passage")] = (
        None
    )
    """Mean of the caches behind N contexts (default: 4)."""
    alone: Annotated[bool, Shown(alone="base", needs="passage")] = False
    """The cache of the passage alone."""
    behind: Annotated[Path | None, Shown("--behind FILE", alone="base", needs="passage")] = None
    """The cache behind this text (UTF-8)."""
    fusion: Annotated[Path | None, Shown("--fusion F.json", needs="passage")] = None
    """What joining costs this model, from `kvabr calibrate --blend`."""


def told(notes: PassageNotes) -> list[str]:
    """Return what the user is to know of a published passage."""
    if not notes.fusion:
        more = f"--fusion, or a text that goes on for --continuation {_QUESTION + 2} tokens or more"
        return [f"what joining it costs was not measured, so players compute it: give {more}"]
    losses = ", ".join(f"{loss:.4f} with {share:.0%}" for share, loss in notes.fusion)
    return [f"what joining it costs, nats per token, by the share of its tokens computed again: {losses}"]


def base(args: PassageOptions) -> tuple[str, int]:
    """Return how the passage is computed, as `PassageNotes.base`, and over how many contexts."""
    from kvabr.publish.passages import CONTEXTS

    if args.behind is not None or args.alone:
        return "alone" if args.alone else "behind", 0
    return "mean", args.contexts or CONTEXTS


def compute(
    model: TextModel,
    fusion: FusionEngine | None,
    prompt: Prompt,
    args: PassageOptions,
    progress: Callable[[str, int, int], None],
) -> PassageBase:
    """Compute the cache of a passage, and measure what joining it costs.

    Args:
        model: the model.
        fusion: the same model, if it can compute any tokens again; otherwise nothing is measured.
        prompt: the passage, and what follows it.
        args: the options.
        progress: called after every step.

    Raises:
        UsageError: the model has a shorter context.
        FormatError: the fusion losses are of another one.
    """
    from kvabr.publish.encoder import PassageBase
    from kvabr.publish.fusion import FusionLosses
    from kvabr.publish.model import opened
    from kvabr.publish.passages import NEUTRAL, contexts_for, free_cache, mean_cache
    from kvabr.publish.texts import calibration_texts
    from kvabr.store.files import read_text
    from kvabr.types.passage import PassageNotes

    engine, ids, report = model.engine, prompt.tokens, partial(progress, "prefill")
    neutral = list(opened(model, model.encode(NEUTRAL)))
    named, count = base(args)
    contexts = [list(model.opening)]
    if args.behind is not None:
        contexts = [list(opened(model, model.encode(read_text(args.behind, unreadable=UsageError))))]
    elif named == "mean":
        contexts = contexts_for(model, calibration_texts(), count)
    longest = max(map(len, (neutral, *contexts)))
    if longest + len(ids) + len(prompt.continuation) > engine.context:
        raise UsageError(
            f"a passage of {len(ids)} tokens does not fit {engine.spec.model}, which sees {engine.context}, with "
            f"{longest} tokens before it and {len(prompt.continuation)} behind it: give fewer --tokens"
        )
    known = None
    if args.fusion is not None:
        known = FusionLosses.read(args.fusion).notes(engine.spec, named, count)
    if named == "mean":
        kv, notes = mean_cache(engine, ids, contexts, report), PassageNotes(named, count)
    else:
        kv, notes = free_cache(engine, ids, contexts[0]), PassageNotes(named)
        report(1, 1)
    if known is not None:
        notes = known
    elif fusion is not None and len(prompt.continuation) >= _QUESTION + 2:
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
        f"{len(prompt.continuation) - _QUESTION} tokens behind the first {_QUESTION} that follow the passage, which "
        f"choose what is computed again ({DEFAULT_SELECTOR})"
    )
    return replace(notes, order=order, fusion=tuple((share, six(loss)) for share, loss in losses), method=method)
