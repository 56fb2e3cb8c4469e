"""Snapshots of recurrent states: the scheduler notes which step leaves one, and the worker keeps it to publish.

In the cache mode "align" (the default with prefix caching) vLLM has a state only where a step ended at the end of a
block, and lets a step of every prompt end behind its last whole block. The table of such a layer has that state in the
place of the block that ends there; other places are mostly the null block. vLLM drops the state while it computes what
follows, so the worker copies it right after that step, and keeps it by the digest of the tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvabr.engines.vllm.plays import SnapshotRequest
from kvabr.engines.vllm.windows import Tables
from kvabr.store.lru import ByteLru


class Boundaries:
    """In the scheduler: which step leaves the state that is published of a request."""

    def __init__(self, block: int, group_tokens: int, chain_of: Callable[[Any], Sequence[str]]) -> None:
        """Start.

        Args:
            block: tokens in a block of all tables.
            group_tokens: tokens in a group.
            chain_of: returns the digests of a request's groups, none if it is not going to be published.
        """
        self._size, self._every, self._chain_of = group_tokens, math.lcm(block, group_tokens), chain_of
        self._open: dict[str, Any] = {}

    def end(self, request: Any) -> int:
        """Return the token behind which the state of a prompt is published: one token at least comes after it."""
        return max(0, int(request.num_prompt_tokens) - 1) // self._every * self._every

    def arrived(self, request: Any) -> None:
        """Note a request."""
        if self.end(request):
            self._open[request.request_id] = request

    def over(self, name: str) -> None:
        """Forget a request."""
        self._open.pop(name, None)

    def step(self, scheduled: Mapping[str, int], tables: Tables, blocks: Mapping[int, int]) -> list[SnapshotRequest]:
        """Return what to keep after a step that computes ``scheduled`` tokens of each request behind those it has.

        ``blocks`` are the tokens in a block of each table of states.
        """
        kept = []
        for name, tokens in scheduled.items():
            request = self._open.get(name)
            if request is None:
                continue
            end, begin = self.end(request), int(request.num_computed_tokens)
            if begin + tokens < end:
                continue
            del self._open[name]
            if begin > end:
                continue
            table = tables(name)
            held = {group: table[group][end // size - 1] for group, size in blocks.items()}
            chunks = self._chain_of(request)
            if chunks and all(held.values()):
                kept.append(SnapshotRequest(chunks[end // self._size - 1], held))
        return kept


class KeptStates:
    """In a worker: snapshots, by the digest of the tokens before them; those used longest ago go first."""

    def __init__(self, most_bytes: int) -> None:
        """Start empty."""
        self._kept: ByteLru[str, dict[int, torch.Tensor]] = ByteLru(
            most_bytes, lambda parts: sum(part.nbytes for part in parts.values())
        )

    def keep(self, chunk: str, parts: dict[int, torch.Tensor]) -> None:
        """Keep a snapshot: a tensor for each class of states, which no one changes."""
        if self._kept.get(chunk) is None:
            self._kept.add(chunk, parts)

    def take(self, chunk: str) -> dict[int, torch.Tensor] | None:
        """Return a snapshot, a tensor for each class; None if it is not kept."""
        return self._kept.get(chunk)
