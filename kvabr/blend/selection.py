"""The protocol of selectors, their inputs, and the choice of tokens to recompute."""

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
"""Inputs of a selector, see the fields of `Selection`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A prompt with tokens that can be recomputed. Only the inputs that the selector needs are set."""

    tokens: int
    """Number of tokens of the joined cache; the question follows them."""
    passages: tuple[tuple[int, int], ...]
    """First position, and position after the last, of every passage, in prompt order. Other tokens are exact."""
    layers: int
    attention: torch.Tensor | None = None
    """[layer, token] float32 for the layers in `Selector.looks_at`: attention of the question's tokens to each token.
    """
    peaks: torch.Tensor | None = None
    """Like ``attention``, but the maximum over heads and question tokens."""
    values: torch.Tensor | None = None
    """[layer, token] float32, for the layers of ``attention``: norm of each token's value over all heads."""
    orders: tuple[bytes | None, ...] = ()
    """The publisher's order of every passage, one byte per token, 255 first; None without one."""
    deviation: torch.Tensor | None = None
    """[K/V, token] float32: squared change of layer 1 of the cache if layer 0 is recomputed."""
    exact: torch.Tensor | None = None
    """[token] float32: cost of each token's error relative to the exact cache. Only in benchmarks."""


class Selector(ABC):
    """Scores tokens; those with the highest scores are recomputed. One object serves one prompt."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Inputs in addition to the positions of passages."""

    def looks_at(self, layers: int) -> range:
        """Return which of ``layers`` layers to read for attention, peaks and values; default: all."""
        return range(layers)

    @abstractmethod
    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return a score for each token of the joined cache, [token]; scores outside passages are ignored."""


def needed(value: torch.Tensor | None, name: Need) -> torch.Tensor:
    """Return an input of a selector; raise `UsageError` if it is not set."""
    if value is None:
        raise UsageError(f"the selector needs {name!r}, which is not set")
    return value


def choose(prompt: Selection, scores: torch.Tensor, share: float) -> tuple[int, ...]:
    """Return the positions with the best scores over all passages, in increasing order.

    Args:
        prompt: has the passages.
        scores: [token]; if scores are equal, the earlier token is preferred.
        share: fraction of the passages' tokens, 0 to 1, rounded up to whole tokens.

    Raises:
        PolicyError: the scores are not one number per token.
        UsageError: the share is not in 0 to 1.
    """
    if not 0 <= share <= 1:
        raise UsageError(f"share of tokens to recompute must be 0 to 1, got {share:g}")
    if not isinstance(scores, torch.Tensor):
        raise PolicyError(f"a selector must return a tensor of {prompt.tokens} scores, got {type(scores).__name__}")
    if tuple(scores.shape) != (prompt.tokens,) or bool(torch.isnan(scores).any()):
        raise PolicyError(
            f"a selector must return {prompt.tokens} scores without NaN, got the shape {tuple(scores.shape)}"
        )
    inside = torch.tensor([at for first, end in prompt.passages for at in range(first, end)], dtype=torch.long)
    # A share is a decimal number: 0.15 of 1,280 must not become 193 because its nearest double is above it.
    count = math.ceil(round(share * len(inside), 6))
    best = torch.sort(scores[inside].double(), descending=True, stable=True).indices[:count]
    return tuple(sorted(inside[best].tolist()))


def by_passage(prompt: Selection, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate one row per passage to a [token] tensor, with zeros outside of passages."""
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
    """Compute the inputs that a selector needs for a prompt.

    Args:
        engine: computes the inputs.
        selector: lists its inputs.
        tokens: ids of the prompt, as many as the cache has.
        passages: first and end position of each passage.
        question: ids that follow the prompt.
        kv: the joined cache, [layer, K/V, head, token, dim], any float dtype; not modified.
        orders: the publishers' orders, one per passage; empty for none.
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
        # Layer 0 depends on the tokens alone, so layer 1 is the first that can differ.
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
