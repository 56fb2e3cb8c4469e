"""Scheduler side of publishing during prefill: the tokens that each step adds to a cache.

A preempted request computes its tokens again, but they are published once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvabr.engines.layouts import whole_blocks
from kvabr.engines.vllm.caches import EngineCaches
from kvabr.engines.vllm.plays import GrowRequest
from kvabr.engines.vllm.windows import Tables

Names = tuple[Sequence[int], bytes, str | None]
"""Tokens, salt and adapter digest, which determine the names of a request's caches."""


class Growth:
    """The requests with growing caches."""

    def __init__(self, caches: EngineCaches, group_tokens: int, name_of: Callable[[Any], Names]) -> None:
        self._caches, self._every, self._name_of = caches, math.lcm(caches.block, group_tokens), name_of
        self._open: dict[str, Any] = {}
        self._handed: dict[str, int] = {}

    def arrived(self, request: Any) -> None:
        """Record a request to publish."""
        if whole_blocks(int(request.num_prompt_tokens), self._every):
            self._open[request.request_id] = request

    def over(self, name: str) -> bool:
        """Forget a request; return True if its cache was announced."""
        self._open.pop(name, None)
        return self._handed.pop(name, None) is not None

    def step(self, scheduled: Mapping[str, int], tables: Tables) -> list[GrowRequest]:
        """Return the tokens that a step adds to growing caches; it computes ``scheduled`` tokens of each request."""
        grown = []
        for name, tokens in scheduled.items():
            request = self._open.get(name)
            if request is not None and (one := self._grow(request, tokens, tables)) is not None:
                grown.append(one)
        return grown

    def _grow(self, request: Any, tokens: int, tables: Tables) -> GrowRequest | None:
        name, begin, prompt = request.request_id, int(request.num_computed_tokens), int(request.num_prompt_tokens)
        total, last = whole_blocks(prompt, self._every), whole_blocks(min(begin + tokens, prompt), self._every)
        new, first = name not in self._handed, self._handed.get(name, 0)
        if last <= first and not new:
            return None
        runs = self._caches.runs(tables(name), first, last)
        if any(pages.absent(runs[pages.group]) for pages in self._caches.passing):
            del self._open[name]  # its window blocks are already dropped; the new request is published when it ends
            return None
        self._handed[name] = last
        if last == total:
            del self._open[name]
        ids, salt, adapter = self._name_of(request)
        new_ids = ids[:total] if new else ()
        return GrowRequest(name, new_ids, first, last, runs, salt, adapter, min(begin, total), tokens)
