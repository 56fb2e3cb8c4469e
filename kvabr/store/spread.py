"""Runs coroutines concurrently, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from kvabr.store.store import is_driven

T = TypeVar("T")

_AT_ONCE = 32


async def spread(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines, 32 at a time, and return their results in order."""
    if is_driven():
        return [await work for work in works]
    left, results = iter(enumerate(works)), dict[int, T]()

    async def work_through() -> None:
        for number, work in left:
            results[number] = await work

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(work_through())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in sorted(results)]
