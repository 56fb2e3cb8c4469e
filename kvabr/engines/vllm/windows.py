"""Window layers: the scheduler finds groups before vLLM drops them, and the worker keeps them to publish.

vLLM drops blocks that leave a window during a prefill, but caches are published whole. So the worker copies each group
after the step that completes it. Groups are kept by digest, also for later prompts with the same prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvabr.engines.vllm.caches import EngineCaches
from kvabr.engines.vllm.plays import KeepRequest
from kvabr.store.lru import ByteLru

Tables = Callable[[str], Sequence[Sequence[int]]]
"""Returns a request's block tables, given its id."""


class Completed:
    """In the scheduler: finds the groups that each step completes."""

    def __init__(self, caches: EngineCaches, group_tokens: int, chain_of: Callable[[Any], Sequence[str]]) -> None:
        """Start; ``chain_of`` returns the digests of a request's groups, empty if it is not published."""
        self._caches, self._size, self._chain_of = caches, group_tokens, chain_of
        self._open: dict[str, Any] = {}
        self._chunks: dict[str, Sequence[str]] = {}

    def arrived(self, request: Any) -> None:
        """Record a request."""
        if self._caches.passing:
            self._open[request.request_id] = request

    def over(self, name: str) -> Sequence[str]:
        """Forget a request; return the digests of its groups if a step has completed at least one."""
        self._open.pop(name, None)
        return self._chunks.pop(name, ())

    def step(self, scheduled: Mapping[str, int], tables: Tables) -> list[KeepRequest]:
        """Return the groups to keep after a step of ``scheduled`` tokens by request."""
        return [keep for name, tokens in scheduled.items() if (keep := self._keep(name, tokens, tables)) is not None]

    def _keep(self, name: str, tokens: int, tables: Tables) -> KeepRequest | None:
        request = self._open.get(name)
        if request is None:
            return None
        begin, prompt = int(request.num_computed_tokens), int(request.num_prompt_tokens)
        first, last = begin // self._size, min(begin + tokens, prompt) // self._size
        if first >= last:
            return None
        if name not in self._chunks:
            self._chunks[name] = self._chain_of(request)
        chunks = self._chunks[name]
        last = min(last, len(chunks))
        if first >= last:
            return None
        runs = self._runs(tables(name), first, last)
        # A group without its beginning cannot be kept.
        absent = max(-(-pages.absent(runs[pages.group]) * pages.block // self._size) for pages in self._caches.passing)
        if first + absent >= last:
            return None
        return KeepRequest(tuple(chunks[first + absent : last]), self._runs(tables(name), first + absent, last))

    def _runs(self, tables: Sequence[Sequence[int]], first: int, last: int) -> tuple[tuple[int, ...], ...]:
        passing = {pages.group for pages in self._caches.passing}
        runs = self._caches.runs(tables, first * self._size, last * self._size)
        return tuple(run if group in passing else () for group, run in enumerate(runs))


def _bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.nbytes for part in parts)


class WindowCache:
    """In a worker: an LRU cache of window groups, by digest."""

    def __init__(self, max_bytes: int) -> None:
        self._kept: ByteLru[str, tuple[torch.Tensor, ...]] = ByteLru(
            max_bytes, lambda kept: sum(p.nbytes for p in kept)
        )

    def lacks(self, chunks: Sequence[str]) -> bool:
        """Return True if a group is missing; mark the others as used."""
        return None in [self._kept.get(chunk) for chunk in chunks]

    def keep(self, chunk: str, parts: Sequence[torch.Tensor]) -> None:
        """Keep a group: one tensor [layer, K/V, head, token, dim] per class with a window, not changed afterwards."""
        self._kept.add(chunk, tuple(parts))

    def take(self, chunks: Sequence[str]) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """Return groups in order, each with a tensor per class with a window; None if one is missing."""
        if self.lacks(chunks):
            return None
        return tuple(zip(*(self._kept[chunk] for chunk in chunks), strict=True))
