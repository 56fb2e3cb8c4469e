"""Scores of a continuation after the exact cache, to measure the loss of other caches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvabr.publish.model import ScoringEngine, score_classes
from kvabr.types.catalog import Quality
from kvabr.types.errors import ModelError

Cache = torch.Tensor | tuple[torch.Tensor, ...]


def compare(exact: torch.Tensor, other: torch.Tensor, tokens: Sequence[int]) -> Quality:
    """Return the loss of a continuation between two runs.

    ``exact`` and ``other`` are log-probabilities, [token, vocabulary] float64; row i is the distribution of ``tokens[i
    + 1]``. The result has the mean KL(exact || other) over all rows, over the first 8 and the first 32; top-1
    agreement; and the change of the negative log-likelihood. Raise `ModelError` if a probability is not finite.
    """
    # Row by row, since allocating a whole matrix of distributions is slow.
    rows = [float(torch.dot(row.exp(), row - same)) for row, same in zip(exact, other, strict=True)]
    if not math.isfinite(sum(rows)):
        raise ModelError("the model's probabilities are NaN or infinite; its weights or caches are damaged")
    following = torch.tensor(tokens[1:], dtype=torch.long)[:, None]
    gained = exact[:-1].gather(1, following) - other[:-1].gather(1, following)
    agree = (exact.numpy().argmax(axis=1) == other.numpy().argmax(axis=1)).mean()  # torch takes five times as long
    # Rounding may make a KL negative.
    kl8, kl32 = (max(0.0, sum(rows[:first]) / first) if len(rows) > first else None for first in (8, 32))
    return Quality(max(0.0, sum(rows) / len(rows)), float(gained.mean()), float(agree), kl8, kl32)


class Reference:
    """Scores of a continuation after the exact cache. Measuring another cache takes one forward pass."""

    def __init__(
        self,
        engine: ScoringEngine,
        exact: Cache | None,
        continuation: Sequence[int],
        *,
        before: torch.Tensor | None = None,
        question_tokens: int = 0,
    ) -> None:
        """Score a continuation of at least two ids after the exact cache.

        ``before``, [layer, K/V, head, token, dim], is put before every cache. The first ``question_tokens`` ids are a
        question, which is not compared. Raise `ModelError` if the continuation is too short, or does not fit the model.
        """
        if len(continuation) < 2 + max(0, question_tokens - 1):
            raise ModelError(
                f"the continuation must have at least {2 + max(0, question_tokens - 1)} tokens, got {len(continuation)}"
            )
        self.engine, self.before, self.question_tokens = engine, before, question_tokens
        self.continuation = tuple(continuation)
        self._exact = self.score(exact)
        if question_tokens > 1:
            self._exact = self._exact.clone()

    def calibration(self) -> tuple[float, float]:
        """Return the mean NLL of the continuation after the exact cache, and its expectation (entropy), in nats.

        If NLL and entropy differ, the NLL has a slope at the exact cache, and errors may change it far more than the KL
        suggests.
        """
        rows = self._exact[:-1]
        following = self.continuation[max(1, self.question_tokens) :]
        said = rows.gather(1, torch.tensor(following, dtype=torch.long)[:, None])
        expected = sum(float(torch.dot(row.exp(), row)) for row in rows) / len(rows)
        return -float(said.mean()), -expected

    def measure(self, kv: Cache | None, limit: int | None = None) -> Quality:
        """Return the loss of the continuation, or of its first ``limit`` tokens, after ``kv``."""
        return self.compared(self.score(kv, limit))

    def compared(self, scored: torch.Tensor, first: int = 0) -> Quality:
        """Return the loss for a result of `score`, over the tokens from ``first`` on."""
        rows = slice(first, len(scored))
        return compare(self._exact[rows], scored[rows], self.continuation[max(0, self.question_tokens - 1) :][rows])

    def score(self, kv: Cache | None, limit: int | None = None) -> torch.Tensor:
        """Return log-probabilities of up to ``limit`` ids after the question, float64 [token, vocabulary]."""
        skipped = max(0, self.question_tokens - 1)
        ids = self.continuation[: None if limit is None else skipped + limit]
        return score_classes(self.engine, placed(kv, self.before), ids)[skipped:]


def placed(kv: Cache | None, before: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Return a cache as one tensor per layer class, with ``before`` in front."""
    parts = (kv,) if isinstance(kv, torch.Tensor) else kv
    if before is not None and parts is not None:
        parts = (torch.cat((before, parts[0]), dim=3),)
    return parts


def evenly(ordered: Sequence[str], limit: int) -> list[str]:
    """Return at most ``limit`` of the names, evenly spaced, including the first and the last."""
    if limit >= len(ordered) or limit == 1:
        return list(ordered[:limit])
    return [ordered[round(index * (len(ordered) - 1) / (limit - 1))] for index in range(limit)]
