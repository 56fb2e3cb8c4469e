"""What an engine computes for one play, and what it has of the play's cache on its own device meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from kvabr.player.assembler import Assembler
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.engine import Engine, ResidentCache, ResidentEngine, prefill_classes


def computed(engine: Engine, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Compute a whole prompt, [layer, K/V, head, token, dim] per layer class, and leave it where the engine has it."""
    room = engine.reside(len(tokens)) if isinstance(engine, ResidentEngine) else None
    return prefill_classes(engine, tokens) if room is None else (room.prefill(tokens, 0),)


class EngineCache:
    """Computes groups of a play. Its methods are called in the engine's threads, one after the other."""

    def __init__(self, engine: Engine, catalog: Catalog, tokens: Sequence[int], assembler: Assembler) -> None:
        """Prepare; an engine is asked for room with its first computation."""
        self._engine, self._catalog, self._tokens, self._assembler = engine, catalog, tokens, assembler
        self._room: ResidentCache | None = None
        self._asked = False
        self._held: list[str | None] = [None] * catalog.groups
        """By group, the track on which the engine has it, or ``recomputed``."""

    def compute(self, first: int, last: int) -> None:
        """Compute groups ``first`` to ``last`` - 1 behind those before them, and put them into place."""
        catalog, assembler = self._catalog, self._assembler
        begin, end = catalog.tokens_before(first), catalog.tokens_before(last)
        tokens = self._tokens[begin:end]
        if not self._asked:
            self._asked = True
            if isinstance(self._engine, ResidentEngine) and catalog.every_token and not catalog.first_token:
                self._room = self._engine.reside(catalog.tokens)
        if self._room is None:
            before = assembler.before_classes(first) if first else None
            assembler.put_computed(first, last, *prefill_classes(self._engine, tokens, before))
            return
        if first:
            self._place(self._room, first)
        self._held[first:last] = [None] * (last - first)
        made = self._room.prefill(tokens, begin)
        self._held[first:last] = [RECOMPUTED] * (last - first)
        assembler.put_computed(first, last, made)

    def _place(self, room: ResidentCache, groups: int) -> None:
        """Copy what has changed of the first groups to the engine."""
        coverage = self._assembler.coverage[:groups]  # before the numbers: what comes meanwhile is copied once more
        before, ends = self._assembler.before(groups), self._catalog.tokens_before
        changed = [group for group in range(groups) if coverage[group] != self._held[group]]
        for _, run in groupby(enumerate(changed), lambda each: each[1] - each[0]):
            some = [group for _, group in run]
            begin, end = ends(some[0]), ends(some[-1] + 1)
            room.place(begin, before[:, :, :, begin:end])
        self._held[:groups] = coverage
