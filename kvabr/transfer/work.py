"""Work beside the event loop: the threads that check and decode groups, and the end of tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from kvabr.codec.threads import decoder_threads

SMALL_BYTES = 32 << 10
"""What takes less memory is checked and decoded on the event loop's own thread: a thread needs more time, 5 ms, only to
get hold of Python beside a busy event loop."""


@cache
def decoders() -> ThreadPoolExecutor:
    """Return the threads that decode for every play of this process."""
    return ThreadPoolExecutor(decoder_threads(), thread_name_prefix="kvabr-decode")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=decoders.cache_clear)


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they are over; their errors are retrieved, so that asyncio does not log them."""
    tasks = list(tasks)  # of a set from which each is removed as it ends
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
