"""Runs requests to object stores for threads without an event loop, on a loop in a daemon thread.

A caller in the main thread notices Ctrl-C immediately, even if the store does not answer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvabr.types.once import once

T = TypeVar("T")


@once
def _loop_in(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process; a forked child needs a new one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"kvabr-requests-{process}", daemon=True).start()
    return loop


def blocked(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result."""
    running = asyncio.run_coroutine_threadsafe(work, _loop_in(os.getpid()))
    try:
        return running.result()
    finally:
        running.cancel()  # after an interrupt
        del running  # breaks a cycle with the error's traceback, which would keep a store's connections


def started(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine and return its future."""
    return asyncio.run_coroutine_threadsafe(work, _loop_in(os.getpid()))
