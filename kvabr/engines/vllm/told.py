"""What the connector tells routers, with vLLM's KV events: which blocks can be had from kvabr.

Of requests with an adapter, pictures or sound nothing is told: routers that make names of blocks from tokens would take
them for the base model's, or for any picture's.

They are told with vLLM's own names and with the medium of storage, so that a router can tell them from those in the
engine. A prefix is told whenever a lookup has found it, since a router may have forgotten it (vLLM clears everything
when its own prefix cache is reset), and when all workers have published it. It is gone when a later lookup finds less
of it, when the engine's weights change, or when so many others were told since that it is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from kvabr.telemetry.kv_events.wire import STORAGE, KVBlocksRemoved, KVBlocksStored, KVEvent

MOST_BLOCKS = 1 << 19
"""Blocks that are remembered, so that they can be told to be gone."""
_MOST_PENDING = 1024
"""Requests whose publications have not ended."""


class ToldBlocks:
    """The blocks that were told, and the events that are to be told; requests are vLLM's own objects."""

    def __init__(self, block: int, ranks: int = 1, most: int = MOST_BLOCKS) -> None:
        """Begin; a block has ``block`` tokens, and ``ranks`` workers publish a part each."""
        self._block, self._ranks, self._most = block, ranks, most
        self._told: OrderedDict[bytes, None] = OrderedDict()
        """Names of blocks, those that were not heard of for the longest time first."""
        self._pending: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        """Requests that are being published, and how many workers have."""
        self._events: list[KVEvent] = []

    def found(self, request: Any, tokens: int) -> None:
        """Take the answer to a request's lookup: so many tokens of its prompt can be had."""
        if not _plain(request):
            return
        names: Sequence[bytes] = request.block_hashes[: int(request.num_prompt_tokens) // self._block]
        count = min(len(names), tokens // self._block)
        if count:
            self._events.append(self._stored(request, names[:count]))
        for name in reversed(names[:count]):  # the beginning of a prompt is forgotten last
            self._told[name] = None
            self._told.move_to_end(name)
        self._remove(names[count:])
        if len(self._told) > self._most:
            self._remove(list(islice(self._told, len(self._told) - self._most)))

    def publishing(self, request: Any) -> None:
        """Remember a request that is going to be published."""
        if not _plain(request):
            return
        self._pending[request.request_id] = (request, 0)
        while len(self._pending) > _MOST_PENDING:
            self._pending.popitem(last=False)

    def published(self, request: str, tokens: int) -> None:
        """Take what a worker has published of a request; 0: nothing."""
        known, ranks = self._pending.pop(request, (None, 0))
        if known is None or not tokens:
            return
        if ranks + 1 < self._ranks:
            self._pending[request] = known, ranks + 1
        else:
            self.found(known, max(tokens, self._had(known)))

    def reset(self) -> None:
        """Take back everything: caches have other names from now on."""
        self._pending.clear()
        self._remove(list(self._told))

    def take(self) -> list[KVEvent]:
        """Return, once, what is to be told."""
        events, self._events = self._events, []
        return events

    def _had(self, request: Any) -> int:
        """Return how many tokens of a prompt are told already: more may be published than this request has."""
        names = request.block_hashes[: int(request.num_prompt_tokens) // self._block]
        return self._block * next((at for at, name in enumerate(names) if name not in self._told), len(names))

    def _remove(self, names: Iterable[bytes]) -> None:
        gone = [name for name in names if name in self._told]
        for name in gone:
            del self._told[name]
        if gone:
            self._events.append(KVBlocksRemoved(list(gone), STORAGE))

    def _stored(self, request: Any, names: Sequence[bytes]) -> KVBlocksStored:
        salt = request.cache_salt
        return KVBlocksStored(
            block_hashes=list(names),
            parent_block_hash=None,
            token_ids=list(request.prompt_token_ids[: len(names) * self._block]),
            block_size=self._block,
            medium=STORAGE,
            extra_keys=[(salt,), *[None] * (len(names) - 1)] if salt else None,
        )


def _plain(request: Any) -> bool:
    """Return whether tokens and salt are all that a request's cache depends on."""
    return getattr(request, "lora_request", None) is None and not getattr(request, "mm_features", None)
