"""A command that runs in several processes that share an address: the system gives each connection to one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from types import FrameType

from kvabr.cli.interrupt import INTERRUPTED
from kvabr.types.errors import KvabrError, UsageError

MOST_PROCESSES = 64


def run_processes(count: int, work: Callable[[int], int]) -> int:
    """Run ``work`` in ``count`` processes, which it is given the numbers of, from 0 on; return the exit status.

    Signals to end reach all of them. If one ends by itself, the others end as well, so that nothing is served by a part
    of them. The status is the largest of theirs, and at least 1 if one was killed. ``work`` must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run, args=(work, number)) for number in range(count)]
    told = set[int]()

    def pass_on(number: int, _: FrameType | None, but: Collection[int] = ()) -> None:
        for process in processes:
            if process.pid is not None and process.pid not in but and process.is_alive():
                if number != signal.SIGHUP:
                    told.add(process.pid)
                os.kill(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for process in processes:
            process.start()
        wait([process.sentinel for process in processes])
        pass_on(signal.SIGTERM, None, told.copy())  # a second one would cut short what they finish
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = [process.exitcode for process in processes]
    return max(1 if code is None or code < 0 else code for code in codes)


def _run(work: Callable[[int], int], number: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101  # this is a child

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # The parent passes on Ctrl-C, which a terminal sends to all.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    try:
        raise SystemExit(work(number))
    except KeyboardInterrupt:  # before it serves
        raise SystemExit(INTERRUPTED) from None
    except KvabrError as error:
        print(f"kvabr: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
