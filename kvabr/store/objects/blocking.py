"""Requests to object stores for threads without an event loop: coroutines run on one loop, in a thread of this module.

A caller in the main thread waits where Ctrl-C is noticed at once, however silent the store is. And a process waits for
the threads of an executor before it ends, but not for those made here.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvabr.types.once import once

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_AT_ONCE = 1000
"""Items of a listing that are waited for together."""


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


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return the method that blocks where this one is awaited."""
    name = method.__name__

    def run(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        result: T = blocked(getattr(self, name)(*args, **options))
        return result

    run.__doc__ = f"See `{name}`; blocks."
    return run


def blocking_each(method: Callable[Concatenate[S, P], AsyncIterator[T]]) -> Callable[Concatenate[S, P], Iterator[T]]:
    """Return the generator that blocks where this one is awaited."""
    name = method.__name__

    async def following(found: AsyncIterator[T]) -> list[T]:
        items = []
        async for item in found:
            items.append(item)
            if len(items) >= _AT_ONCE:
                break
        return items

    def run(self: S, /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        found: AsyncIterator[T] = aiter(getattr(self, name)(*args, **options))
        while items := blocked(following(found)):
            yield from items

    run.__doc__ = f"See `{name}`; blocks."
    return run


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
