"""Pauses between attempts: each is twice as long as the one before."""

from __future__ import annotations

import random


def scattered(seconds: float) -> float:
    """Return half to one and a half of a pause, at random, so that many who failed together do not try together."""
    return seconds * random.uniform(0.5, 1.5)  # noqa: S311  # no secret


class Backoff:
    """The pauses of one thing that is tried again and again."""

    __slots__ = ("_first_s", "_most_s", "pause_s")

    def __init__(self, first_s: float, most_s: float) -> None:
        """Begin without a pause; the first has ``first_s`` seconds, none has more than ``most_s``."""
        self._first_s, self._most_s = first_s, most_s
        self.pause_s = 0.0
        """Seconds of the last pause; 0.0 before the first."""

    def longer(self) -> float:
        """Return the seconds of the next pause."""
        self.pause_s = min(self._most_s, max(self._first_s, 2 * self.pause_s))
        return self.pause_s

    def reset(self) -> None:
        """Begin again without a pause: an attempt has succeeded."""
        self.pause_s = 0.0
