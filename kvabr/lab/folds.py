"""Cross-validation over trace families: choose on all but one, and look at the one that was left out.

A parameter that was chosen on some links is shown on others, of a kind that had no part in choosing it. Every family
counts the same, however many traces it has: a kind of network is not more likely for having been recorded more often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Scores = Mapping[str, Mapping[str, float]]
"""Mean regret by candidate and family."""


@dataclass(frozen=True, slots=True)
class Fold:
    """One choice, and how it did where it had no part."""

    held_out: str
    chosen: str
    """The candidate that was best on the other families."""
    inside: float
    """Its mean regret on these."""
    outside: float
    """Its mean regret on the family that was held out."""
    default_outside: float
    """The default's there."""


def mean_over(scores: Mapping[str, float], families: Iterable[str]) -> float:
    """Mean over families."""
    listed = [scores[family] for family in families]
    return sum(listed) / len(listed)


def choose(scores: Scores, families: Sequence[str], default: str) -> str:
    """The candidate of least mean regret over these families; the default unless another is better."""
    best = default
    for candidate in scores:
        if mean_over(scores[candidate], families) < mean_over(scores[best], families) - 1e-12:
            best = candidate
    return best


def others(families: Sequence[str], held_out: str | None) -> list[str]:
    """All families but one; all of them if none is held out."""
    return [family for family in families if family != held_out]
