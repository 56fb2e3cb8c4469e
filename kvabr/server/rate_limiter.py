"""How often a peer may ask: so many times a second, averaged over a second."""

from __future__ import annotations

import time


class Allowance:
    """What one connection may still ask for."""

    def __init__(self, rate: float) -> None:
        """All of a second's worth; ``rate`` is how many times a second."""
        self.rate = rate
        self._left, self._at_s = rate, time.monotonic()

    def take(self) -> bool:
        """Count one more; returns whether it is within the allowance. Those that are not run up a debt."""
        now = time.monotonic()
        self._left = min(self.rate, self._left + (now - self._at_s) * self.rate)
        self._at_s = now
        if self._left < 1:
            self._left = max(-self.rate, self._left - 1)
            return False
        self._left -= 1
        return True

    @property
    def overdrawn(self) -> bool:
        """Whether it asked for a second's worth more than it may: it will not listen to reason."""
        return self._left <= 1 - self.rate
