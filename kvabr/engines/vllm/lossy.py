"""What vLLM's prefix cache may have of caches that were played with losses: what is computed behind it is not exact.

vLLM gives a request every block of an earlier one, as long as their tokens agree up to the block's end. Blocks are
smaller than groups: two prompts may share the beginning of a lossy group without sharing the group. So a lossy group is
known by its first block, named by all tokens up to that block's end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvabr.types.kv import KVSpec
from kvabr.types.naming import chain


class LossyGroups:
    """Lossy groups that were placed in the engine's blocks, of which the latest are remembered."""

    def __init__(self, spec: KVSpec, block: int, most: int) -> None:
        """Remember the latest ``most`` groups of a model, whose engine shares blocks of ``block`` tokens."""
        self._spec, self._block, self.most = spec, block, most
        self._groups: OrderedDict[str, None] = OrderedDict()
        self._blocks: OrderedDict[str, None] = OrderedDict()
        """Their first blocks."""

    def __len__(self) -> int:
        """Return how many groups are remembered."""
        return len(self._groups)

    def __contains__(self, chunk: object) -> bool:
        """Return whether the group with this digest is lossy itself."""
        return chunk in self._groups

    def note(self, tokens: Sequence[int], salt: bytes, places: Iterable[int], model: str | None = None) -> None:
        """Remember groups of a prompt, each given by a token that it begins with.

        ``model`` is the name of the model with an adapter; None: without one.
        """
        lossy = tuple(places)
        if not lossy:
            return
        size = self._spec.group_tokens
        groups, blocks = (self._chain(tokens, salt, each, model) for each in (size, self._block))
        for place in lossy:
            for kept, digest in ((self._groups, groups[place // size]), (self._blocks, blocks[place // self._block])):
                kept[digest] = None
                kept.move_to_end(digest)
                if len(kept) > self.most:
                    kept.popitem(last=False)

    def before(self, tokens: Sequence[int], salt: bytes, model: str | None = None) -> bool:
        """Return whether the engine may have computed any of a prompt's tokens behind a lossy group, or not at all."""
        chain = self._chain(tokens, salt, self._block, model) if self._blocks else ()
        return any(each in self._blocks for each in chain)

    def clear(self) -> None:
        """Forget everything."""
        self._groups.clear()
        self._blocks.clear()

    def _chain(self, tokens: Sequence[int], salt: bytes, size: int, model: str | None) -> list[str]:
        spec = self._spec
        return chain(tokens, model=model or spec.model, tokenizer=spec.tokenizer, group_tokens=size, salt=salt)
