"""The encoding threads, and the limit of the delay that they cause to an engine.

The regular thread has a low priority, but on a loaded machine it still delays an engine with waiting threads. The
*patient* thread uses only idle processor time. Caches are encoded in the regular thread. During a prefill, once the
`EncodingBudget` is spent, they are encoded in the patient thread. When the prefill ends, the patient thread finishes
its step at the regular thread's priority. If a process may not raise a priority again, the patient thread has the
lowest regular priority.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

SHARE = 0.03
"""Maximum delay of a prefill by encoding, as a fraction of its time."""
_NICENESS, _PATIENT_NICENESS = 10, 19
"""Nice values of the two threads; the second is for systems without idle priority."""


class EncodingBudget:
    """Limits the delay of one prefill by encoding. Reads no clock."""

    def __init__(self, share: float = SHARE) -> None:
        self._share, self._taken_s, self._steps = share, 0.0, 0

    def spend(self, cpu_s: float, wall_s: float) -> None:
        """Record one step. It delayed the engine by at most its processor time, and by at most its own waiting time."""
        self._taken_s += min(cpu_s, max(0.0, wall_s - cpu_s))
        self._steps += 1

    def allows(self, elapsed_s: float) -> bool:
        """Return True if another step of average length fits the budget ``elapsed_s`` after the prefill's start."""
        expected_s = self._taken_s / self._steps if self._steps else 0.0
        return self._taken_s + expected_s <= self._share * elapsed_s


def encoding_thread(*, patient: bool = False) -> ThreadPoolExecutor:
    """Return an executor with one low-priority thread; torch uses one core in it."""
    threads = torch.get_num_threads()
    name, begin = ("kvabr-publish-idle", _be_patient) if patient else ("kvabr-publish", _be_nice)
    made = ThreadPoolExecutor(1, name, initializer=begin)
    made.submit(int).result()
    _use(threads)  # new threads inherit this as their default
    return made


def _be_nice(by: int = _NICENESS) -> None:
    torch.get_num_threads()  # apply the default, once per thread
    _use(1)
    with contextlib.suppress(OSError, AttributeError):  # only Linux threads have their own priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), by)


def _be_patient() -> None:
    _be_nice(_NICENESS if _can_leave_idle_priority() else _PATIENT_NICENESS)


@cache
def _can_leave_idle_priority() -> bool:
    """Test in a temporary thread whether a thread may leave idle priority."""
    found: list[bool] = []

    def probe() -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            found.append(True)

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return bool(found)


def yield_priority() -> None:
    """Give this thread idle priority, provided that `restore_priority` can undo it."""
    if _can_leave_idle_priority():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def restore_priority(thread: int) -> None:
    """Restore the usual priority of a thread, given by its native id."""
    if _can_leave_idle_priority():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _use(threads: int) -> None:
    # vLLM's CPU workers replace `torch.set_num_threads` by a no-op.
    torch._C.set_num_threads(threads)  # noqa: SLF001
