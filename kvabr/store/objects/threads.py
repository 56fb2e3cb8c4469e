"""Threads for requests that block outside Python, where Ctrl-C must not have to wait for a store that is silent.

Signals are handled in the main thread, and only while it runs Python. And a process waits for the threads of an
executor before it ends, but not for these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
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
