"""Limits the loss in vLLM's prefix cache: later requests do not reuse blocks of lossy plays.

If a play loses more than `VllmSettings.keep_loss`, its blocks, and blocks computed after these, are evicted when its
request ends. Until then, requests with the same or a shorter deadline may share them; any other request causes
immediate eviction. The loss of a play includes the loss of reused blocks before it. If those blocks exceed a request's
own limit, it uses no blocks of vLLM's prefix cache.

Pure: no vLLM, no clock, no threads.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvabr.engines.vllm.caches import ABSENT_BLOCK
from kvabr.engines.vllm.requests import apart, media_of, unfit
from kvabr.engines.vllm.stats import REQUEST_LOSS, ConnectorCounts
from kvabr.engines.vllm.windows import Tables

_MAX_REMEMBERED = 4096


@dataclass(slots=True)
class _Served:
    tokens: Sequence[int]
    apart: object
    """Key of the request's blocks in vLLM's prefix cache, in addition to tokens and media."""
    media: tuple[tuple[object, int], ...]
    deadline_s: float
    first: int
    loaded: int = 0
    loss: float = 0.0
    """Expected loss of the request's own play, nats per generated token."""
    worst: float = 0.0
    """Loss of the play for another request that shares no later tokens."""
    before: float = 0.0
    """Loss of reused blocks before the load; within the limit."""
    begins: object = None
    shared: float = 0.0
    """Loss of another request's play with shared blocks; above the limit."""
    blocks: set[int] = field(default_factory=set)
    ran: bool = False
    unseen: int = 0
    hidden: bool = False
    """True if the request's first blocks were evicted, so that no request can share them."""

    @property
    def leaves(self) -> float:
        """Loss that another request inherits if it reuses the blocks."""
        return max(self.before + self.worst, self.shared)


class BlockLosses:
    """Losses of one engine's requests and their blocks."""

    def __init__(
        self,
        limit: float,
        blocks: Sequence[int],
        evict: Callable[[set[int]], None],
        counts: ConnectorCounts,
        hashed: int | None = None,
    ) -> None:
        """Start without requests.

        ``limit`` is the maximum loss, nats per generated token; ``blocks`` has the block size of each table, in tokens;
        ``evict`` receives block ids; ``hashed`` is the number of tokens per hash, by default the first table's block
        size.
        """
        self._limit, self._sizes, self._evict, self._counts = limit, tuple(blocks), evict, counts
        self._hashed = hashed or self._sizes[0]
        self._served: dict[str, _Served] = {}
        self._left: OrderedDict[object, float] = OrderedDict()
        """Losses of recent plays within the limit, by vLLM's hash of a play's first block."""
        self._lossy: dict[str, _Served] = {}

    def begin(self, request: Any, deadline_s: float, first: int, loaded: int, tables: Sequence[Sequence[int]]) -> None:
        """Record a load of ``loaded`` tokens from ``first`` on into blocks of a request."""
        served = self._served.setdefault(request.request_id, _new(request, deadline_s, first))
        served.first, served.deadline_s = min(first, served.first), min(deadline_s, served.deadline_s)
        served.loaded, served.hidden = loaded, False
        served.blocks |= self._ids(served, tables)
        served.before = self._left_before(request, first)
        served.begins = next(iter(_hashes(request)[first // self._hashed :][:1]), None)

    def lost(self, name: str, loss: float, worst: float) -> None:
        """Record a play's expected loss for its request, and for requests that share no later tokens (``worst``)."""
        served = self._served.get(name)
        if served is None:
            return
        served.loss, served.worst = max(loss, served.loss), max(worst, served.worst)
        if served.before + served.worst > self._limit and served.worst > 0:
            if name not in self._lossy:
                self._lossy[name] = served
                self._counts.add("plays_not_kept")
        elif served.worst > 0 and served.begins is not None:
            self._left[served.begins] = served.before + served.worst
            self._left.move_to_end(served.begins)
            if len(self._left) > _MAX_REMEMBERED:
                self._left.popitem(last=False)

    def loss_before(self, request: Any, computed: int) -> float:
        """Return the expected loss of vLLM's first ``computed`` tokens for a request."""
        own = self._served.get(request.request_id)
        return self._left_before(request, computed) + (0.0 if own is None else own.shared)

    def _left_before(self, request: Any, tokens: int) -> float:
        hashes = _hashes(request)[: tokens // self._hashed]
        return max((self._left.get(each, 0.0) for each in hashes), default=0.0)

    def may_share(self, request: Any, computed: int, deadline_s: float, max_loss: float = math.inf) -> bool:
        """Return True if a request may use vLLM's first ``computed`` tokens; otherwise evict lossy blocks.

        ``deadline_s`` is the deadline of the request's own play (infinite without a play), ``max_loss`` the maximum
        loss of these tokens.
        """
        name, spared, shared = request.request_id, False, None
        for other, lossy in self._lossy.items() if unfit(request) is None else ():  # otherwise it has its own blocks
            if other == name or lossy.hidden or not self._reaches(request, computed, lossy):
                continue
            if deadline_s > lossy.deadline_s or lossy.leaves > max_loss:
                self._evict(lossy.blocks)
                lossy.hidden = spared = True
            elif shared is None or lossy.leaves > shared.leaves:
                shared = lossy
        if spared:
            self._counts.add("requests_spared")
            return False
        own = self._served.get(name)
        if shared is not None:
            if own is None:
                own = self._served[name] = _Served(
                    shared.tokens, shared.apart, shared.media, shared.deadline_s, shared.first
                )
            own.first, own.shared = min(own.first, shared.first), shared.leaves
            own.deadline_s = min(own.deadline_s, shared.deadline_s)
            self._lossy[name] = own
        elif own is not None and own.shared and not own.ran:
            own.shared = 0.0
            if not own.loaded:
                self._forget(name)
        return True

    def step(self, scheduled: Mapping[str, int], tables: Tables) -> None:
        """Record the blocks of scheduled requests."""
        for name in self._lossy.keys() & scheduled.keys():
            lossy = self._lossy[name]
            lossy.ran = True
            lossy.unseen += scheduled[name]
            if not lossy.blocks or lossy.unseen >= min(self._sizes):
                lossy.blocks |= self._ids(lossy, tables(name))
                lossy.unseen = 0
                if lossy.hidden:  # requests have computed the preceding tokens again, and would share these blocks
                    self._evict(lossy.blocks)

    def over(self, name: str, tables: Sequence[Sequence[int]]) -> dict[str, float] | None:
        """End a request, given its block tables; return the losses that it was served with, or None without a load."""
        served = self._served.get(name)
        if served is None:
            return None
        if name in self._lossy:
            self._evict(served.blocks | self._ids(served, tables))
        self._forget(name)
        if served.shared:
            self._counts.add("requests_shared_lossy")
        loss = served.before + served.loss + served.shared
        self._counts.note(REQUEST_LOSS, loss)
        return {"tokens_loaded": served.loaded, "loss": loss, "shared_loss": served.shared}

    def _forget(self, name: str) -> None:
        self._served.pop(name, None)
        self._lossy.pop(name, None)

    def _reaches(self, request: Any, computed: int, lossy: _Served) -> bool:
        size = min(self._sizes)
        end = (lossy.first // size + 1) * size
        if computed < end or request.prompt_token_ids is None or apart(request) != lossy.apart:
            return False
        if [each for each in media_of(request) if each[1] < end] != [each for each in lossy.media if each[1] < end]:
            return False
        # After a preemption, vLLM's tokens may extend beyond the prompt.
        tokens = getattr(request, "all_token_ids", request.prompt_token_ids)
        return bool(tokens[end - 1] == lossy.tokens[end - 1] and tokens[:end] == lossy.tokens[:end])

    def _ids(self, lossy: _Served, tables: Sequence[Sequence[int]]) -> set[int]:
        pairs = zip(tables, self._sizes, strict=True)
        return {block for table, size in pairs for block in table[lossy.first // size :]} - {ABSENT_BLOCK}


def _hashes(request: Any) -> Sequence[object]:
    found: Sequence[object] = getattr(request, "block_hashes", ())
    return found


def _new(request: Any, deadline_s: float, first: int) -> _Served:
    return _Served(request.prompt_token_ids, apart(request), media_of(request), deadline_s, first)
