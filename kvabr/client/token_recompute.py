"""Select tokens of a joined prompt by its question, and recompute them with an engine, in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvabr.blend.selection import Selection, Selector, choose, look
from kvabr.player.assembler import Assembler, check_tokens
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.engine import BlendEngine
from kvabr.types.joined import Joined, joined_passages


@dataclass(slots=True)
class TokenRecompute:
    """Selection and recomputation of tokens for one play. Calls must not overlap."""

    engine: BlendEngine
    catalog: Catalog
    """The joined catalog, see `kvabr.types.joined.join`."""
    tokens: Sequence[int]
    question: Sequence[int]
    selector: Callable[[], Selector]
    _ahead: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tokens computed ahead, by position: [layer, K/V, head, dim]."""
    _seen: tuple[Selection, torch.Tensor] | None = None

    def choose(self, kv: torch.Tensor) -> None:
        """Score all tokens, from a cache on any tracks: [layer, K/V, head, token, dim].

        Raises `ModelError`, `PolicyError` or `UsageError` from the engine or the selector.
        """
        if self._seen is not None:
            return
        passages, selector = joined_passages(self.catalog), self.selector()
        spans = [(one.first, one.end) for one in passages]
        orders = [_order(one) or None for one in passages]
        tokens = list(self.tokens[: self.catalog.tokens])
        seen = look(self.engine, selector, tokens, spans, self.question, kv, orders=orders)
        scores = selector.scores(seen)
        choose(seen, scores, 0.0)  # checks the selector's result early
        self._seen = seen, scores

    def compute_ahead(self, assembler: Assembler, passage: int, count: int) -> None:
        """Recompute the ``count`` tokens of a passage that its publisher ranked first, while later groups arrive.

        Raises `ModelError`, or `FormatError` for a wrong shape or type.
        """
        place = joined_passages(self.catalog)[passage]
        order = _order(place)
        best = sorted(range(len(order)), key=lambda token: -order[token])[:count]
        at = sorted(place.first + token for token in best)
        if at:
            kv = assembler.before(place.groups.stop)
            new = self.engine.recompute(list(self.tokens[: place.end]), at, kv)
            check_tokens(new, self.catalog.spec, len(at))
            self._ahead.update(zip(at, new.unbind(dim=3), strict=True))

    def compute(
        self, assembler: Assembler, coverage: Sequence[str], count: int, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Recompute the best ``count`` tokens over a complete cache, and write them and those computed ahead to it.

        Calls `choose` if necessary. The assembler accepts no groups afterwards. ``coverage``: per group the track in
        place, or ``recomputed`` for a group that needs no recomputation. ``wanted`` returns False once the play has
        ended.

        Raises:
            ModelError, PolicyError, UsageError: from the engine or the selector.
            FormatError: the engine returned another shape or type.
        """
        units = [self.catalog.unit(group) for group, track in enumerate(coverage) if track != RECOMPUTED]
        spans = tuple((unit.first, unit.first + unit.tokens) for unit in units)
        ahead = [at for at in sorted(self._ahead) if any(first <= at < end for first, end in spans)]
        if ahead and wanted():
            assembler.put_tokens(ahead, torch.stack([self._ahead[at] for at in ahead], dim=3))
        if count:
            kv = assembler.before(self.catalog.groups)
            self.choose(kv)
            assert self._seen is not None  # noqa: S101  # set by choose
            seen, scores = self._seen
            scores = scores.clone().double()
            scores[ahead] = -torch.inf
            size = sum(unit.tokens for unit in units)
            left = replace(seen, passages=spans)
            chosen = choose(left, scores, min(1.0, count / max(1, size)))
            new = self.engine.recompute(list(self.tokens[: self.catalog.tokens]), chosen, kv)
            if wanted():
                assembler.put_tokens(chosen, new)


def _order(passage: Joined) -> bytes:
    return b"" if passage.notes is None else passage.notes.order[: passage.end - passage.first]
