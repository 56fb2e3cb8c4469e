"""Selectors of other systems, and bounds, for comparison with `kvabr.blend`."""

from __future__ import annotations

import torch

from kvabr.blend.selection import Selection, Selector, by_passage, needed


class HkvdSelector(Selector):
    """Selects tokens with the largest KV changes in layer 1 after a full layer 0 (CacheBlend, arXiv:2405.16444)."""

    needs = frozenset({"deviation"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return the deviation of keys and values."""
        return needed(prompt.deviation, "deviation").sum(dim=0)


class LegoLinkSelector(Selector):
    """Selects the first tokens of passages, which were attention sinks when computed (EPIC, arXiv:2410.15332)."""

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return a score that falls with the token's position in its passage."""
        return by_passage(prompt, [-torch.arange(float(end - first)) for first, end in prompt.passages])


class RandomSelector(Selector):
    """Selects random but reproducible tokens, as a baseline."""

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return seeded random numbers."""
        return torch.rand(prompt.tokens, generator=torch.Generator().manual_seed(7))


class OracleSelector(Selector):
    """Selects the tokens with the most costly errors, given the exact cache: a bound for benchmarks."""

    needs = frozenset({"exact"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return the cost of each token's error."""
        return needed(prompt.exact, "exact")
