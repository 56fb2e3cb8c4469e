"""How much of a processor a process used, and how long it waited for one: tells a slow link from a busy machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the process began, or between two moments, seconds."""

    cpu_s: float
    """Of all its threads."""
    waited_s: float
    """That its main thread was ready to run and did not; 0 where the system does not tell."""
    wall_s: float

    @classmethod
    def now(cls) -> Self:
        """Of this process, so far."""
        return cls(time.process_time(), _waited(), time.monotonic())

    def since(self, before: Usage) -> Usage:
        """What came on top of ``before``."""
        return Usage(self.cpu_s - before.cpu_s, self.waited_s - before.waited_s, self.wall_s - before.wall_s)

    @property
    def busy(self) -> float:
        """Processors used, 1.0 being one of them all the time."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def waited(self) -> float:
        """Share of the time that the main thread waited for a processor."""
        return self.waited_s / self.wall_s if self.wall_s > 0 else 0.0


def _waited() -> float:
    """Linux keeps, in nanoseconds: time on a processor, time spent waiting for one, and a count."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
