"""Threads of plays, and a lock and prefill timings of each engine. Does not load torch.

Decoding takes milliseconds, in a few threads shared by all plays. A prefill may take long or never end, so each runs in
its own daemon thread, one at a time per engine. A GPU engine keeps one thread: libraries cache plans per thread.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from kvabr.client.prefill_timings import PrefillTimings, Timing, guess_of
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import SHORT, Engine, time_prefills
from kvabr.types.errors import ModelError

P = ParamSpec("P")
T = TypeVar("T")

_MIN_TOKENS, _MAX_TOKENS = 128, 16384
"""Bounds of the tokens of timed prefills; the number is halved until the model takes it."""
_ANY_TOKENS = range(64)
"""Token ids that every model has."""
_EXIT_S = 10.0
"""Seconds that process exit waits for engines. A later return to Python aborts the process: up to Python 3.13, a thread
that then requests the interpreter's lock is unwound, which C++ code does not allow."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Engine threads, including ended ones."""


def timed(clock: Callable[[], float], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return the result of ``work``, and its seconds on a clock."""
    began = clock()
    made = work(*args, **kwargs)
    return made, clock() - began


async def in_thread(work: Callable[[], T], lane: _Lane | None = None) -> T:
    """Run ``work`` in its own daemon thread, or a lane's; return its result or raise its error.

    Cancellation does not wait for the thread. Process exit does, briefly.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  # report it: the thread ends
            fit = isinstance(error, Exception) and not isinstance(error, StopIteration)  # futures accept only these
            done.set_exception(error if fit else RuntimeError(f"the engine's thread ended: {error!r}"))

    if lane is not None:
        lane.begin(run)
    else:
        thread = threading.Thread(target=run, name="kvabr-engine", daemon=True)
        thread.start()
        _threads.add(thread)
    return await asyncio.wrap_future(done)


class _Lane:
    """A daemon thread that runs work in order, until `close`."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, name="kvabr-gpu-engine", daemon=True).start()
        _lanes.add(self)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
            del work  # it refers to a play
            if self._waiting.empty():
                self._idle.set()

    def begin(self, work: Callable[[], None]) -> None:
        """Queue ``work``, which must not raise."""
        self._idle.clear()
        self._waiting.put(work)

    def wait(self, seconds: float) -> None:
        """Wait until all work is done, at most this long."""
        self._idle.wait(seconds)

    def close(self) -> None:
        """End the thread when all work is done."""
        self._waiting.put(None)


_lanes: weakref.WeakSet[_Lane] = weakref.WeakSet()


@atexit.register
def _wait_for_engines() -> None:
    until_s = time.monotonic() + _EXIT_S
    for lane in list(_lanes):
        lane.wait(max(0.0, until_s - time.monotonic()))
    for thread in list(_threads):
        thread.join(max(0.0, until_s - time.monotonic()))


async def on_engine(engine: Engine, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread after the engine's other work, unless cancelled by then."""
    unwanted = threading.Event()

    def in_turn() -> T:
        with _of(engine).lock:
            if unwanted.is_set():
                raise RuntimeError("nobody wants this any more")
            return work()

    try:
        return await in_thread(in_turn, lane_of(engine))
    finally:
        unwanted.set()


def timings_of(engine: Engine) -> PrefillTimings:
    """Return the engine's prefill timings in this process."""
    return _of(engine).timings


def measure_prefill(engine: Engine, tokens: Sequence[int] = ()) -> PrefillCost:
    """Return the cost of the engine's prefill; the first call for an engine times a few prefills, and blocks.

    Args:
        engine: the engine.
        tokens: ids of any text, repeated if too short. Empty: a few small ids.

    Raises:
        ModelError: the tokens do not fit the model.
    """
    kept = _of(engine)
    with kept.lock:
        if not kept.measured:
            some = list(tokens) or list(_ANY_TOKENS)
            kept.timings.timed(_timed(engine, (some * -(-_MAX_TOKENS // len(some)))[:_MAX_TOKENS]))
            kept.measured = True
        return kept.timings.cost()


def _timed(engine: Engine, tokens: list[int]) -> list[Timing]:
    """Time prefills of all sizes, with fewer tokens if the model's limit is lower."""
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
    lock: threading.Lock = field(default_factory=threading.Lock)
    measured: bool = False
    lane: _Lane | None = None


_ENGINES: weakref.WeakKeyDictionary[Engine, _OfEngine] = weakref.WeakKeyDictionary()
_ENGINES_LOCK = threading.Lock()


def _of(engine: Engine) -> _OfEngine:
    with _ENGINES_LOCK:
        found = _ENGINES.get(engine)
        if found is None:
            found = _ENGINES[engine] = _OfEngine(PrefillTimings(guess_of(engine)))
        return found


def lane_of(engine: Engine) -> _Lane | None:
    """Return the thread of a GPU engine; None for others."""
    if getattr(getattr(engine, "device", None), "type", "cpu") == "cpu":
        return None
    kept = _of(engine)
    with _ENGINES_LOCK:
        if kept.lane is None:
            kept.lane = _Lane()
            weakref.finalize(engine, kept.lane.close)
        return kept.lane
