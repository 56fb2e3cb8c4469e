"""Ctrl-C: the first ends a command in order, the second at once.

The first raises `KeyboardInterrupt`, or cancels the task of `run_async`, and restores the signal's default effect, so
that cleanup cannot block the process.

Python drops exceptions that are raised in destructors and weak reference callbacks, and some libraries catch all
exceptions while they are imported. So `KeyboardInterrupt` is raised repeatedly until it is handled.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
_AGAIN_S = 0.1
"""Seconds after which a lost interrupt is raised again."""
_interrupted = threading.Event()
"""Set once this process has been interrupted."""


def run_in_order(command: Callable[[], int], *, alone: bool) -> int:
    """Run a command and return its exit status; the first Ctrl-C raises `KeyboardInterrupt`, the second ends it.

    After Ctrl-C, the process skips the interpreter's shutdown, which takes a second once torch is loaded. So does a
    process that runs only this command (``alone``) if it has used obstore: a thread of obstore that returns to Python
    would abort.
    """
    status = INTERRUPTED

    def leave() -> None:
        _leave(status)

    # Registered first, so called last, after all other cleanup.
    atexit.register(leave)
    try:
        with _on_interrupt(_raise, signal.default_int_handler):
            try:
                ended = command()
            finally:
                handled()
    except BaseException:
        atexit.unregister(leave)
        raise
    if not _interrupted.is_set():
        status = ended
        if not (alone and "obstore" in sys.modules):
            atexit.unregister(leave)
    return ended


def _leave(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(status)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop; the first Ctrl-C cancels it.

    Raises:
        KeyboardInterrupt: Ctrl-C cancelled it.
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


def handled() -> None:
    """Stop raising `KeyboardInterrupt` again, since it was handled."""
    if _interrupted.is_set() and threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _raise() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, _again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    raise KeyboardInterrupt


def _again(*_: object) -> None:
    current = sys.exception()
    while current is not None and not isinstance(current, KeyboardInterrupt):
        current = current.__context__  # another exception was raised while it was handled
    if current is None:
        raise KeyboardInterrupt


@contextmanager
def _on_interrupt(first: Callable[[], None], usual: object) -> Iterator[None]:
    """Call ``first`` at the first Ctrl-C, unless the signal is ignored or has a handler other than ``usual``."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not usual or not callable(before):
        yield
        return

    def handle(*_: object) -> None:
        _interrupted.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        first()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if not _interrupted.is_set():
            signal.signal(signal.SIGINT, before)
