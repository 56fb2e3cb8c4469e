"""What peers may take of a server. Beyond that they are refused or slowed down, never served from more memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from kvabr.types.errors import UsageError


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on connections and requests."""

    connections: int = 512
    """Connections at a time."""
    requests_per_connection: int = 128
    """Requests in flight on one connection."""
    requests: int = 8192
    """Requests in flight on all connections together."""
    requests_per_s: float = 2000.0
    """Requests per second of one connection, averaged over a second; as many priority updates."""
    idle_s: float = 60.0
    """Seconds until a silent connection is closed."""
    handshake_s: float = 10.0
    """Seconds until a new connection's SETUP must have arrived."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 1 << 53:
                raise UsageError(f"limit {field.name.replace('_', '-')}: {value} is not positive")


class RateLimiter:
    """A token bucket that holds one second's worth of requests."""

    def __init__(self, rate: float) -> None:
        """Start with a full bucket; ``rate`` is requests per second."""
        self.rate = rate
        self._left, self._at_s = rate, time.monotonic()

    def take(self) -> bool:
        """Count a request, and return whether it is within the rate. Those that are not run up a debt."""
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
        """Whether the debt has reached a second's worth of requests: the peer ignores refusals."""
        return self._left <= 1 - self.rate
