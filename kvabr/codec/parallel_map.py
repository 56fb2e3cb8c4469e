"""Runs slow functions on several items, two at a time.

Torch splits each operation among the cores and waits for the slowest core. If another process uses a core, torch mostly
waits. Two threads with half of the cores each avoid this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

_AT_ONCE = 2
"""Number of concurrent calls; more would take more memory."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def parallel_map(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield the results of ``work`` in order; take items from the iterable in this thread, on demand.

    If torch has several threads, two calls of ``work`` run at once, each with half of these threads. The calling thread
    is limited to half as well.
    """
    threads = torch.get_num_threads()
    if threads < _AT_ONCE:
        yield from map(work, items)
        return
    half = threads // _AT_ONCE
    waiting: deque[Future[_Result]] = deque()
    pool = ThreadPoolExecutor(_AT_ONCE, "kvabr-beside", torch.set_num_threads, (half,))
    try:
        torch.set_num_threads(half)
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > _AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # some libraries have one thread count for all threads
