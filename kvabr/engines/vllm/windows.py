"""What layers with windows drop before a request ends: the scheduler notes it, and the worker keeps it to publish.

vLLM takes the blocks behind a window from a request while its prompt is still being computed. But a cache is published
with all groups of every class, so that any prompt with the same beginning can play it. So, after each step, the worker
copies the groups that the step has completed, and keeps them by their digests, as many as memory allows. A later prompt
with the same beginning, which vLLM does not compute again, finds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvabr.engines.vllm.caches import EngineCaches
from kvabr.engines.vllm.plays import KeepRequest
from kvabr.store.lru import ByteLru

Tables = Callable[[str], Sequence[Sequence[int]]]
"""Returns the block tables of a request, given its id."""


class Completed:
    """In the scheduler: which groups each step completes."""

    def __init__(self, caches: EngineCaches, group_tokens: int, chain_of: Callable[[Any], Sequence[str]]) -> None:
        """Start; ``chain_of`` returns the digests of a request's groups, none if it is not going to be published."""
        self._caches, self._size, self._chain_of = caches, group_tokens, chain_of
        self._open: dict[str, Any] = {}
        self._chunks: dict[str, Sequence[str]] = {}

    def arrived(self, request: Any) -> None:
        """Note a request."""
        if self._caches.passing:
            self._open[request.request_id] = request

    def over(self, name: str) -> Sequence[str]:
        """Forget a request; return the digests of its groups, none if no step completed one."""
        self._open.pop(name, None)
        return self._chunks.pop(name, ())

    def step(self, scheduled: Mapping[str, int], tables: Tables) -> list[KeepRequest]:
        """Return what to keep after a step that computes ``scheduled`` tokens of each request behind those it has."""
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
        # A group whose beginning vLLM has dropped already cannot be kept.
        gone = max(-(-pages.absent(runs[pages.group]) * pages.block // self._size) for pages in self._caches.passing)
        if first + gone >= last:
            return None
        return KeepRequest(tuple(chunks[first + gone : last]), self._runs(tables(name), first + gone, last))

    def _runs(self, tables: Sequence[Sequence[int]], first: int, last: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of some groups in the tables of layers with windows."""
        passing = {pages.group for pages in self._caches.passing}
        runs = self._caches.runs(tables, first * self._size, last * self._size)
        return tuple(run if group in passing else () for group, run in enumerate(runs))


def _bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.nbytes for part in parts)


class KeptWindows:
    """In a worker: groups of layers with windows, by digest; those used longest ago go first."""

    def __init__(self, most_bytes: int) -> None:
        """Start empty."""
        self._kept: ByteLru[str, tuple[torch.Tensor, ...]] = ByteLru(
            most_bytes, lambda kept: sum(p.nbytes for p in kept)
        )

    def lacks(self, chunks: Sequence[str]) -> bool:
        """Return whether a group is not kept; those that are count as used."""
        return None in [self._kept.get(chunk) for chunk in chunks]

    def keep(self, chunk: str, parts: Sequence[torch.Tensor]) -> None:
        """Keep a group: a tensor for each class with a window, [layer, K/V, head, token, dim], which no one changes."""
        self._kept.add(chunk, tuple(parts))

    def take(self, chunks: Sequence[str]) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """Return groups, for each class with a window its groups in order; None if one is not kept."""
        if self.lacks(chunks):
            return None
        return tuple(zip(*(self._kept[chunk] for chunk in chunks), strict=True))
