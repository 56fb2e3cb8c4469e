"""CPU-time limit for policies and estimators that never return, in real plays and in replays.

One thread of the process looks after all limited calls. It reads the CPU time of the threads that run them, and raises
`EndlessError` in a thread that has used too much. It ends when nothing is called any more. Sleep does not count, nor
does waiting for a core, so a slow or busy machine ends nothing. A call that holds the interpreter's lock throughout,
such as one long call into C, cannot be ended.

Only what is not kvabr's own is limited, call by call: what the player itself does is never counted, however long a
prompt is.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from kvabr.abr.estimator import Estimator, Prior
from kvabr.abr.plugins import shipped
from kvabr.player.policy_guard import CallLimit
from kvabr.types.errors import EndlessError, PolicyError

P = ParamSpec("P")
T = TypeVar("T")

MOST_PLAY_CPU_S = 20.0
"""Most CPU seconds of one call of a policy in a simulated play."""
MOST_STEP_CPU_S = 5.0
"""Most CPU seconds of one call of a policy in a real play."""
LEAST_STEP_CPU_S = 0.1
"""CPU seconds that a call may take even if the play's time is up."""
_LOOK_S = 0.1
_AGAIN_S = 1.0
"""CPU seconds after which the error is raised again, in case the first was swallowed."""
_INSTRUCTIONS = 1000
"""Turns of a loop in which an error that was set is raised for certain."""
_IDLE_LOOKS = 50
"""Looks without a call after which the thread ends."""


@dataclass(slots=True, eq=False)
class _Call:
    """One limited call, which runs in the thread that made it."""

    thread: int
    due_s: float
    """CPU time of the thread at which the error is raised."""
    place: str = ""
    """Where it was when the error was first raised; empty: it was not."""


class _Watch:
    """The calls that run, and the thread that looks after them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._begun = 0
        self._thread: threading.Thread | None = None
        self._sooner = threading.Event()
        """Set when a call begins that may be over before the next look."""

    def begin(self, limit_s: float) -> _Call:
        call = _Call(threading.get_ident(), _cpu_s() + limit_s)
        with self._lock:
            self._calls.add(call)
            self._begun += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvabr-cpu-limit", daemon=True)
                self._thread.start()
        if limit_s <= _LOOK_S:
            self._sooner.set()
        return call

    def end(self, call: _Call) -> None:
        """Forget a call. From here on nothing is raised in its thread. May be called twice."""
        with self._lock:
            self._calls.discard(call)
            if call.place:
                _take_back()

    def _run(self) -> None:
        idle, begun = 0, -1
        while True:
            with self._lock:
                idle = 0 if self._calls or self._begun != begun else idle + 1
                begun = self._begun
                if idle >= _IDLE_LOOKS:
                    self._thread = None
                    return
                wait_s = min((self._look_at(call) for call in self._calls), default=_LOOK_S)
            self._sooner.wait(min(wait_s, _LOOK_S))
            self._sooner.clear()

    @staticmethod
    def _look_at(call: _Call) -> float:
        """Raise the error in a call that has used up its time. Return the least seconds until it may have to be."""
        now_s = _cpu_s(call.thread)
        if now_s < call.due_s:
            return call.due_s - now_s
        call.due_s = now_s + _AGAIN_S
        if not call.place:
            frame = sys._current_frames().get(call.thread)  # noqa: SLF001 - the documented way to see another thread
            call.place = "unknown place" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        _raise_in(call.thread)
        return _AGAIN_S


def limited_step(left_s: Callable[[], float], call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make one call of a real play's policy, see `limited`; ``left_s`` says how many seconds the play should go on."""
    return limited(min(MOST_STEP_CPU_S, max(LEAST_STEP_CPU_S, left_s())), call, *args, **kwargs)


def limited_play(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make one call of a simulated play's policy, see `limited`."""
    return limited(MOST_PLAY_CPU_S, call, *args, **kwargs)


def limited(limit_s: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what ``call`` returns, or raise what it raises, unless it takes more than ``limit_s`` of CPU time.

    Raises:
        PolicyError: it took longer, or raised this itself; the message names the file and line.
    """
    watch = _watch
    running = watch.begin(limit_s)
    try:
        try:
            return call(*args, **kwargs)
        finally:
            watch.end(running)
    except (EndlessError, PolicyError) as error:
        watch.end(running)  # the error may have been raised just before the first attempt
        if not running.place:
            raise
        # A session knows the policy and its line. Elsewhere it was an estimator, or kvabr itself.
        said = str(error) if isinstance(error, PolicyError) else f"the play does not end ({running.place})"
        raise PolicyError(f"{said}; it was stopped after {limit_s:g} s of CPU time") from error


def limited_estimator(estimator: Estimator, limit: CallLimit) -> Estimator:
    """Return an estimator whose calls are limited, unless it is kvabr's own."""
    if shipped(estimator):
        return estimator
    cls = type(estimator)
    made = type(cls.__name__, (_LimitedEstimator,), {"name": getattr(cls, "name", cls.__name__)})
    limited: Estimator = made(estimator, limit)
    return limited


class _LimitedEstimator(Estimator):
    """Passes every call on to an estimator."""

    name = "limited"

    def __init__(self, inner: Estimator, limit: CallLimit) -> None:
        super().__init__()
        self._inner, self._limit = inner, limit

    def start(self, horizon_s: float) -> None:
        self._limit(self._inner.start, horizon_s)

    def prime(self, prior: Prior) -> None:
        super().prime(prior)
        self._limit(self._inner.prime, prior)

    def sample(self, nbytes: float, seconds: float, now: float) -> None:
        self._limit(self._inner.sample, nbytes, seconds, now)

    def waited(self, now: float) -> None:
        self._limit(self._inner.waited, now)

    def rate(self) -> float:
        return self._limit(self._inner.rate)

    def lower_bound(self) -> float:
        return self._limit(self._inner.lower_bound)

    def first_byte(self, seconds: float) -> None:
        self._limit(self._inner.first_byte, seconds)

    def ttfb(self) -> float:
        return self._limit(self._inner.ttfb)


def _cpu_s(thread: int | None = None) -> float:
    """Return the CPU seconds of a thread, by default this one; where the system cannot tell, of the process."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.thread_time() if thread is None else time.clock_gettime(time.pthread_getcpuclockid(thread))


def _raise_in(thread: int) -> None:
    """Raise `EndlessError` in a thread, at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(EndlessError))


def _take_back() -> None:
    """Take back an error that was set for this thread and may not have been raised yet.

    It is raised here and caught. CPython would also take NULL, but then keeps its flag that something is pending:
    every thread becomes slower for good, and 3.11 hangs once a profiler is set.
    """
    try:
        _raise_in(threading.get_ident())
        for _ in range(_INSTRUCTIONS):
            pass
    except EndlessError:
        pass


_watch = _Watch()


def _start_anew() -> None:
    """Forget the calls of the parent process, whose thread is not in this one."""
    global _watch  # noqa: PLW0603 - one per process
    _watch = _Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
