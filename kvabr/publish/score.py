"""What a damaged cache costs: the real model's next-token distributions against those behind the exact cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from kvabr.types.catalog import Quality
from kvabr.types.engine import Engine
from kvabr.types.errors import ModelError


class ScoringEngine(Engine, Protocol):
    """An engine that can also say how likely it finds a continuation."""

    def score(self, kv: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the next token after each of ``tokens`` behind the cache ``kv``.

        Args:
            kv: [layer, K/V, head, token, dim]; read, never written. None for no cache at all.
            tokens: ids of the continuation.

        Returns:
            [len(tokens), vocabulary] float64.
        """
        ...


def compare(exact: torch.Tensor, other: torch.Tensor, tokens: Sequence[int]) -> Quality:
    """Compare two runs of a continuation.

    Args:
        exact: log-probabilities behind the exact cache, [token, vocabulary] float64.
        other: the same behind the cache in question.
        tokens: the continuation; row i of both is the distribution of ``tokens[i + 1]``.

    Returns:
        Mean KL(exact || other) and top-1 agreement over all rows; the change of the negative log-likelihood over the
        rows whose next token is known.

    Raises:
        ModelError: either run has probabilities that are not finite.
    """
    kl = 0.0
    # A few rows at a time: whole distributions over a vocabulary are many megabytes, and fresh memory is slow.
    for first in range(0, len(exact), 16):
        some, same = exact[first : first + 16], other[first : first + 16]
        kl += float(torch.dot(some.exp().flatten(), (some - same).flatten()))
    if not math.isfinite(kl):
        raise ModelError("the model's probabilities are NaN or infinite; its weights, or its caches, are damaged")
    following = torch.tensor(tokens[1:], dtype=torch.long)[:, None]
    gained = exact[:-1].gather(1, following) - other[:-1].gather(1, following)
    agree = (exact.argmax(dim=-1) == other.argmax(dim=-1)).double().mean()
    # A KL is never negative; rounding can take one of two equal runs an ulp below.
    return Quality(kl=max(0.0, kl / len(exact)), dnll=float(gained.mean()), top1=float(agree))


class Reference:
    """The exact cache's verdict on a continuation, against which caches are measured. One forward pass each."""

    def __init__(self, engine: ScoringEngine, exact: torch.Tensor | None, continuation: Sequence[int]) -> None:
        """Score the continuation behind the exact cache.

        Args:
            engine: the real model.
            exact: the cache as the model computed it, [layer, K/V, head, token, dim].
            continuation: ids of the tokens that followed, at least two.

        Raises:
            ModelError: the continuation is too short, or does not fit the model.
        """
        if len(continuation) < 2:
            raise ModelError(f"measuring a loss takes a continuation of at least 2 tokens, not {len(continuation)}")
        self.engine = engine
        self.continuation = tuple(continuation)
        self._exact = engine.score(exact, self.continuation)

    def measure(self, kv: torch.Tensor | None) -> Quality:
        """What the continuation loses when ``kv`` is in place of the exact cache."""
        return compare(self._exact, self.engine.score(kv, self.continuation), self.continuation)
