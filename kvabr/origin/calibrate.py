"""Calibrates a profile: runs the model over diverse texts and lets the codec take its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from kvabr.codec.profile import Profile
from kvabr.engines.bed import Bed
from kvabr.errors import UsageError

CONTEXTS = 24
"""Contexts that a profile is calibrated on by default."""

CONTEXT_TOKENS = 1024
"""Tokens of each."""


def cut_contexts(texts: Mapping[str, Sequence[int]], contexts: int, tokens: int) -> list[tuple[str, Sequence[int]]]:
    """Cut contexts out of tokenised texts: evenly spaced, more from longer texts, at least one from each.

    Args:
        texts: token ids by name.
        contexts: how many; never fewer than there are texts.
        tokens: length of each; a shorter text gives one context of what it has.

    Returns:
        Pairs of a text's name and the context's token ids, which do not overlap.

    Raises:
        UsageError: there is no text.
    """
    sizes = {name: len(ids) for name, ids in texts.items() if ids}
    if not sizes:
        raise UsageError("calibration needs at least one text that is not empty")
    total = sum(sizes.values())
    out = []
    for name, size in sizes.items():
        count = max(1, min(size // tokens, round(contexts * size / total)))
        length = min(tokens, size)
        for index in range(count):
            start = index * (size - length) // max(1, count - 1)
            out.append((name, texts[name][start : start + length]))
    return out


def calibrate(
    bed: Bed,
    texts: Mapping[str, str],
    *,
    contexts: int = CONTEXTS,
    tokens: int = CONTEXT_TOKENS,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Profile:
    """Make a profile of a model from texts.

    Args:
        bed: the model and its tokenizer.
        texts: texts by name; the more they differ, the better the profile fits what it never saw.
        contexts: contexts to cut out of them, see `cut_contexts`.
        tokens: tokens of each. All their caches are held at once, in the element type of the published cache.
        progress: called after every context.

    Raises:
        UsageError: no text, or contexts longer than the model sees.
    """
    if contexts < 1 or not 16 <= tokens <= bed.engine.context:
        raise UsageError(f"a calibration takes at least 1 context of 16 to {bed.engine.context} tokens")
    cuts = cut_contexts({name: bed.encode(text) for name, text in texts.items()}, contexts, tokens)
    caches: list[torch.Tensor] = []
    for _, ids in cuts:
        caches.append(bed.engine.prefill(ids).to(bed.engine.spec.torch_dtype))
        progress(len(caches), len(cuts))

    def again() -> Iterator[torch.Tensor]:
        return iter(caches)

    return Profile.calibrate(bed.engine.spec, again)
