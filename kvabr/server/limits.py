"""Limits on clients, and the errors that refuse requests beyond them."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from kvabr.moqt.codes import RequestCode, code_of
from kvabr.types.errors import NotFoundError, Reason, RequestError, TransportError, UnauthorizedError, UsageError

MISSING = "no such track, or you may not read it"
BUSY_MS = 1000
"""Milliseconds after which a client that was refused because of load may retry."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on connections, requests, open groups and bytes in flight."""

    connections: int = 512
    """Maximum connections at a time."""
    connections_per_address: int = 480
    """Maximum connections at a time of one IPv4 address or IPv6 /64 network."""
    requests_per_connection: int = 1024
    """Maximum requests in flight on one connection. A play requests the base of all its groups at once."""
    requests: int = 8192
    """Maximum requests in flight on all connections together."""
    requests_per_s: float = 2000.0
    """Maximum requests per second on one connection, and maximum priority updates; bursts may use a second's worth."""
    idle_s: float = 60.0
    """Seconds after which a silent connection is closed."""
    handshake_s: float = 10.0
    """Seconds within which a new connection's SETUP must arrive."""
    memory_per_connection: int = 64 << 20
    """Maximum bytes of groups in memory for one connection; see `kvabr.server.budgets`."""
    memory_per_address: int = 128 << 20
    """The same for one address."""
    memory: int = 256 << 20
    """The same for all connections together. Larger groups are refused."""
    in_flight_per_connection: int = 16 << 20
    """Maximum bytes in flight on one connection: sent but not acknowledged."""
    in_flight_per_address: int = 128 << 20
    """The same for one address. At this limit each of its connections gets an equal share."""
    in_flight: int = 256 << 20
    """The same for all connections together."""

    def __post_init__(self) -> None:
        for bound in fields(self):
            value, name = getattr(self, bound.name), bound.name.replace("_", "-")
            if not 0 < value < 1 << 53:
                why = "is too large" if value > 0 else "is not positive"
                raise UsageError(f"limit {name}: {value} {why}; the default is {getattr(ServerLimits(), bound.name)}")


class RateLimiter:
    """A token bucket that holds a second's worth of requests."""

    def __init__(self, rate: float) -> None:
        """Start full; ``rate`` is in requests per second."""
        self.rate = rate
        self._left, self._at_s = rate, time.monotonic()

    def take(self) -> bool:
        """Count a request, and return True if it is within the rate. Requests beyond the rate add to a debt."""
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
        """True if the debt has reached a second's worth of requests: the client ignores refusals."""
        return self._left <= 1 - self.rate


def refusal(error: Exception) -> tuple[RequestCode, str, int | None]:
    """Return code, reason, and milliseconds until a retry, for the REQUEST_ERROR after a failure."""
    if not isinstance(error, TransportError):  # the text has file names
        return RequestCode.INTERNAL_ERROR, "the publisher cannot read that group", None
    if isinstance(error, UnauthorizedError):
        return RequestCode.UNAUTHORIZED, "the origin refuses the relay's token", None
    if isinstance(error, NotFoundError):
        return RequestCode.DOES_NOT_EXIST, MISSING, None
    if isinstance(error, RequestError) and error.reason != Reason.OTHER:
        code, retry_ms = code_of(error.reason), None
        if error.retry_after_s is not None or code == RequestCode.EXCESSIVE_LOAD:
            retry_ms = BUSY_MS if error.retry_after_s is None else int(1000 * error.retry_after_s)
        return code, str(error), retry_ms
    return RequestCode.INTERNAL_ERROR, f"the origin does not answer: {error}", BUSY_MS
