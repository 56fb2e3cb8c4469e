"""How long this process was ready to run and did not: because others had the processors, or because it was stopped.

A play that returns late on a busy machine says nothing about the player. A thread ticks, and what it is late by counts
unless this process used the processors meanwhile: waiting for its own interpreter lock or event loop is its own fault.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from pathlib import Path

TICK_S = 0.02
_JITTER_S = 0.001
"""What a tick is late by on any machine."""
_KEPT = 20_000


class Starvation:
    """Measures from its creation until `close`."""

    def __init__(self) -> None:
        self._main = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat")
        self._lock = threading.Lock()
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._totals: deque[float] = deque(maxlen=_KEPT)
        self.total_s = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._run, name="starvation", daemon=True).start()

    def between(self, begin_s: float, end_s: float) -> float:
        """Seconds of starvation between two times of `time.monotonic`, to the tick; call it a few ticks later."""
        with self._lock:
            times, totals = list(self._times), list(self._totals)
        if not times:
            return 0.0
        first = max(0, bisect_right(times, begin_s) - 1)
        last = min(len(times) - 1, bisect_left(times, end_s))
        return totals[last] - totals[first]

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        before, used, queued = time.monotonic(), time.process_time(), self._queued()
        while not self._over.is_set():
            time.sleep(TICK_S)
            now, spent, waited = time.monotonic(), time.process_time(), self._queued()
            stopped = now - before - TICK_S - _JITTER_S - (spent - used)
            self.total_s += max(0.0, stopped, waited - queued)
            with self._lock:
                self._times.append(now)
                self._totals.append(self.total_s)
            before, used, queued = now, spent, waited

    def _queued(self) -> float:
        """Seconds that the main thread has waited for a processor; 0 where the system does not say."""
        try:
            return int(self._main.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0
