"""Rivals: selectors of other systems, and bounds, which those of `kvabr.blend` are compared with."""

from __future__ import annotations

import torch

from kvabr.blend.selection import Selection, Selector, by_passage, needed


class HkvdSelector(Selector):
    """Tokens whose keys and values in layer 1 change most behind a full layer 0 (CacheBlend, arXiv:2405.16444)."""

    needs = frozenset({"deviation"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return the deviation of keys and values together."""
        return needed(prompt.deviation, "deviation").sum(dim=0)


class LegoLinkSelector(Selector):
    """The first tokens of each passage, which were sinks of attention when it was computed (EPIC, arXiv:2410.15332)."""

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return how early each token stands in its passage."""
        return by_passage(prompt, [-torch.arange(float(end - first)) for first, end in prompt.passages])


class RandomSelector(Selector):
    """Random tokens, the same ones every time: what a choice is worth is what it gains over these."""

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return seeded random numbers."""
        return torch.rand(prompt.tokens, generator=torch.Generator().manual_seed(7))


class OracleSelector(Selector):
    """Tokens whose error costs most, by the exact cache that a recompute would save: a bound, for benches alone."""

    needs = frozenset({"exact"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return the cost of each token's error."""
        return needed(prompt.exact, "exact")
