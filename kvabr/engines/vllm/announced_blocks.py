"""KV events of the connector: blocks available from kvabr, for routers, in vLLM's format.

Requests with an adapter or media are not announced: routers that name blocks by tokens would mistake them for the base
model's, or for those of any picture.

Blocks have vLLM's own names, and the medium of storage to distinguish them from the engine's. A prefix is announced
whenever a lookup finds it, since a router may have forgotten it (vLLM clears everything when its prefix cache is
reset), and when all workers have published it. It is removed when a later lookup finds less, when the engine's weights
change, or when it is evicted from memory here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from kvabr.telemetry.kv_events.wire import STORAGE, KVBlocksRemoved, KVBlocksStored, KVEvent

MAX_BLOCKS = 1 << 19
"""Blocks remembered for their removal."""
_MAX_PENDING = 1024


class AnnouncedBlocks:
    """Announced blocks and pending events; requests are vLLM's own objects."""

    def __init__(self, block: int, ranks: int = 1, most: int = MAX_BLOCKS) -> None:
        """Start; a block has ``block`` tokens, and ``ranks`` workers publish a part each."""
        self._block, self._ranks, self._most = block, ranks, most
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        """Announced names, the oldest first."""
        self._pending: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        """Requests being published, and the number of finished workers."""
        self._events: list[KVEvent] = []

    def found(self, request: Any, tokens: int) -> None:
        """Record a lookup: ``tokens`` of a request's prompt are available."""
        if not _plain(request):
            return
        names: Sequence[bytes] = request.block_hashes[: int(request.num_prompt_tokens) // self._block]
        count = min(len(names), tokens // self._block)
        if count:
            self._events.append(self._stored(request, names[:count]))
        for name in reversed(names[:count]):  # forget the beginning of a prompt last
            self._announced[name] = None
            self._announced.move_to_end(name)
        self._remove(names[count:])
        if len(self._announced) > self._most:
            self._remove(list(islice(self._announced, len(self._announced) - self._most)))

    def publishing(self, request: Any) -> None:
        """Record a request that will be published."""
        if not _plain(request):
            return
        self._pending[request.request_id] = (request, 0)
        while len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def published(self, request: str, tokens: int) -> None:
        """Record the tokens that a worker has published."""
        known, ranks = self._pending.pop(request, (None, 0))
        if known is None or not tokens:
            return
        if ranks + 1 < self._ranks:
            self._pending[request] = known, ranks + 1
        else:
            self.found(known, max(tokens, self._had(known)))

    def reset(self) -> None:
        """Remove everything: caches have other names from now on."""
        self._pending.clear()
        self._remove(list(self._announced))

    def take(self) -> list[KVEvent]:
        """Return, once, the pending events."""
        events, self._events = self._events, []
        return events

    def _had(self, request: Any) -> int:
        """Return the announced tokens of a prompt: more may be published than this request has."""
        names = request.block_hashes[: int(request.num_prompt_tokens) // self._block]
        return self._block * next((at for at, name in enumerate(names) if name not in self._announced), len(names))

    def _remove(self, names: Iterable[bytes]) -> None:
        gone = [name for name in names if name in self._announced]
        for name in gone:
            del self._announced[name]
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
    """Return True if a request's cache depends on tokens and salt only."""
    return getattr(request, "lora_request", None) is None and not getattr(request, "mm_features", None)
