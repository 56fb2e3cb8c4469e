"""Small requests that are made again while the first one is still waited for.

Many plays may wait for one small object. An answer that never comes must not cost them much, and an answer that is
merely late must not be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvabr.transfer.work import cancel_all
from kvabr.types.errors import ConnectionLostError

T = TypeVar("T")

_AGAIN_S = 0.5
"""Seconds after which what was not answered is asked for again; then after twice as many more."""
_SILENCE_S = 2.0
"""Seconds for which the first request may bring nothing; doubled for each further one."""
_TRIES = 3


async def first_answer(ask: Callable[[float], Coroutine[Any, Any, T]]) -> T:
    """Return the first answer to a request, which is made up to three times while nothing comes.

    ``ask`` makes it, and takes the seconds for which it may bring nothing. An error is an answer, except that a
    connection that is lost or silent leaves those that were made besides.
    """
    tasks: set[asyncio.Task[T]] = set()
    tried = 0
    try:
        while True:
            if tried < _TRIES:
                tasks.add(asyncio.get_running_loop().create_task(ask(_SILENCE_S * 2.0**tried)))
                tried += 1
            pause_s = None if tried == _TRIES else _AGAIN_S * 2.0 ** (tried - 1)
            done, pending = await asyncio.wait(tasks, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not pending or not isinstance(task.exception(), ConnectionLostError):
                    return task.result()
            tasks = pending
    finally:
        await cancel_all([task for task in tasks if not task.done()])
