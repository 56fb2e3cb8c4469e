"""Snapshots of recurrent states: the scheduler finds the step that leaves one, and the worker keeps it to publish.

In the cache mode "align" (default with prefix caching), vLLM ends one step of every prompt after the last whole block,
and stores the state in that block. vLLM drops the state later, so the worker copies it right after that step.
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
    """In the scheduler: finds the step that leaves a request's state for publishing."""

    def __init__(self, block: int, group_tokens: int, chain_of: Callable[[Any], Sequence[str]]) -> None:
        """Start; ``chain_of`` returns the digests of a request's groups, empty if it is not published."""
        self._size, self._every, self._chain_of = group_tokens, math.lcm(block, group_tokens), chain_of
        self._open: dict[str, Any] = {}

    def end(self, request: Any) -> int:
        """Return the number of tokens before the state that is published for a prompt; at least one token follows."""
        return max(0, int(request.num_prompt_tokens) - 1) // self._every * self._every

    def arrived(self, request: Any) -> None:
        """Record a request."""
        if self.end(request):
            self._open[request.request_id] = request

    def over(self, name: str) -> None:
        """Forget a request."""
        self._open.pop(name, None)

    def step(self, scheduled: Mapping[str, int], tables: Tables, blocks: Mapping[int, int]) -> list[SnapshotRequest]:
        """Return the snapshots after a step, given the ``scheduled`` tokens and the block size of each table."""
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


class StateCache:
    """In a worker: an LRU cache of snapshots, by the digest of their tokens."""

    def __init__(self, max_bytes: int) -> None:
        self._kept: ByteLru[str, dict[int, torch.Tensor]] = ByteLru(
            max_bytes, lambda parts: sum(part.nbytes for part in parts.values())
        )

    def keep(self, chunk: str, parts: dict[int, torch.Tensor]) -> None:
        """Keep a snapshot: one tensor per class of states. Do not change the tensors afterwards."""
        if self._kept.get(chunk) is None:
            self._kept.add(chunk, parts)

    def take(self, chunk: str) -> dict[int, torch.Tensor] | None:
        """Return a snapshot, one tensor per class; None if it is not cached."""
        return self._kept.get(chunk)
