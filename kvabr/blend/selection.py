"""What a selector asks for, what it sees of a prompt, what it answers, and which tokens are then recomputed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvabr.types.engine import BlendEngine
from kvabr.types.errors import PolicyError, UsageError

Need = Literal["attention", "peaks", "values", "order", "deviation", "exact"]
"""What a selector asks for, see the fields of `Selection`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A prompt of which some tokens can be recomputed. Only what the selector needs is there."""

    tokens: int
    """Tokens of the joined cache; the question follows them."""
    passages: tuple[tuple[int, int], ...]
    """First and end position of every passage, in the order of the prompt. Other tokens are exact already."""
    layers: int
    """Layers of the model."""
    attention: torch.Tensor | None = None
    """[layer, token] float32, of the layers in `Selector.looks_at`: what the question's tokens pay to each token."""
    peaks: torch.Tensor | None = None
    """As ``attention``, but the largest weight that any head and any of the question's tokens pays."""
    values: torch.Tensor | None = None
    """[layer, token] float32, of the same layers: the norm of each token's value, over all heads."""
    orders: tuple[bytes | None, ...] = ()
    """The publisher's order of every passage, a byte a token, 255 first; None where there is none."""
    deviation: torch.Tensor | None = None
    """[K/V, token] float32: squared distance of the cache's layer 1 from what it is behind a full layer 0."""
    exact: torch.Tensor | None = None
    """[token] float32: what each token's error costs, by the exact cache. A bench alone knows it."""


class Selector(ABC):
    """Scores tokens: those with the highest scores are recomputed. One object serves one prompt."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """What it asks for besides the passages' places."""

    def looks_at(self, layers: int) -> range:
        """Return the layers, of ``layers`` in all, whose attention, peaks and values it asks for; default: all."""
        return range(layers)

    @abstractmethod
    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return a score for each token of the joined cache, [token]; those outside of passages do not count."""


def needed(what: torch.Tensor | None, name: Need) -> torch.Tensor:
    """Return what a selector needs; raise `UsageError` if it was not given."""
    if what is None:
        raise UsageError(f"a selector that needs {name!r} was given none")
    return what


def choose(prompt: Selection, scores: torch.Tensor, share: float) -> tuple[int, ...]:
    """Return the positions to recompute, increasing: those with the best scores over all passages.

    Args:
        prompt: where the passages are.
        scores: [token] of a selector; of equal ones, the earlier token comes first.
        share: share of the passages' tokens, from 0 to 1, rounded up to whole tokens.

    Raises:
        PolicyError: the scores are not one number a token.
        UsageError: the share is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise UsageError(f"a share of {share:g} of the tokens cannot be recomputed; give 0 to 1")
    if not isinstance(scores, torch.Tensor):
        raise PolicyError(f"a selector returned {type(scores).__name__}, not a tensor of {prompt.tokens} scores")
    if tuple(scores.shape) != (prompt.tokens,) or bool(torch.isnan(scores).any()):
        raise PolicyError(f"a selector returned {tuple(scores.shape)} scores, or NaN, for {prompt.tokens} tokens")
    inside = torch.tensor([at for first, end in prompt.passages for at in range(first, end)], dtype=torch.long)
    # A share is a decimal number: 0.15 of 1,280 must not become 193 because its nearest double is above it.
    count = math.ceil(round(share * len(inside), 6))
    best = torch.sort(scores[inside].double(), descending=True, stable=True).indices[:count]
    return tuple(sorted(inside[best].tolist()))


def by_passage(prompt: Selection, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [token] from a row for each passage, zero elsewhere."""
    out = torch.zeros(prompt.tokens)
    for (first, end), row in zip(prompt.passages, rows, strict=True):
        out[first:end] = row
    return out


def look(
    engine: BlendEngine,
    selector: Selector,
    tokens: Sequence[int],
    passages: Sequence[tuple[int, int]],
    question: Sequence[int],
    kv: torch.Tensor,
    *,
    orders: Sequence[bytes | None] = (),
    exact: torch.Tensor | None = None,
) -> Selection:
    """Return a prompt as a selector sees it.

    Args:
        engine: computes what the selector needs.
        selector: says what that is.
        tokens: ids of the prompt, as many as the cache has.
        passages: first and end position of each.
        question: ids that follow the prompt.
        kv: the joined cache, [layer, K/V, head, token, dim], any float dtype; read, never written.
        orders: the publishers' orders, one a passage; empty for none.
        exact: see `Selection.exact`.
    """
    layers = selector.looks_at(engine.spec.layers)
    attention = peaks = values = deviation = None
    if "attention" in selector.needs:
        attention = engine.attention(question, kv, layers=layers)
    if "peaks" in selector.needs:
        peaks = engine.attention(question, kv, layers=layers, reduce="max")
    if "values" in selector.needs:
        values = kv[layers.start : layers.stop : layers.step, 1].float().pow(2).sum(dim=(1, 3)).sqrt()
    if "deviation" in selector.needs:
        # Layer 0 computes its keys and values from the tokens alone, so those of layer 1 are the first to differ.
        first = engine.recompute(tokens, range(len(tokens)), kv, layers=2)[1]
        deviation = (first.float() - kv[1].float()).pow(2).sum(dim=(1, 3))
    return Selection(
        tokens=len(tokens),
        passages=tuple(passages),
        layers=engine.spec.layers,
        attention=attention,
        peaks=peaks,
        values=values,
        orders=tuple(orders) or (None,) * len(passages),
        deviation=deviation,
        exact=exact,
    )
