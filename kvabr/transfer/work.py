"""Threads that check and decode groups, and cancellation of tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from kvabr.codec.threads import decoder_threads

SMALL_BYTES = 32 << 10
"""Less memory is checked and decoded on the event loop's thread: next to a busy loop, a thread needs 5 ms just to
acquire the interpreter's lock."""


@cache
def decoders() -> ThreadPoolExecutor:
    """Return the decoding threads of this process."""
    return ThreadPoolExecutor(decoder_threads(), thread_name_prefix="kvabr-decode")


if hasattr(os, "register_at_fork"):  # a child does not inherit threads
    os.register_at_fork(after_in_child=decoders.cache_clear)


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, wait for their end, and retrieve their errors, so that asyncio does not log them."""
    tasks = list(tasks)  # the caller's set may shrink as tasks end
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
