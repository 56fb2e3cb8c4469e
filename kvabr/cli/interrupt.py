"""Ctrl-C: the first ends a command in order, the second at once, whatever the command is in the middle of.

The first raises `KeyboardInterrupt`, or cancels the task of `run_async`. From then on the signal has the system's
effect, so that neither cleaning up nor code that swallows exceptions can hold the process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def first_in_order() -> Iterator[None]:
    """Let the first Ctrl-C raise `KeyboardInterrupt` in the body, and the second end the process."""
    with _on_interrupt(_raise, signal.default_int_handler):
        yield


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own; the first Ctrl-C cancels it.

    Raises:
        KeyboardInterrupt: It was cancelled by Ctrl-C.
    """
    import asyncio

    interrupted = False

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def cancel() -> None:
            nonlocal interrupted
            interrupted = True
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)

        with _on_interrupt(cancel, signal.getsignal(signal.SIGINT)):
            return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise


def _raise() -> None:
    raise KeyboardInterrupt


@contextmanager
def _on_interrupt(first: Callable[[], None], usual: object) -> Iterator[None]:
    """Call ``first`` at the first Ctrl-C, unless the signal is ignored or has another handler than the usual one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not usual or not callable(before):
        yield
        return
    came = False

    def handle(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        first()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if not came:
            signal.signal(signal.SIGINT, before)
