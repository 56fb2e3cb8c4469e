"""Run a command in several processes that share an address; the system assigns each connection to one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType

from kvabr.cli.interrupt import INTERRUPTED
from kvabr.types.errors import KvabrError, UsageError

MAX_PROCESSES = 64
_PASSED_ON = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
_MAX_KILLED, _WITHIN_S = 5, 60.0
"""Most killed processes that are restarted within these seconds; more mean that the machine is in trouble."""


def run_processes(count: int, work: Callable[[int], int]) -> int:
    """Run picklable ``work`` in ``count`` processes, with their numbers from 0, and return the exit status.

    Signals to end reach all processes. A killed process, as by a system out of memory, is started again, and standard
    error says so. If that happens too often, or a process ends normally, all end. The status is the largest of theirs,
    and at least 1 if one was killed and not replaced.
    """
    group = _Processes(count, work)
    before = {number: signal.signal(number, group.pass_on) for number in _PASSED_ON}
    try:
        for number in range(count):
            group.start(number)
        while (killed := group.killed()) and group.replaces(killed):
            for number, _ in killed:
                group.start(number)
        return group.end()
    finally:
        for process in group.running.values():
            process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Processes:
    def __init__(self, count: int, work: Callable[[int], int]) -> None:
        self._count, self._work = count, work
        self.running: dict[int, BaseProcess] = {}
        self._signalled = set[int | None]()
        """Processes that have received a signal to end."""
        self._ends: int | None = None
        """The signal to end, once received."""
        self._killed_s = deque[float](maxlen=_MAX_KILLED + 1)

    def start(self, number: int) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_run, args=(self._work, number))
        resource_tracker.ensure_running()  # or starting the process would unblock signals
        # The child blocks signals until it can handle them: see `_run`.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        try:
            process.start()
            self.running[number] = process
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        if self._ends is not None:  # received before this process was listed
            self.pass_on(self._ends, but=self._signalled.copy())

    def pass_on(self, number: int, _: FrameType | None = None, but: Collection[int | None] = ()) -> None:
        """Send a signal to all running processes."""
        if number != signal.SIGHUP:
            self._ends = number
        for process in self.running.values():
            if process.pid is not None and process.pid not in but and process.is_alive():
                if number != signal.SIGHUP:
                    self._signalled.add(process.pid)
                os.kill(process.pid, number)

    def killed(self) -> list[tuple[int, int]]:
        """Wait until a process ends; return numbers and statuses of killed ones, or none if one ended normally."""
        ready = wait([process.sentinel for process in self.running.values()])
        ended = [(number, process) for number, process in self.running.items() if process.sentinel in ready]
        for _, process in ended:
            process.join()  # sets its status
        codes = [(number, process.exitcode or 0) for number, process in ended]
        return codes if all(code < 0 for _, code in codes) else []

    def replaces(self, killed: list[tuple[int, int]]) -> bool:
        """Print which processes were killed, and return whether to restart them."""
        if self._signalled:
            return False
        now = time.monotonic()
        self._killed_s.extend(now for _ in killed)
        often = len(self._killed_s) > _MAX_KILLED and now - self._killed_s[0] < _WITHIN_S
        then = f"so were {_MAX_KILLED} others within a minute, so all end" if often else "it is started again"
        for number, code in killed:
            message = f"kvabr: process {number + 1} of {self._count} was killed (signal {-code}); {then}"
            print(message, file=sys.stderr, flush=True)
        return not often

    def end(self) -> int:
        """End all processes and return their status."""
        self.pass_on(signal.SIGTERM, but=self._signalled.copy())  # a second signal would skip draining
        for process in self.running.values():
            process.join()
        codes = [process.exitcode for process in self.running.values()]
        return max(1 if code is None or code < 0 else code for code in codes)


def _run(work: Callable[[int], int], number: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101  # this is a child

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # The parent forwards Ctrl-C, which a terminal sends to the whole group.
    os.setpgrp()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # no file has been read yet
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        raise SystemExit(work(number))
    except KeyboardInterrupt:  # before it serves
        raise SystemExit(INTERRUPTED) from None
    except KvabrError as error:
        print(f"kvabr: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
