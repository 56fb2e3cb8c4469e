"""Exponential pauses between attempts."""

from __future__ import annotations

import random


def scattered(seconds: float) -> float:
    """Return a pause multiplied by a random 0.5 to 1.5, so that clients that failed together retry at other times."""
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311  # no secret


class Backoff:
    """Pauses that double with each repeated attempt."""

    __slots__ = ("_first_s", "_max_s", "pause_s")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s, self._max_s = first_s, max_s
        self.pause_s = 0.0

    def longer(self) -> float:
        """Return the next pause in seconds."""
        self.pause_s = min(self._max_s, max(self._first_s, 2 * self.pause_s))
        return self.pause_s

    def reset(self) -> None:
        """Restart after a successful attempt."""
        self.pause_s = 0.0
