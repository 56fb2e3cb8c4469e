"""Watch processes that are not children of the test."""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

LIMIT_S = 300.0
"""Real seconds that something may take on the slowest machine."""
_TRACKER = "resource_tracker"
"""Python's own helper, which is no worker."""


def gone(pid: int, within_s: float = LIMIT_S) -> bool:
    """Wait for the end of a process; return whether it came."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def ignores(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def workers_of(pid: int, least: int, *, deaf: bool = False) -> list[int]:
    """Wait until a process has enough children, and return their ids.

    Args:
        pid: the process.
        least: the number that is enough.
        deaf: count only children that ignore Ctrl-C, as pools of workers do once they are ready.
    """
    end_s = time.monotonic() + LIMIT_S
    while True:
        named = []
        with contextlib.suppress(OSError):  # a thread or a child that has just ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in map(int, (task / "children").read_text().split()):
                    tracker = _TRACKER in Path(f"/proc/{child}/cmdline").read_text()
                    if not tracker and (not deaf or ignores(child, signal.SIGINT)):
                        named.append(child)
        if len(named) >= least:
            return named
        assert time.monotonic() < end_s, f"process {pid} has {len(named)} workers of {least}"
        time.sleep(0.01)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
