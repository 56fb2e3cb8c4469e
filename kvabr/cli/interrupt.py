"""How a command ends: by itself, or by Ctrl-C, at the first in order, at the second at once.

The first raises `KeyboardInterrupt`, or cancels the task of `run_async`. From then on the signal has the system's
effect, so that neither cleaning up nor code that swallows exceptions can hold the process.

An exception that is raised while Python runs a destructor or a callback of a weak reference is dropped, and some
libraries catch everything while they are imported. So `KeyboardInterrupt` is raised again as long as it is not on its
way.
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
"""Seconds after which an interrupt that got lost is raised again."""
_came = threading.Event()
"""Whether this process has been interrupted."""


def run_in_order(command: Callable[[], int], *, alone: bool) -> int:
    """Run a command and return its exit status; the first Ctrl-C raises `KeyboardInterrupt`, the second ends it.

    After the first the process ends without taking the interpreter apart, which lasts a second once torch is loaded. So
    does a process that runs the command ``alone``, if it has used obstore: its threads would abort the process if one
    of them came back to Python meanwhile.
    """
    status = INTERRUPTED

    def leave() -> None:
        _leave(status)

    # What is registered first is called last: all others have cleaned up by then.
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
    if not _came.is_set():
        status = ended
        if not (alone and "obstore" in sys.modules):
            atexit.unregister(leave)
    return ended


def _leave(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(status)


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


def handled() -> None:
    """Tell that `KeyboardInterrupt` has reached its end: from now on it is not raised again."""
    if _came.is_set() and threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _raise() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, _again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    raise KeyboardInterrupt


def _again(*_: object) -> None:
    under_way = sys.exception()
    while under_way is not None and not isinstance(under_way, KeyboardInterrupt):
        under_way = under_way.__context__  # something else went wrong while it was handled
    if under_way is None:
        raise KeyboardInterrupt


@contextmanager
def _on_interrupt(first: Callable[[], None], usual: object) -> Iterator[None]:
    """Call ``first`` at the first Ctrl-C, unless the signal is ignored or has another handler than the usual one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not usual or not callable(before):
        yield
        return

    def handle(*_: object) -> None:
        _came.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        first()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if not _came.is_set():
            signal.signal(signal.SIGINT, before)
