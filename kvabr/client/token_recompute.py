"""Chooses tokens of a joined prompt by its question, and has an engine compute them again; in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvabr.blend.looking import look
from kvabr.blend.selection import Selection, Selector, choose
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.engine import BlendEngine
from kvabr.types.joined import joined_passages


@dataclass(slots=True)
class TokenRecompute:
    """The tokens of one play. Its methods are called one after the other."""

    engine: BlendEngine
    catalog: Catalog
    """Joined, see `kvabr.types.joined.join`."""
    tokens: Sequence[int]
    """Ids of the catalog's tokens."""
    question: Sequence[int]
    """Ids whose attention chooses."""
    selector: Callable[[], Selector]
    at: tuple[int, ...] = ()
    """Places of the tokens that were computed, increasing."""
    _seen: tuple[Selection, torch.Tensor] | None = None

    def choose(self, kv: torch.Tensor) -> None:
        """Score all tokens by a cache of them, [layer, K/V, head, token, dim], on whichever tracks.

        Raises:
            ModelError, PolicyError, UsageError: of the engine or the selector.
        """
        if self._seen is not None:
            return
        passages, selector = joined_passages(self.catalog), self.selector()
        spans = [(one.first, one.end) for one in passages]
        orders = [None if one.notes is None or not one.notes.order else one.notes.order for one in passages]
        tokens = list(self.tokens[: self.catalog.tokens])
        seen = look(self.engine, selector, tokens, spans, self.question, kv, orders=orders)
        scores = selector.scores(seen)
        choose(seen, scores, 0.0)  # what a selector returns is checked at once
        self._seen = seen, scores

    def compute(self, kv: torch.Tensor, coverage: Sequence[str], count: int) -> tuple[tuple[int, ...], torch.Tensor]:
        """Compute the best tokens over a cache; choose them first if that was not done.

        Args:
            kv: the cache, [layer, K/V, head, token, dim].
            coverage: per group the track in place, or ``recomputed``: its tokens are as good as they can be.
            count: how many tokens.

        Returns:
            Their places, increasing, and their KV, [layer, K/V, head, token, dim].
        """
        self.choose(kv)
        assert self._seen is not None  # noqa: S101  # it was just made
        seen, scores = self._seen
        units = [self.catalog.unit(group) for group, track in enumerate(coverage) if track != RECOMPUTED]
        left = replace(seen, passages=tuple((unit.first, unit.first + unit.tokens) for unit in units))
        size = sum(unit.tokens for unit in units)
        self.at = choose(left, scores, min(1.0, count / max(1, size)))
        return self.at, self.engine.recompute(list(self.tokens[: self.catalog.tokens]), self.at, kv)
