"""The thread of each engine, and its prefill timings.

A prefill may take long or never end, so each engine has a daemon thread, always the same one: GPU libraries cache plans
per thread.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, ParamSpec, TypeVar

from kvabr.client.prefill_timings import PrefillTimings, Timing, guess_of
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import SHORT, Engine, time_prefills
from kvabr.types.errors import ModelError

P = ParamSpec("P")
T = TypeVar("T")

_MIN_TOKENS, _MAX_TOKENS = 128, 16384
"""Minimum and maximum tokens of a timed prefill; sizes above the model's limit are halved until one fits."""
_ANY_TOKENS = range(64)
_EXIT_S = 10.0
"""Seconds that process exit waits for engines: up to Python 3.13, a thread that takes the GIL after that is unwound,
which aborts C++ code."""


def timed(clock: Callable[[], float], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return the result of ``work``, and the seconds that it took."""
    began = clock()
    made = work(*args, **kwargs)
    return made, clock() - began


class WorkThread:
    """A daemon thread that runs work in order; it starts with the first and ends after `close`."""

    def __init__(self) -> None:
        self._waiting: Queue[tuple[Future[Any], Callable[[], Any]] | None] = Queue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` after earlier work, and return its result or raise its error.

        Cancellation drops work that has not begun, and does not affect other work.
        """
        done: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvabr-engine", daemon=True)
            self._thread.start()
            THREADS.add(self)
        self._waiting.put((done, work))
        return await asyncio.wrap_future(done)

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for all work to finish; return True if it has."""
        work = self._waiting
        with work.all_tasks_done:
            return work.all_tasks_done.wait_for(lambda: not work.unfinished_tasks, seconds)

    def close(self) -> None:
        """End the thread once all work is done."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            _work(*item)
            del item  # it refers to a play
            self._waiting.task_done()
        self._waiting.task_done()


def _work(done: Future[Any], work: Callable[[], Any]) -> None:
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  # reported to the caller: the thread goes on
            fit = isinstance(error, Exception) and not isinstance(error, StopIteration)  # futures accept only these
            done.set_exception(error if fit else RuntimeError(f"the engine's thread ended: {error!r}"))


THREADS: weakref.WeakSet[WorkThread] = weakref.WeakSet()


@atexit.register
def _wait_for_engines() -> None:
    until_s = time.monotonic() + _EXIT_S
    for thread in list(THREADS):
        thread.wait(max(0.0, until_s - time.monotonic()))


async def on_engine(engine: Engine, work: Callable[[], T]) -> T:
    """Run ``work`` in the engine's thread; see `WorkThread.run`."""
    return await _of(engine).thread.run(work)


def timings_of(engine: Engine) -> PrefillTimings:
    """Return the engine's prefill timings in this process."""
    return _of(engine).timings


def measure_prefill(engine: Engine, tokens: Sequence[int] = ()) -> PrefillCost:
    """Return the cost of the engine's prefill; the first call for an engine times a few prefills, and blocks.

    If plays use the engine, call this in the engine's thread. ``tokens``: ids of any text. Raises `ModelError` if they
    do not fit the model.
    """
    state = _of(engine)
    if not state.measured:
        some = list(tokens) or list(_ANY_TOKENS)
        state.timings.timed(_timed(engine, (some * -(-_MAX_TOKENS // len(some)))[:_MAX_TOKENS]))
        state.measured = True
    return state.timings.cost()


def _timed(engine: Engine, tokens: list[int]) -> list[Timing]:
    """Time prefills of several sizes, with fewer tokens if the model's limit is lower."""
    try:
        return time_prefills(engine, tokens)
    except ModelError:
        fewer = min(len(tokens), SHORT) // 2
        if fewer < _MIN_TOKENS:
            raise
    return _timed(engine, tokens[:fewer])


@dataclass(slots=True)
class _OfEngine:
    timings: PrefillTimings
    thread: WorkThread = field(default_factory=WorkThread)
    measured: bool = False


_ENGINES: weakref.WeakKeyDictionary[Engine, _OfEngine] = weakref.WeakKeyDictionary()
_ENGINES_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_ENGINES.clear)


def _of(engine: Engine) -> _OfEngine:
    with _ENGINES_LOCK:
        found = _ENGINES.get(engine)
        if found is None:
            found = _ENGINES[engine] = _OfEngine(PrefillTimings(guess_of(engine)))
            weakref.finalize(engine, found.thread.close)
        return found
