"""The threads in which caches are encoded beside an engine, and how much of the engine's time they may take.

One thread has a low priority; on a machine whose processors are all busy it gets its share nevertheless, and an engine
whose threads wait for each other is delayed by all that it takes. The other one is *patient*: it has idle priority and
takes only idle processor time. A cache that is being computed is encoded in the first as long as its
`EncodingBudget` lasts, then in the second; once it is computed, in the first. What the second has begun by then it
finishes at the priority of the first. Where a process may not raise a priority again, the patient one is only the
lowest that is not idle, so that what it has begun never waits for long.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

SHARE = 0.03
"""Share of the time of a prefill by which encoding may delay it. Copying what was computed comes on top."""
_NICENESS, _PATIENT_NICENESS = 10, 19
"""Niceness of the threads, so that the engine goes first; the latter where there is no idle priority."""


class EncodingBudget:
    """How far one prefill may be delayed by encoding what it has computed so far. It reads no clock."""

    def __init__(self, share: float = SHARE) -> None:
        """Begin with nothing spent; ``share`` is that of the prefill's time."""
        self._share, self._taken_s, self._steps = share, 0.0, 0

    def spend(self, cpu_s: float, wall_s: float) -> None:
        """Handle one step: its processor time, and how long it took.

        It has taken no more from the engine than its processor time, and no more than it had to wait itself: who never
        waits for a processor uses one that is idle.
        """
        self._taken_s += min(cpu_s, max(0.0, wall_s - cpu_s))
        self._steps += 1

    def allows(self, elapsed_s: float) -> bool:
        """Return whether another step like those before fits in, so long after the prefill has begun."""
        expected_s = self._taken_s / self._steps if self._steps else 0.0
        return self._taken_s + expected_s <= self._share * elapsed_s


def encoding_thread(*, patient: bool = False) -> ThreadPoolExecutor:
    """Return a thread of low priority, in which torch uses one core: the others are the engine's."""
    threads = torch.get_num_threads()
    name, begin = ("kvabr-publish-idle", _be_patient) if patient else ("kvabr-publish", _be_nice)
    made = ThreadPoolExecutor(1, name, initializer=begin)
    made.submit(int).result()
    _use(threads)  # what was set in the thread is also the default of threads to come
    return made


def _be_nice(by: int = _NICENESS) -> None:
    torch.get_num_threads()  # takes the default, once for each thread
    _use(1)
    with contextlib.suppress(OSError, AttributeError):  # threads have no priority of their own except on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), by)


def _be_patient() -> None:
    _be_nice(_NICENESS if _may_hurry() else _PATIENT_NICENESS)


@cache
def _may_hurry() -> bool:
    """Return whether a thread of this process may leave idle priority; a thread finds out that ends then."""
    found: list[bool] = []

    def find_out() -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            found.append(True)

    thread = threading.Thread(target=find_out)
    thread.start()
    thread.join()
    return bool(found)


def calm_down() -> None:
    """Give this thread idle priority, if `hurry` can take it away again."""
    if _may_hurry():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def hurry(thread: int) -> None:
    """Give a thread its usual priority, by its native number; it may have ended."""
    if _may_hurry():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _use(threads: int) -> None:
    # vLLM's workers for CPUs put a function in the place of `torch.set_num_threads` that does nothing.
    torch._C.set_num_threads(threads)  # noqa: SLF001
