"""Requests to object stores for threads without an event loop: coroutines run on one loop, in a thread of this module.

A caller in the main thread waits where Ctrl-C is noticed at once, however silent the store is. And a process waits for
the threads of an executor before it ends, but not for those made here.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from kvabr.types.once import once

R = TypeVar("R")
T = TypeVar("T")


@once
def _loop_in(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process; a forked child has none of its parent's threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"kvabr-requests-{process}", daemon=True).start()
    return loop


def blocked(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and return what it returns or raise what it raises."""
    running = asyncio.run_coroutine_threadsafe(work, _loop_in(os.getpid()))
    try:
        return running.result()
    finally:
        running.cancel()  # unless it has ended: an interrupt
        del running  # an error knows this frame: the two would keep each other, and with them a store's connections


def started(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine, and return its outcome to come."""
    return asyncio.run_coroutine_threadsafe(work, _loop_in(os.getpid()))


def each(at_once: int, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Do the work for all items, several at once, and return the results in order.

    The first error is raised once what is under way has ended; an interrupt is not kept waiting for that.
    """
    todo = list(items)
    results: dict[int, R] = {}
    left, taking, over = iter(enumerate(todo)), threading.Lock(), threading.Event()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            while not over.is_set():
                with taking:
                    one = next(left, None)
                if one is None:
                    break
                results[one[0]] = work(one[1])
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            over.set()
            ended.put(error)
        else:
            ended.put(None)

    threads = min(at_once, len(todo))
    for _ in range(threads):
        threading.Thread(target=run, name="kvabr-store", daemon=True).start()
    try:
        failed = next(filter(None, [ended.get() for _ in range(threads)]), None)
    finally:
        over.set()
    if failed is not None:
        try:
            raise failed
        finally:
            del failed  # it knows this frame: the two would keep each other, and with them a store's connections
    return [results[number] for number in range(len(todo))]
