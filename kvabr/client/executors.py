"""The threads of the client, and what it keeps of each engine while it lives: a lock, and the cost of a prefill.

Decoding takes milliseconds and runs in a few threads that all plays share. A prefill may take long, or for ever, so
each has a thread of its own that nobody waits for; a lock per engine sees to it that an engine does one thing at a
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine, time_prefills

T = TypeVar("T")

_DECODERS = 4
"""Threads that decode, at most; no more than there are cores."""
_LEAST_TOKENS = 128
"""Tokens that timing a prefill takes."""
_MOST_TOKENS = 1024
"""Tokens that it is timed on: enough to tell the three constants of the cost apart."""


@cache
def decoders() -> ThreadPoolExecutor:
    """The threads that decode for every play of this process."""
    return ThreadPoolExecutor(min(_DECODERS, os.cpu_count() or 1), thread_name_prefix="kvabr-decode")


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, done in a thread of its own; cancelling this does not wait for it.

    The thread is a daemon: a prefill that is no longer wanted must not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # whatever it is, it must not be lost with the thread
            _settle(loop, done, error=error)
        else:
            _settle(loop, done, result)

    threading.Thread(target=run, name="kvabr-engine", daemon=True).start()
    return await done


def _settle(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[T],
    result: T | None = None,
    *,
    error: BaseException | None = None,
) -> None:
    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            done.set_exception(error)
        else:
            done.set_exception(RuntimeError(f"the engine's thread ended: {error!r}"))

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(settle)


async def on_engine(engine: Engine, work: Callable[[], T]) -> T:
    """Do ``work`` in a thread, after whatever the engine does for other plays; not at all if cancelled by then."""
    unwanted = threading.Event()

    def in_turn() -> T:
        with _of(engine).lock:
            if unwanted.is_set():
                raise RuntimeError("nobody wants this any more")
            return work()

    try:
        return await in_thread(in_turn)
    finally:
        unwanted.set()


def known_cost(engine: Engine) -> PrefillCost | None:
    """What a prefill of the engine costs, if it has been timed."""
    return _of(engine).cost


def prefill_cost(engine: Engine, tokens: Sequence[int]) -> PrefillCost:
    """What a prefill of the engine costs; timed once in an engine's life. Blocks for a few prefills.

    Call it when a server starts, so that its first play need not.

    Args:
        engine: the engine.
        tokens: ids of any text; which, and how many, does not matter.

    Raises:
        ModelError: the tokens do not fit the model.
    """
    kept = _of(engine)
    with kept.lock:
        if kept.cost is None:
            enough = list(tokens) * -(-_LEAST_TOKENS // max(1, len(tokens)))
            kept.cost = time_prefills(engine, enough[:_MOST_TOKENS])
        return kept.cost


@dataclass(slots=True)
class _Kept:
    lock: threading.Lock = field(default_factory=threading.Lock)
    cost: PrefillCost | None = None


_KEPT: weakref.WeakKeyDictionary[Engine, _Kept] = weakref.WeakKeyDictionary()
_KEPT_LOCK = threading.Lock()


def _of(engine: Engine) -> _Kept:
    with _KEPT_LOCK:
        kept = _KEPT.get(engine)
        if kept is None:
            kept = _KEPT[engine] = _Kept()
        return kept
