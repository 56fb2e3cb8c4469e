"""What processes take of this machine: descriptors, memory, processor time."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def raise_files() -> int:
    """Let this process and its children open as many files as they may; return how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def peak_mib(pids: Iterable[int]) -> float:
    """Return the peak memory of processes (VmHWM), MiB; what they share counts for each."""
    found = 0.0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        found += int(peak[1]) / 1024 if peak else 0.0
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of processes so far."""
    found = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / TICKS
    return found


def descriptors(pids: Iterable[int]) -> int:
    """Return how many descriptors processes have open."""
    return sum(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()) for pid in pids)
