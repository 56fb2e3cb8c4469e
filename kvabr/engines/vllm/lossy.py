"""Lossy groups in vLLM's prefix cache: tokens computed after them are not exact.

Prompts may share only the beginning of a group. So a group is identified by its first block; the block's name covers
all tokens up to its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvabr.types.kv import KVSpec
from kvabr.types.naming import chain


class LossyGroups:
    """The most recent lossy groups in the engine's blocks."""

    def __init__(self, spec: KVSpec, block: int, limit: int) -> None:
        """Create without groups; remember the latest ``limit`` groups of a model with blocks of ``block`` tokens."""
        self._spec, self._block, self.limit = spec, block, limit
        self._groups: OrderedDict[str, None] = OrderedDict()
        self._blocks: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._groups

    def note(self, tokens: Sequence[int], salt: bytes, places: Iterable[int], model: str | None = None) -> None:
        """Remember groups of a prompt by their first tokens; ``model`` is the name of a model with an adapter."""
        lossy = tuple(places)
        if not lossy:
            return
        size = self._spec.group_tokens
        groups, blocks = (self._chain(tokens, salt, each, model) for each in (size, self._block))
        for place in lossy:
            for kept, digest in ((self._groups, groups[place // size]), (self._blocks, blocks[place // self._block])):
                kept[digest] = None
                kept.move_to_end(digest)
                if len(kept) > self.limit:
                    kept.popitem(last=False)

    def before(self, tokens: Sequence[int], salt: bytes, model: str | None = None) -> bool:
        """Return True if the engine may have computed a prompt after a lossy group."""
        chain = self._chain(tokens, salt, self._block, model) if self._blocks else ()
        return any(each in self._blocks for each in chain)

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._blocks.clear()

    def _chain(self, tokens: Sequence[int], salt: bytes, size: int, model: str | None) -> list[str]:
        spec = self._spec
        return chain(tokens, model=model or spec.model, tokenizer=spec.tokenizer, group_tokens=size, salt=salt)
