"""Coroutines for threads without an event loop: what a store is asked is written once, to be awaited, or to block.

`blocked` runs a coroutine in its caller's thread. All that it awaits must come down to functions that ask `blocks`, as
`kvabr.store.objects.bucket.Bucket` does: they block then, and the coroutine never suspends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
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
