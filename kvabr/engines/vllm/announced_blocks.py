"""KV events of the connector for routers, in vLLM's format, about blocks that are available from kvabr.

Requests with an adapter or media are not announced: routers identify blocks by tokens only. A prefix is announced when
all workers have published it, and whenever a lookup finds it, since a router may have forgotten it. It is removed when
a lookup finds fewer tokens, when weights change, or when there are more than `MAX_BLOCKS`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from kvabr.telemetry.kv_events.wire import STORAGE, KVBlocksRemoved, KVBlocksStored, KVEvent

MAX_BLOCKS = 1 << 19
"""Maximum number of announced blocks to remember for later removal."""
_MAX_PENDING = 1024


class AnnouncedBlocks:
    """Announced blocks and pending events. Requests are vLLM's objects."""

    def __init__(self, block: int, ranks: int = 1, limit: int = MAX_BLOCKS) -> None:
        """Create without events. A block has ``block`` tokens; ``ranks`` workers publish a part of each."""
        self._block, self._ranks, self._limit = block, ranks, limit
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._pending: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._events: list[KVEvent] = []

    def found(self, request: Any, tokens: int) -> None:
        """Announce the first ``tokens`` of a request's prompt."""
        if not _plain(request):
            return
        names: Sequence[bytes] = request.block_hashes[: int(request.num_prompt_tokens) // self._block]
        count = min(len(names), tokens // self._block)
        if count:
            self._events.append(self._stored(request, names[:count]))
        for name in reversed(names[:count]):  # remove the beginning of a prompt last
            self._announced[name] = None
            self._announced.move_to_end(name)
        self._remove(names[count:])
        if len(self._announced) > self._limit:
            self._remove(list(islice(self._announced, len(self._announced) - self._limit)))

    def publishing(self, request: Any) -> None:
        """Record a request that will be published."""
        if not _plain(request):
            return
        self._pending[request.request_id] = (request, 0)
        while len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)

    def published(self, request: str, tokens: int) -> None:
        """Record how many tokens of a request a worker has published."""
        known, ranks = self._pending.pop(request, (None, 0))
        if known is None or not tokens:
            return
        if ranks + 1 < self._ranks:
            self._pending[request] = known, ranks + 1
        else:
            self.found(known, max(tokens, self._had(known)))

    def reset(self) -> None:
        """Remove all announced blocks, because cache names change."""
        self._pending.clear()
        self._remove(list(self._announced))

    def take(self) -> list[KVEvent]:
        """Return and clear the pending events."""
        events, self._events = self._events, []
        return events

    def _had(self, request: Any) -> int:
        names = request.block_hashes[: int(request.num_prompt_tokens) // self._block]
        return self._block * next((at for at, name in enumerate(names) if name not in self._announced), len(names))

    def _remove(self, names: Iterable[bytes]) -> None:
        release_blocks = [name for name in names if name in self._announced]
        for name in release_blocks:
            del self._announced[name]
        if release_blocks:
            self._events.append(KVBlocksRemoved(list(release_blocks), STORAGE))

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
    """Return True if a request's cache depends only on tokens and salt."""
    return getattr(request, "lora_request", None) is None and not getattr(request, "mm_features", None)
