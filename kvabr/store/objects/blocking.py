"""Coroutines for threads without an event loop: what a store is asked is written once, to be awaited, or to block.

`blocked` runs a coroutine in its caller's thread. All that it awaits must come down to functions that ask `blocks`, as
`kvabr.store.objects.bucket.Bucket` does: they block then, and the coroutine never suspends.

Requests block outside Python, where Ctrl-C must not have to wait for a store that is silent. Signals are handled in the
main thread, and only while it runs Python. And a process waits for the threads of an executor before it ends, but not
for those made here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_BLOCKS: ContextVar[bool] = ContextVar("kvabr.blocks", default=False)


def blocks() -> bool:
    """Return whether what is called now must block, since no event loop runs it."""
    return _BLOCKS.get()


async def pause(seconds: float) -> None:
    """Sleep."""
    if blocks():
        time.sleep(seconds)  # noqa: ASYNC251  # no event loop waits
    else:
        await asyncio.sleep(seconds)


def blocked(work: Awaitable[T]) -> T:
    """Run a coroutine that blocks where others suspend."""
    running = cast("Coroutine[Any, Any, T]", work)
    token = _BLOCKS.set(True)
    try:
        running.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _BLOCKS.reset(token)
    running.close()
    raise RuntimeError("a coroutine that should block has suspended")


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

    def run(self: S, /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        found: AsyncIterator[T] = aiter(getattr(self, name)(*args, **options))
        while True:
            try:
                item = blocked(anext(found))
            except StopAsyncIteration:
                return
            yield item

    run.__doc__ = f"See `{name}`; blocks."
    return run


R = TypeVar("R")


def interruptible(work: Callable[[], T]) -> T:
    """Do some work; in the main thread so that `KeyboardInterrupt` is raised at once."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    return each(1, lambda _: work(), (None,))[0]


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
